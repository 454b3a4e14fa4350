"""Throughput of a CPU engine on short turns: `python tools/benchmark/engine.py --concurrency 16 64 128`.

Starts a server with a tiny random Qwen3-MoE and plays games of four turns (prompt of 2 to 12 tokens, at most 3 new
tokens a turn), many at a time. Prints, for each concurrency, requests per second and CPU milliseconds per request of
the client and of each of the server's processes. The aim: asking costs at most a tenth of the CPU that answering does.
What follows `--` goes to the server.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import psutil
from common import Aim, conclude, engine_of, qwen3_moe, running

from sao_megatron import config as recipes
from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import EngineProcess

MODEL = qwen3_moe(vocab=32, hidden=64, heads=4, layers=2, experts=8, width=64, max_position_embeddings=4096)
AIM = 0.1
TURNS, STOPS = 4, list(range(8))  # a quarter of the vocabulary ends a turn


async def game(client: EngineClient, latencies: list[float]) -> None:
    tokens = [random.randrange(8, 32), 1]
    for _ in range(TURNS):
        start = time.perf_counter()
        answer = await client.generate(tokens, max_new_tokens=3, temperature=1.0, stop_token_ids=STOPS)
        latencies.append(time.perf_counter() - start)
        tokens = tokens + answer.tokens + [2]


async def play(client: EngineClient, concurrency: int, seconds: float) -> list[float]:
    """Latency of every request, in seconds."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def slot():
        while time.perf_counter() < end:
            await game(client, latencies)

    await asyncio.gather(*(slot() for _ in range(concurrency)))
    return latencies


async def measure(process: EngineProcess, concurrency: int, seconds: float) -> dict:
    server = psutil.Process(process.pid)
    processes = {"http": server} | {child.name().split("::")[-1]: child for child in server.children(recursive=True)}

    def cpu_seconds() -> dict[str, float]:
        return {name: sum(p.cpu_times()[:2]) for name, p in processes.items()} | {"client": time.process_time()}

    async with EngineClient(process.url, MODEL["vocab_size"], 60) as client:
        await play(client, concurrency, 1)
        before, start = cpu_seconds(), time.perf_counter()
        latencies = sorted(await play(client, concurrency, seconds))
        elapsed, after = time.perf_counter() - start, cpu_seconds()
    count = len(latencies)
    return {"concurrency": concurrency, "requests_per_second": count / elapsed,
            "median_ms": 1e3 * latencies[count // 2],
            "cpu_ms": {name: 1e3 * (after[name] - before[name]) / count for name in after}}


def show(row: dict) -> None:
    print(f"concurrency {row['concurrency']}: {row['requests_per_second']:.0f} requests/s, "
          f"median {row['median_ms']:.0f} ms; CPU ms per request: "
          + ", ".join(f"{name} {value:.2f}" for name, value in row["cpu_ms"].items()), flush=True)


def client_share(row: dict) -> Aim:
    """The client's CPU beside that of the server's processes together."""
    client = row["cpu_ms"]["client"]
    return Aim(f"concurrency {row['concurrency']}, the client's CPU per the engine's",
               client / (sum(row["cpu_ms"].values()) - client), AIM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("extra", nargs="*", help="arguments for the server, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir, rows = Path(folder), []
        (model_dir / "config.json").write_text(json.dumps(MODEL))
        config = recipes.parse({"name": "benchmark", "task": {"name": "none"},
                                "model": {"path": folder, "dtype": "float32"},
                                "engine": {"extra_args": ["--weight-version", "0", *options.extra]}})
        engine = engine_of(config, model_dir, gpu=False)
        with running([engine], model_dir):
            for concurrency in options.concurrency:
                rows.append(asyncio.run(measure(engine, concurrency, options.seconds)))
                show(rows[-1])
    conclude(rows, [client_share(row) for row in rows], options.json)


if __name__ == "__main__":
    main()
