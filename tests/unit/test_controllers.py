"""Several controllers as one role: when one fails, all end, and the log says which."""
from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from sao_megatron.errors import RunError
from sao_megatron.roles import _beside


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


# If this fails, a run goes on with a part of its prompts never dealt, or waits for a controller that is gone.
def test_a_controller_that_fails_ends_the_others():
    cancelled = []

    async def own():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
    others = [python("import time; time.sleep(0.2)"), python("raise SystemExit(1)")]
    with pytest.raises(RunError, match="controller 2 of 3 failed"):
        asyncio.run(_beside(others, own()))
    assert cancelled
    others[0].wait()


# If this fails, the role ends while one of its controllers still writes, or hides the error of its own.
def test_the_role_ends_with_the_last_controller():
    async def own():
        return None

    async def failing():
        raise RunError("the engine is gone")
    begin = time.monotonic()
    asyncio.run(_beside([python("import time; time.sleep(0.3)")], own()))
    assert time.monotonic() - begin >= 0.3
    other = python("import time; time.sleep(60)")
    with pytest.raises(RunError, match="the engine is gone"):
        asyncio.run(_beside([other], failing()))
    other.kill()
    other.wait()
