"""What routing replay changes and costs: `python tools/benchmark/routing_replay.py`.

A CPU engine samples in bfloat16 from a random Qwen3-MoE and records its routing; learners in float32 and in bfloat16,
with the same weights, score what it sampled, with their own routing and with the engine's. The first table is the
difference of log-probs (nats a token), the second what a recorded token costs on its way, at the shapes of real models,
then how long a batch's routing takes from rank 0 to its data parallel ranks. The aim: replay leaves at most half of the
mean difference.
"""
from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import torch
import torch.distributed as dist
from common import Aim, be_the_only_rank, conclude, engine_of, qwen3_moe, running

from sao_megatron import config as recipes
from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import free_port
from sao_megatron.engine.reply import read_generation
from sao_megatron.learner import runtime
from sao_megatron.learner.routing_shares import deal
from sao_megatron.learner.trainer import Trainer
from sao_megatron.trajectory.packing import micro_batches
from sao_megatron.trajectory.routing import Routing
from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder, encode
from sao_megatron.weights import hf
from sao_megatron.weights.shards import save_hf

MODEL = qwen3_moe(vocab=512, hidden=256, heads=8, layers=8, experts=32, width=128, num_experts_per_tok=4)
SHAPES = {"Qwen3-30B-A3B": (48, 8, 128), "GLM-5 (744B)": (78, 8, 256)}
"""Layers, experts a token, experts."""
AIM = 0.5
"""Of the mean difference that free routing makes."""


class Rounded(hf.FreshTensors):
    """Random weights that bfloat16 holds exactly, so that all sides have the same."""

    def get(self, *arguments) -> torch.Tensor:
        return super().get(*arguments).bfloat16().float()


def recipe(folder: Path, dtype: str) -> recipes.RunConfig:
    return recipes.parse({
        "name": "benchmark", "task": {"name": "none"}, "mode": "rollout", "model": {"path": folder, "dtype": dtype},
        "batch": {"tokens_per_micro_batch": 4096}, "rollout": {"routing_replay": True}})


def sample(folder: Path, count: int, length: int) -> list[Trajectory]:
    """From a bfloat16 engine with the weights in `folder`; prompts of 32 random tokens."""
    engine, rng = engine_of(recipe(folder, "bfloat16"), folder, gpu=False), np.random.default_rng(0)

    async def one(client: EngineClient) -> Trajectory:
        builder = TrajectoryBuilder(rng.integers(0, MODEL["vocab_size"], 32).tolist(), "p", "t", record_routing=True)
        answer = await client.generate(builder.tokens, max_new_tokens=length, temperature=1.0, stop_token_ids=[],
                                       **builder.wanted_routing())
        builder.add_action(answer.tokens, answer.logprobs, answer.versions, answer.routing)
        return builder.build()

    async def all_of_them() -> list[Trajectory]:
        async with EngineClient(engine.url, MODEL["vocab_size"], 600) as client:
            return await asyncio.gather(*(one(client) for _ in range(count)))

    with running([engine], folder):
        return asyncio.run(all_of_them())


def count_differences(learner: Trainer) -> list[int]:
    """From now on: [choices that the learner's routers would make otherwise, choices replayed]."""
    counts = [0, 0]
    for layer in learner.policy_chunks[0].decoder.layers:
        router = layer.mlp.router.router_replay
        original = router.get_replay_topk

        def counting(scores, topk, *arguments, router=router, original=original, **keywords):
            values, experts = original(scores, topk, *arguments, **keywords)
            if router.choice is not None:
                own, known = scores.topk(topk).indices.sort(-1).values, router.choice.recorded[:, 0]
                counts[0] += int((own != experts.sort(-1).values).any(-1)[known].sum())
                counts[1] += int(known.sum())
            return values, experts
        router.get_replay_topk = counting
    return counts


def differences(folder: Path, dtype: str, trajectories: list[Trajectory]) -> list[dict]:
    """One row without and one with replay."""
    learner = Trainer(recipe(folder, dtype), hf.read_config(folder), hf.SafetensorsFolder(folder))
    counts, rows = count_differences(learner), []
    sampled = np.concatenate([t.rollout_logprobs[t.action_mask] for t in trajectories])
    for replay in (False, True):
        scored = learner.score([t if replay else replace(t, routing=None) for t in trajectories])
        apart = np.abs(np.concatenate(scored) - sampled)
        rows.append(dict(learner=dtype, replay=replay, mean=float(apart.mean()), p99=float(np.quantile(apart, 0.99)),
                         max=float(apart.max()), tokens=len(apart)))
    rows[1]["other_choices"] = counts[0] / counts[1]
    return rows


