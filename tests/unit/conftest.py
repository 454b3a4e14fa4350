"""A sandbox to attack, and the processes that a test has started."""
import psutil
import pytest
import pytest_asyncio
from attacks import LIMITS

from sao_megatron.sandbox.pool import Pool
from sao_megatron.sandbox.session import SandboxError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    """Sessions of attacks.LIMITS, two of which may run code at a time.

    They need a machine that lets a user make namespaces; where it does not, the sandbox refuses to start.
    """
    try:
        async with Pool(LIMITS, sessions=4, cells=2, warm=1, modules=[]) as pool:
            await pool.check()
            yield pool
    except SandboxError as error:
        if "isolate" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def descendants():
    """descendants(): processes that this test has started; the session may have an engine of its own."""
    def pids() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}
    before = pids()
    return lambda: sorted(pids() - before)
