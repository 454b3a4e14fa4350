"""A session takes no more of the machine than it may: processes, memory, processor time, disk, output."""
import asyncio
import time
from dataclasses import replace

import pytest
from attacks import CALL_ITSELF, LIMITS, attack, gone, in_session, named

from sao_megatron.sandbox.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="module")


# If this fails, a session has more processes than it may, or a fork bomb hinders whoever comes after.
async def test_fork_bomb(pool):
    result = await attack(pool, """
import os
refused = 0
while True:
    try:
        os.fork()
    except BlockingIOError:
        refused += 1
""", seconds=0.5)
    assert result.status in ("cpu", "timeout") and not result.alive


# If this fails, threads are not counted as processes are.
async def test_thread_bomb(pool):
    result = await attack(pool, """
import threading, time
for count in range(1000):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
""")
    assert result.status == "error" and "can't start new thread" in result.output


# If one fails, a session can take the memory of the machine: in one process, or spread over many.
@pytest.mark.parametrize("code, message", [
    ("x = bytearray(2**30)", "MemoryError"),
    ("import mmap; mmap.mmap(-1, 2**30)", "Cannot allocate memory"),
    ("import os; os.memfd_create('x')", "Operation not permitted"),
    ("import ctypes; c = ctypes.CDLL(None, use_errno=True); c.shmget(0, 2**20, 0o1600), ctypes.get_errno()",
     "(-1, 1)"),
])
async def test_memory_bomb(pool, code, message):
    result = await attack(pool, code)
    assert message in result.output and result.alive


# If this fails, the memory of a session's processes is not added up.
async def test_memory_bomb_of_many_processes(pool):
    result = await attack(pool, """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(os.urandom(1)) * (40 * 2**20)
        time.sleep(100)
time.sleep(100)
""")
    assert (result.status, result.alive) == ("memory", False)


# If one fails, endless output fills our memory, blocks us, or is passed on to the model without end or notice.
@pytest.mark.parametrize("code", ["while True: print('x' * 1000)",
                                  "import os\nwhile True: os.write(1, b'x')",
                                  "import sys\nwhile True: sys.stderr.write('e' * 4096)"])
async def test_endless_output(pool, code):
    result = await attack(pool, code, seconds=0.4)
    assert result.status in ("timeout", "cpu") and len(result.output) < LIMITS.output + 100
    assert "bytes of output left out" in result.output


# If this fails, one line of 20 MB is held in memory, or the end of an output is lost.
async def test_huge_line(pool):
    [result] = await in_session(pool, "import sys\nfor _ in range(20): sys.stdout.write('y' * 10**6)\nprint('end')")
    assert result.status == "ok" and result.output.startswith("yyy") and result.output.endswith("yend\n")
    assert f"[… {20 * 10**6 + 4 - LIMITS.output} bytes of output left out …]" in result.output


# If this fails, code that does not end keeps its core, or code that can be interrupted loses the session's variables.
async def test_endless_loop(pool):
    assert (await attack(pool, "while True: pass", seconds=0.2)).status == "timeout"
    *_, result, after = await in_session(pool, "x = 5", "while True: pass", "x", seconds=0.2)
    assert result.alive and "variables are kept" in result.text() and after.output == "5\n"


DEAF = [
    "import time\nwhile True:\n    try:\n        time.sleep(0.01)\n    except BaseException: pass",
    "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, lambda *_: None)\nwhile True: signal.pause()",
    "sum(iter(int, 1))",
]


# If this fails, code that refuses to be interrupted outlives its time.
@pytest.mark.slow
async def test_refusing_to_be_interrupted(pool):
    results = await asyncio.gather(*(attack(pool, code, seconds=0.2) for code in DEAF))
    for code, result in zip(DEAF, results, strict=True):
        assert result.status in ("timeout", "cpu") and result.seconds < 4, code
        assert not result.alive and "all variables are lost" in result.text(), code


# If this fails, a process that a cell leaves behind survives its session: detached, deaf to SIGTERM, forking on.
async def test_daemon_ends_with_its_session(pool):
    session = await pool.open()
    result = await session.run(CALL_ITSELF.format("bandit") + """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in set(range(1, 65)) - {9, 19, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.05)
print("left behind")
""")
    assert result.output == "left behind\n"
    assert named("bandit")
    await session.close()
    assert await gone("bandit")


# If this fails, what a cell leaves running uses a core for as long as its trajectory lives.
@pytest.mark.slow
async def test_processor_time_between_cells(pool):
    async with Pool(replace(LIMITS, cpu_seconds=0.2), sessions=1, cells=1, warm=0, modules=[]) as small:
        session = await small.open()
        await session.run(CALL_ITSELF.format("miner") + "import os\nif os.fork() == 0:\n    while True: pass")
        assert named("miner")
        assert await gone("miner")
        result = await session.run("1")
        assert (result.status, result.alive) == ("cpu", False)
        assert (await session.run("2")).output == "2\n"


# If this fails, a session fills the disk: with one file, with many, or with empty ones.
async def test_filling_the_disk(pool):
    results = await in_session(
        pool, "open('a', 'wb').write(b'x' * 6 * 2**20)",
        "for i in range(5): open(f'b{i}', 'wb').write(b'x' * 3 * 2**20)",
        "import os\nfor name in os.listdir(): os.remove(name)\nfor i in range(10**6): os.mknod(f'e{i}')")
    for result, message in zip(results, ["File too large", "No space left", "No space left"], strict=True):
        assert message in result.output


# If this fails, code of any size is held in memory and passed on.
async def test_code_of_a_megabyte(pool):
    result, after = await in_session(pool, "#" * 10**6, "#" * 200_000 + "\n5")
    assert (result.status, after.output) == ("error", "5\n")


# If this fails, cells wait for each other without need, or more run at a time than may.
async def test_sessions_run_beside_each_other(pool):
    started = time.monotonic()
    results = await asyncio.gather(*(in_session(pool, "import time; time.sleep(0.3); 1") for _ in range(4)))
    assert all(result.status == "ok" for [result] in results)
    assert 0.6 <= time.monotonic() - started  # two at a time
