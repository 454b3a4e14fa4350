"""Throughput of a CPU engine on short turns: `python tools/benchmark/engine.py --concurrency 16 64 128`.

Starts a server with a tiny random Qwen3-MoE and plays games of four turns (prompt of 2 to 12 tokens, at most 3 new
tokens a turn), many at a time. Prints, for each concurrency, requests per second and CPU milliseconds per request of
the client and of each of the server's processes. What follows `--` goes to the server.
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

from sao_megatron import config as recipes
from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import EngineProcess, engine_command, engine_environment, free_port

MODEL = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 64,
         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 4096,
         "tie_word_embeddings": False, "torch_dtype": "float32"}
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


async def measure(process: EngineProcess, concurrency: int, seconds: float) -> str:
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
    shares = ", ".join(f"{name} {1e3 * (after[name] - before[name]) / count:.2f}" for name in after)
    return (f"concurrency {concurrency}: {count / elapsed:.0f} requests/s, "
            f"median {1e3 * latencies[count // 2]:.0f} ms; "
            f"CPU ms per request: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("extra", nargs="*", help="arguments for the server, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir, port = Path(folder), free_port()
        (model_dir / "config.json").write_text(json.dumps(MODEL))
        config = recipes.parse({"name": "benchmark", "task": {"name": "none"},
                                "model": {"path": folder, "dtype": "float32"},
                                "engine": {"extra_args": ["--weight-version", "0", *options.extra]}})
        process = EngineProcess(engine_command(config, model_dir, port, gpu=False), engine_environment(gpu=False),
                                f"http://127.0.0.1:{port}")
        process.start(model_dir / "engine.log")
        try:
            process.wait_healthy(time.monotonic() + config.engine.start_timeout)
            for concurrency in options.concurrency:
                print(asyncio.run(measure(process, concurrency, options.seconds)), flush=True)
        finally:
            process.stop()


if __name__ == "__main__":
    main()