def cost(name: str, tokens: int = 8192) -> dict[str, str | float]:
    """Bytes a token on the wire and in the store, and microseconds a token to read a reply and to encode the blob."""
    layers, k, experts = SHAPES[name]
    chosen = np.random.default_rng(0).integers(0, experts, (tokens, layers, k))
    wire = base64.b64encode(chosen.astype("<i4").tobytes()).decode()
    reply = {"output_ids": [1], "meta_info": {
        "finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 1, None]], "prompt_tokens": tokens,
        "weight_versions": [{"version": "0", "start": 0, "end": 1}], "num_retractions": 0, "routed_experts": wire}}
    text = orjson.dumps(reply)
    read, answer = fastest(lambda: read_generation(orjson.loads(text), 0))
    builder = TrajectoryBuilder([1] * tokens, "p", "t", record_routing=True)
    builder.add_action(answer.tokens, answer.logprobs, answer.versions, answer.routing)
    built = builder.build()
    encoding, blob = fastest(lambda: encode(built))
    return dict(model=name, wire_bytes=len(wire) / tokens, store_bytes=len(blob) / tokens,
                store_bytes_without=len(encode(replace(built, routing=None))) / tokens,
                read_us=1e6 * read / tokens, encode_us=1e6 * encoding / tokens)


def share_of_a_batch(rank: int, ranks: int, port: int, told) -> None:
    """One of `ranks` data parallel ranks; tells (seconds of dealing, MB that it received, MB of the whole)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    (layers, k, experts), length = SHAPES["Qwen3-30B-A3B"], 16384
    routing = Routing(np.random.default_rng(0).integers(0, experts, (length, layers * k), np.uint8),
                      np.ones(length, bool)) if rank == 0 else None
    action = np.arange(length) > 0
    batch = [Trajectory(tokens=np.ones(length), action_mask=action, rollout_logprobs=np.where(action, -1.0, np.nan),
                        versions=action - 1, turns=np.zeros(length), rewards=np.zeros(length), prompt_id="p", task="t",
                        id=str(number), routing=routing) for number in range(16)]
    shares = micro_batches(batch, ranks, rank, token_budget=length)

    def once() -> list[Routing | None]:
        dist.barrier()
        return deal(batch, shares, [share.origin for share in shares], [slice(0, layers * k)], (layers, k))
    seconds, mine = fastest(once, times=3)
    told.put((seconds, sum(one.experts.nbytes + one.recorded.nbytes for one in mine) / 1e6,
              len(batch) * length * (layers * k + 1) / 1e6))
    dist.destroy_process_group()


def dealing(ranks: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    told, port = spawn.Queue(), free_port()
    processes = [spawn.Process(target=share_of_a_batch, args=(rank, ranks, port, told), daemon=True)
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with exit code {process.exitcode}: its traceback is above")
    found = [told.get() for _ in processes]
    seconds, received, whole = (max(column) for column in zip(*found, strict=True))
    return {"ranks": ranks, "seconds": seconds, "received_mb": received, "batch_mb": whole}


def fastest[T](work: Callable[[], T], times: int = 7) -> tuple[float, T]:
    """(Seconds of the fastest of some calls, what the last one returned): what else the machine does only adds time."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="sampled in each")
    parser.add_argument("--ranks", type=int, default=2, help="data parallel ranks that a batch's routing is dealt to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    be_the_only_rank()
    with tempfile.TemporaryDirectory() as name:
        fresh, folder = Path(name) / "fresh", Path(name) / "model"
        fresh.mkdir()
        (fresh / "config.json").write_text(json.dumps(MODEL))
        config = recipe(fresh, "bfloat16")
        runtime.initialize(config.parallel, seed=0)
        save_hf(Trainer(config, hf.read_config(fresh), Rounded(0, 0.05)).policy_shards, folder, fresh)
        trajectories = sample(folder, options.trajectories, options.tokens)
        rows = [row for dtype in ("float32", "bfloat16") for row in differences(folder, dtype, trajectories)]
    dist.destroy_process_group()
    for row in rows:
        print(f"{row['learner']:9} learner, {'engine' if row['replay'] else 'own':6} routing: |difference| mean "
              f"{row['mean']:.5f}, p99 {row['p99']:.5f}, max {row['max']:.5f} nats of {row['tokens']} tokens"
              + (f"; {row['other_choices']:.1%} of its choices would differ" if row["replay"] else ""))
    costs = [cost(model) for model in SHAPES]
    for row in costs:
        print(f"{row['model']:14} {row['wire_bytes']:.0f} B a token in the reply, {row['store_bytes']:.0f} in the "
              f"store ({row['store_bytes_without']:.0f} without); {row['read_us']:.1f} µs to read, "
              f"{row['encode_us']:.1f} µs to encode")
    dealt = dealing(options.ranks)
    print(f"{dealt['batch_mb']:.0f} MB of routing dealt to {dealt['ranks']} data parallel ranks in "
          f"{dealt['seconds']:.2f} s; each gets {dealt['received_mb']:.0f} MB")
    aims = [Aim(f"{replayed['learner']} learner, mean difference, of that without replay",
                replayed["mean"] / free["mean"], AIM) for free, replayed in zip(rows[::2], rows[1::2], strict=True)]
    conclude(rows, aims, options.json, costs=costs, dealt=dealt)


if __name__ == "__main__":
    main()
