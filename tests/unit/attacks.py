"""Attacks on the sandbox, each in a real one: the attack fails, and neighbours and successors work."""
import asyncio

import psutil

from sao_megatron.sandbox.limits import Limits

LIMITS = Limits(seconds=15, cpu_seconds=2, memory_mb=96, disk_mb=8, file_mb=4, processes=12, output=2000)
CALL_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}')\n"


async def in_session(pool, *cells, seconds=None):
    """Results of cells run one after another in one session."""
    session = await pool.open()
    try:
        return [await session.run(cell, seconds) for cell in cells]
    finally:
        await session.close()


async def attack(pool, *cells, seconds=None):
    """The last cell's result, each after at most so many seconds. Afterwards the next session must work."""
    result = (await in_session(pool, *cells, seconds=seconds))[-1]
    [after] = await in_session(pool, "6 * 7")
    assert (after.status, after.output) == ("ok", "42\n")
    return result


def named(name):
    """Processes of this machine that call themselves so."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


async def gone(name):
    """Whether they all end within some seconds."""
    for _ in range(100):
        if not named(name):
            return True
        await asyncio.sleep(0.05)
    return False
