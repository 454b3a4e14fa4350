"""A session ends, breaks or forges its own interpreter, or the sandbox is killed: that session alone is lost."""
import asyncio
import signal
import subprocess
import sys

import psutil
import pytest
from attacks import CALL_ITSELF, LIMITS, attack, gone, in_session, named

from sao_megatron.sandbox.pool import Pool
from sao_megatron.sandbox.session import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")


# If one fails, a cell that ends its interpreter ends more than that, or is not reported.
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)",
                                  "import os; os.abort()", "import ctypes; ctypes.string_at(0)",
                                  "import os; os.close(3); os.close(4)", "import os; os.closerange(0, 99)",
                                  "import os; os.execv('/bin/true', ['true'])"])
async def test_ending_the_interpreter(pool, code):
    result = await attack(pool, code)
    assert (result.status, result.alive) == ("ended", False)


# If one fails, code that leaves or breaks its streams loses the session, though it need not.
@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise KeyboardInterrupt", "exit()", "input()",
                                  "raise BaseException", "import sys; sys.stdout.close(); print(1)", "x = (",
                                  "print('\\ud800')\n1 / 0", "'\0'", "def f(): f()\nf()"])
async def test_error_keeps_the_session(pool, code):
    result, after = await in_session(pool, code, "41 + 1")
    assert result.status == "error" and result.alive and result.output
    assert after.output == "42\n"


# If one fails, forged results end more than their own session, or keep us waiting.
@pytest.mark.parametrize("code", [
    "import os, time\nos.write(4, b'+')\ntime.sleep(0.3)\nprint('late')",
    "import os\nos.write(4, b'-+-+' * 100)",
    "import os\nos.write(1, b'\\x10\\0\\0\\0{\"status\": \"ok\"}')",
    "import os\nos.write(4, b'{}' * 20000)",
    "import os\nwhile True: os.write(4, b'{\"alive\"')"])
async def test_forging_the_protocol(pool, code):
    result = await attack(pool, code, "1", "2", seconds=1)
    assert result.status in ("ok", "error", "timeout") and result.seconds < 4


# If this fails, sessions of the run die with their owner's crash only later, or never.
async def test_owner_killed(tmp_path):
    script = f"""
import asyncio
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
async def main():
    async with Pool(Limits(), 2, 1, 1, []) as pool:
        session = await pool.open()
        await session.run({CALL_ITSELF.format("orphan")!r} + "import os\\nif os.fork() == 0:\\n    os.setsid()\\n"
                          "    while True: pass")
        print("running", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert await asyncio.to_thread(owner.stdout.readline) == b"running\n"
        assert named("orphan")
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert await gone("orphan")


# If this fails, a machine that ends the sandbox's processes passes for a fault of the model's code, or ends the run.
async def test_template_killed():
    async with Pool(LIMITS, sessions=2, cells=2, warm=1, modules=[]) as pool:
        session = await pool.open()
        await session.run("x = 1")
        psutil.Process(pool._template.process.pid).kill()
        with pytest.raises(SandboxError, match="killed from outside"):
            await session.run("import time; time.sleep(1)")
        while pool._template.alive:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert (await in_session(pool, "2"))[0].output == "2\n"
