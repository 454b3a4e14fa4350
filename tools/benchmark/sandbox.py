"""What a sandbox costs: `python tools/benchmark/sandbox.py --cells 2`.

Starts and ends sessions one after another, runs short pieces of code in several sessions at a time, and holds many idle
sessions. Times are of the wall and memory is the machine's, so run it where nothing else does. The aim: a session for
less than a tenth of what starting Python and importing numpy and sympy costs, and at least 500 short pieces of code a
second and core.
"""
from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from common import Aim, conclude

from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool

MODULES = ["numpy", "sympy"]
FRESH = "Python with numpy and sympy, started anew (ms)"
SESSION, SHORT = "a session, started, used once and ended (ms)", "short pieces of code a second and core"
CODE = "total = sum(n * n for n in range(1000))\nprint(total)"


def fresh_start() -> float:
    """Seconds until a new Python has imported the same modules."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {', '.join(MODULES)}"], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.perf_counter() - start


async def starts(pool: Pool, count: int) -> float:
    """Seconds from asking for a session to the end of its first piece of code and of itself."""
    pool.warm = 0
    start = time.perf_counter()
    for _ in range(count):
        session = await pool.open()
        await session.run("1")
        await session.close()
    return (time.perf_counter() - start) / count


async def rate(pool: Pool, sessions: int, seconds: float) -> float:
    """Pieces of code a second."""
    opened = [await pool.open() for _ in range(sessions)]
    end, done = time.perf_counter() + seconds, 0

    async def work(session):
        nonlocal done
        while time.perf_counter() < end:
            result = await session.run(CODE)
            assert result.output == "332833500\n", result
            done += 1
    start = time.perf_counter()
    await asyncio.gather(*(work(session) for session in opened))
    elapsed = time.perf_counter() - start
    for session in opened:
        await session.close()
    return done / elapsed


async def memory(pool: Pool, sessions: int) -> float:
    """MB that one more idle session takes, after a piece of code."""
    before = psutil.virtual_memory().available
    opened = [await pool.open() for _ in range(sessions)]
    for session in opened:
        await session.run(CODE)
    taken = before - psutil.virtual_memory().available
    for session in opened:
        await session.close()
    return taken / sessions / 2**20


async def measure(cells: int, seconds: float) -> dict[str, float]:
    fresh = fresh_start()
    async with Pool(Limits(), 512, cells, 0, MODULES) as pool:
        await pool.check()
        start = await starts(pool, 50)
        short = await rate(pool, 4 * cells, seconds)
        held = await memory(pool, 64)
    return {FRESH: 1e3 * fresh, SESSION: 1e3 * start, SHORT: short / cells, "memory of an idle session (MB)": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1, help="pieces of code at a time")
    parser.add_argument("--seconds", type=float, default=4.0, help="of short pieces of code")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    found = asyncio.run(measure(options.cells, options.seconds))
    for what, value in found.items():
        print(f"{what:50} {value:8.1f}")
    conclude([{"what": what, "value": value} for what, value in found.items()],
             [Aim(SESSION, found[SESSION], found[FRESH] / 10), Aim(SHORT, found[SHORT], 500, at_least=True)],
             options.json)


if __name__ == "__main__":
    main()
