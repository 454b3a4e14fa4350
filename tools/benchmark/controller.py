"""What one controller process costs: thousands of episodes at once against engines that only wait.

    python tools/benchmark/controller.py --concurrency 2000 --seconds 20
    python tools/benchmark/controller.py --concurrency 2000 --controllers 2

Real controllers and a real store; the engines are stub_engine.py, which speaks SGLang's protocol over HTTP and answers
after a latency (tests/engine/test_stub_engine.py holds it to the real server); a small process takes batches from the
store as a learner would. Each controller is pinned to a core of its own, as far as there are cores. "Added" is how much
longer a turn takes than the engine's latency; aim: at least 0.9 of the turns that the latency allows, on one core.
"""
from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path

from common import Aim, conclude, running

from sao_megatron import config as recipes
from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import EngineProcess, free_port
from sao_megatron.rollout.controller import collect_rarely, run_controller
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.store import Store

AIM = 0.9
"""Share of the turns that the engines' latency allows."""
VOCAB, OBSERVATION = 64, 16
STUB = Path(__file__).with_name("stub_engine.py")


class Turns:
    """Episodes of `turns` turns, whose environment answers at once."""

    name, vocab_size, stop_token_ids, max_new_tokens = "turns", VOCAB, [2], None

    def __init__(self, turns: int, prompt_tokens: int):
        self.max_turns, self.prompt_tokens = turns, [1] * prompt_tokens
        self.played = 0

    def prompt(self, index):
        return Prompt(f"turns/{index}")

    def environment(self, prompt):
        return _Environment(self)


class _Environment:
    def __init__(self, task: Turns):
        self.task, self.left = task, task.max_turns

    async def reset(self):
        return self.task.prompt_tokens

    async def step(self, action):
        self.task.played += 1
        self.left -= 1
        return Step([3] * OBSERVATION, reward=0.5, done=self.left == 0)


def control(folder: Path, config: recipes.RunConfig, urls: list[str], index: int, options) -> None:
    """One controller until the store says stop; writes what it measured."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    task, measured = Turns(options.turns, options.prompt), {}

    collect_rarely()

    async def run() -> None:
        clients = [EngineClient(url, VOCAB, 120) for url in urls]
        with Store(folder / "store.sqlite") as store:
            running = asyncio.create_task(run_controller(config, task, store, clients, index=index))
            await asyncio.wait([running], timeout=1.5 * options.latency)  # until all are in flight
            turns, cpu, began = task.played, time.process_time(), time.monotonic()
            profile = cProfile.Profile(time.process_time) if options.profile and index == 0 else None
            if profile:
                profile.enable()
            await asyncio.wait([running], timeout=options.seconds)
            if profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)
            measured.update(turns=task.played - turns, cpu=time.process_time() - cpu, wall=time.monotonic() - began)
            store.set_state("stop", True)
            await running
        await asyncio.gather(*(client.close() for client in clients))
    asyncio.run(run())
    (folder / f"measured-{index}.json").write_text(json.dumps(measured))


def take(path: Path, batch: int) -> None:
    """Lease and train as fast as it goes, like a learner that costs nothing."""
    with Store(path) as store:
        for step in range(10**9):
            while not (leased := store.lease(batch, "learner", version=0)):
                if store.get_state("stop"):
                    return
                time.sleep(0.01)
            store.mark_trained(step, 0, [trajectory.id for trajectory in leased], {}, "learner")
            store.set_published(0, step + 1)


def stub_engine(options) -> EngineProcess:
    port = free_port()
    return EngineProcess([sys.executable, str(STUB), "--port", str(port), "--latency", str(options.latency), "--sigma",
                          "0.5", "--tokens", str(options.tokens)], {}, f"http://127.0.0.1:{port}")


def measure(options) -> dict:
    config = recipes.parse({
        "name": "benchmark", "model": {"fresh": {}}, "task": {"name": "none"}, "batch": {"trajectories": 64},
        "rollout": {"concurrency": options.concurrency, "controllers": options.controllers,
                    "max_lag": options.concurrency // 16, "max_new_tokens": options.tokens}})
    engines, spawn = [stub_engine(options) for _ in range(options.engines)], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Store(folder / "store.sqlite") as store:
            store.set_published(0, 0)
        learner = spawn.Process(target=take, args=(folder / "store.sqlite", 64), daemon=True)
        urls = [engine.url for engine in engines]
        controllers = [spawn.Process(target=control, args=(folder, config, urls, index, options), daemon=True)
                       for index in range(options.controllers)]
        with running(engines, folder):
            for process in (learner, *controllers):
                process.start()
            for process in controllers:
                process.join()
                if process.exitcode:
                    raise SystemExit(f"a controller ended with exit code {process.exitcode}: its traceback is above")
            learner.join()
        return summed([json.loads((folder / f"measured-{index}.json").read_text())
                       for index in range(options.controllers)], options)


def summed(measured: list[dict], options) -> dict:
    rate = sum(one["turns"] / one["wall"] for one in measured)
    possible = options.concurrency / options.latency
    return {"concurrency": options.concurrency, "controllers": options.controllers, "latency_s": options.latency,
            "turns_per_second": rate, "share_of_possible": rate / possible,
            "added_ms_per_turn": 1e3 * (options.concurrency / rate - options.latency),
            "cpu_ms_per_turn": 1e3 * sum(one["cpu"] for one in measured) / sum(one["turns"] for one in measured),
            "busiest_core": max(one["cpu"] / one["wall"] for one in measured)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=2000, help="episodes in flight, of all controllers")
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1, help="stub engines")
    parser.add_argument("--latency", type=float, default=5.0, help="mean seconds of a request")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true", help="of the first controller (it then costs more)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    for name, value in result.items():
        print(f"{name:20} {value:.3f}" if isinstance(value, float) else f"{name:20} {value}")
    conclude([result], [Aim("of the turns that the latency allows", result["share_of_possible"], AIM, at_least=True)],
             options.json)


if __name__ == "__main__":
    main()
