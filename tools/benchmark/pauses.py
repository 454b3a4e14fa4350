"""What a publication costs the requests that run meanwhile, in each mode: `python tools/benchmark/pauses.py`.

A real engine samples long turns while a learner publishes its weights to it, over and over. "Paused" is how long the
engine stood still, as the metric publication/paused has it (the median); "lost" is how much longer all turns took than
without publications, for each of them: the pause, and what the mode makes the engine compute again afterwards. The
aims say what `in_place` is for: the engine waits for nothing but the weights, so it stands still at most twice as long
as with `retract` (as much lies between two runs), and all turns lose at most a fourth of what they lose with that.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed as dist
from common import Aim, be_the_only_rank, conclude, engine_of, running
from publish import model_config

from sao_megatron import config as recipes
from sao_megatron.device import has_gpu
from sao_megatron.engine.client import EngineClient
from sao_megatron.learner import runtime
from sao_megatron.learner.trainer import Trainer
from sao_megatron.rollout.episode import EpisodeSettings
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.sampling import sample_turn
from sao_megatron.trajectory.types import TrajectoryBuilder
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher

MODES = ("retract", "in_place", "abort")
PAUSED_AIM, LOST_AIM = 2.0, 0.25
"""Of retract's."""


class Turns(threading.Thread):
    """Samples all turns at once; `seconds` afterwards."""

    def __init__(self, url: str, vocab: int, options):
        super().__init__(daemon=True)  # after an error it would wait on for an engine that has been stopped
        self.url, self.vocab, self.options = url, vocab, options
        self.seconds = 0.0

    def run(self) -> None:
        asyncio.run(self._sample())

    async def _sample(self) -> None:
        settings = EpisodeSettings(temperature=1.0, max_new_tokens=self.options.tokens, max_tokens=10**6,
                                   environment_retries=0, request_timeout=600)
        async with EngineClient(self.url, self.vocab, 600) as client:
            pool, begin = EnginePool([client], patience=600), time.monotonic()

            async def one(number: int) -> None:
                builder = TrajectoryBuilder([3 + number] * self.options.prompt, "p", "t")
                with pool.seat() as seat:
                    await sample_turn(seat, builder, self.options.tokens, [], settings)
            await asyncio.gather(*(one(number) for number in range(self.options.requests)))
            self.seconds = time.monotonic() - begin


def measure(options, folder: Path) -> list[dict]:
    (folder / "config.json").write_text(json.dumps(
        model_config(options) | {"max_position_embeddings": options.prompt + options.tokens + 8}))
    config = recipes.parse({
        "name": "benchmark", "task": {"name": "none"}, "model": {"path": str(folder), "dtype": "float32"},
        "engine": {"max_running_requests": options.requests,
                   "max_total_tokens": 2 * options.requests * (options.prompt + options.tokens)}})
    be_the_only_rank()
    runtime.initialize(config.parallel, seed=0)
    hf_config = hf.read_config(folder)
    trainer, engine = Trainer(config, hf_config, hf.FreshTensors(0, 0.02)), engine_of(config, folder, has_gpu())
    rows, version, alone = [], 0, 0.0
    with running([engine], folder):
        for mode in MODES:
            section = config.publication.model_copy(update={"mode": mode, "verify_every": 0})
            publisher = Publisher(trainer.policy_shards, lambda: [engine.url], 1, hf_config["vocab_size"], section,
                                  runtime.backend(), 600.0, folder / "publication", folder)
            version += 1
            publisher.publish(version)  # forms the group
            for count in (0, options.publications) if not rows else (options.publications,):
                turns = Turns(engine.url, hf_config["vocab_size"], options)
                turns.start()
                pauses = []
                for _ in range(count):
                    time.sleep(options.between)
                    version += 1
                    publisher.publish(version)
                    pauses.append(publisher.paused)
                if count and not turns.is_alive():
                    raise SystemExit(f"{mode}: all turns ended before the last of {count} publications: give more "
                                     "--tokens, or a shorter --between")
                turns.join()
                alone = alone or turns.seconds
            rows.append({"mode": mode, "paused_s": statistics.median(pauses),
                         "lost_s": (turns.seconds - alone) / options.publications, "turns_s": turns.seconds,
                         "alone_s": alone})
            publisher.close()
    dist.destroy_process_group()
    return rows


def aims(rows: list[dict]) -> list[Aim]:
    retract, in_place = ({row["mode"]: row for row in rows}[mode] for mode in ("retract", "in_place"))
    return [Aim("in_place, seconds that the engine stands still", in_place["paused_s"],
                PAUSED_AIM * retract["paused_s"]),
            Aim("in_place, seconds that all turns lose", in_place["lost_s"], LOST_AIM * retract["lost_s"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16, help="turns at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each context")
    parser.add_argument("--tokens", type=int, default=512, help="sampled in each turn")
    parser.add_argument("--publications", type=int, default=5)
    parser.add_argument("--between", type=float, default=1.0, help="seconds between two of them")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(options, Path(name))
    print(f"{options.requests} turns of {options.tokens} tokens took {rows[0]['alone_s']:.1f} s without publications")
    for row in rows:
        print(f"{row['mode']:9} paused {row['paused_s']:.3f} s, lost {row['lost_s']:.3f} s a publication")
    conclude(rows, aims(rows), options.json)


if __name__ == "__main__":
    main()
