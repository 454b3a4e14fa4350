"""What asynchrony is worth where episodes have long tails: four schedules of the same training, side by side.

    python tools/benchmark/async_speedup.py --json speedup.json

Each is a real run of `sao-megatron train`: the same tiny Qwen3-MoE, engine, task, batch, number of trained trajectories
and of episodes in flight. The environment (waiting.py) sleeps; everything else is real. Numbers are of the steps after
the first --skip.

- synchronous: max_lag 0; a batch starts when the weights are published, and the learner waits for its last episode.
- one step off: max_lag 1, whole batches in order (one group is one batch).
- groups: max_lag --max-lag; a group of 8 trains when its last episode has ended (GRPO).
- single rollouts: max_lag --max-lag; every trajectory trains the moment it has ended.

Bound: a trajectory cannot cost less than max(mean seconds of an episode / episodes in flight, the learner's busy
seconds / batch). Aims for single rollouts: at least 2.8 times as fast as synchronous, at least 0.9 of the bound.
"""
from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import yaml
from common import Aim, conclude, qwen3_moe

from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import StepRow, Store
from sao_megatron.trajectory.versions import lag

MODEL = qwen3_moe(vocab=32, hidden=64, heads=4, layers=2, experts=4, width=32, max_position_embeddings=256,
                  tie_word_embeddings=True, eos_token_id=2)
SPEEDUP_AIM, BOUND_AIM = 2.8, 0.9
TASK = Path(__file__).with_name("waiting.py")
SCHEDULES = ("synchronous", "one step off", "groups", "single rollouts")
LEARNER_BUSY = ("policy", "critic", "recompute", "publish", "checkpoint", "other")


def schedules(options) -> dict[str, dict]:
    """Name -> what of the recipe differs."""
    def groups(size: int, max_lag: int) -> dict:
        return {"algorithm": {"preset": "grpo_dis", "rollouts_per_prompt": size}, "rollout": {"max_lag": max_lag}}
    single = {"algorithm": {"preset": "running_mean"}, "rollout": {"max_lag": options.max_lag}}
    return dict(zip(SCHEDULES, (groups(8, 0), groups(options.batch, 1), groups(8, options.max_lag), single),
                    strict=True))


def recipe(options, runs: Path, name: str, change: dict) -> dict:
    return {"name": name.replace(" ", "-"), "runs_dir": str(runs), "steps": options.steps,
            "model": {"fresh": MODEL, "dtype": "float32"}, "algorithm": change["algorithm"] | {"critic_only_steps": 0},
            "batch": {"trajectories": options.batch, "tokens_per_micro_batch": 8192},
            "task": {"name": f"{TASK}:Waiting",
                     "options": {"median_turns": options.turns, "median_seconds": options.seconds}},
            "rollout": {"concurrency": options.concurrency, "max_tokens": 128, **change["rollout"]},
            "engine": {"max_running_requests": 128, "max_total_tokens": 32768, "extra_args": ["--disable-radix-cache"]},
            "publication": {"bucket_mib": 64, "verify_every": 0, "tolerance": 1e-3},
            "tokens": {"trajectories": 0}, "checkpoint": {"every": 0}}


def run(options, runs: Path, name: str, change: dict) -> dict:
    """One training run; returns its row of the table."""
    settings = recipe(options, runs, name, change)
    path = runs / f"{settings['name']}.yaml"
    path.write_text(yaml.safe_dump(settings))
    folder = RunFolder(runs / settings["name"])
    with (runs / f"{settings['name']}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "sao_megatron.cli", "train", str(path)], stdout=log,
                                   stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        engine = _engine_share(process, folder, options)
        if process.wait():
            raise SystemExit(f"{name} failed: {Path(log.name).read_text()[-2000:]}")
    with Store(folder.store_path) as store:
        return row(store, options, engine) | {"schedule": name}


def _engine_share(process: subprocess.Popen, folder: RunFolder, options) -> float:
    """CPU seconds a second of the engine's scheduler between the first counted step and the last."""
    first: tuple[float, float] | None = None
    last = (0.0, 0.0)
    while process.poll() is None:
        time.sleep(0.2)
        steps = _steps(folder)
        if options.skip <= steps < options.steps and (cpu := _scheduler_seconds(process.pid)):
            last = time.monotonic(), cpu
            first = first or last
    return (last[1] - first[1]) / max(last[0] - first[0], 1e-9) if first else float("nan")


def _steps(folder: RunFolder) -> int:
    if not folder.log_dir.is_dir():  # it is made when the store is complete
        return 0
    with Store(folder.store_path) as store:
        return len(store.steps())


def _scheduler_seconds(pid: int) -> float:
    try:
        children = psutil.Process(pid).children(recursive=True)
        return sum(sum(child.cpu_times()[:2]) for child in children if "sglang::schedul" in child.name())
    except psutil.NoSuchProcess:
        return 0.0


def row(store: Store, options, engine: float) -> dict:
    steps = [step for step in store.steps() if step.step >= options.skip]
    seconds = sum(step.metrics["seconds/step"] for step in steps)
    busy = sum(step.metrics[f"seconds/{phase}"] for step in steps for phase in LEARNER_BUSY)
    count = len(steps) * options.batch
    durations, lags = _trained(store, steps)
    rollout, learner = float(np.mean(durations)) / options.concurrency, busy / count
    return {"seconds_per_trajectory": seconds / count, "rollout_limit": rollout, "learner_limit": learner,
            "of_bound": max(rollout, learner) / (seconds / count), "engine_busy": engine,
            "learner_busy": busy / seconds, "episode_mean_s": float(np.mean(durations)),
            "episode_max_s": float(np.max(durations)), "lag_mean": float(lags.mean()),
            "lag_shares": (np.bincount(lags) / len(lags)).tolist(), "trajectories": count}


def _trained(store: Store, steps: list[StepRow]) -> tuple[list[float], np.ndarray]:
    """Seconds of the trajectories that these steps trained, and the lags of their action tokens."""
    durations, lags = [], []
    with closing(sqlite3.connect(store.path)) as database:
        rows = database.execute("SELECT row, step FROM trajectories WHERE step >= ?", (steps[0].step,)).fetchall()
    for number, step in rows:
        [trajectory] = store.read([number])
        durations.append(trajectory.info["seconds"])
        lags.append(lag(step, trajectory.action_versions))
    return durations, np.concatenate(lags)


def show(rows: list[dict]) -> None:
    print(f"{'schedule':16} {'s/trajectory':>12} {'speed-up':>9} {'of bound':>9} {'rollout':>8} {'learner':>8} "
          f"{'engine busy':>11} {'learner busy':>12} {'lag mean':>8}  % of tokens at lag 0, 1 …")
    for one in rows:
        print(f"{one['schedule']:16} {one['seconds_per_trajectory']:12.4f} "
              f"{f'{one['speedup']:.2f}x' if 'speedup' in one else '':>9} "
              f"{one['of_bound']:9.2f} "
              f"{one['rollout_limit']:8.4f} {one['learner_limit']:8.4f} {one['engine_busy']:11.0%} "
              f"{one['learner_busy']:12.0%} {one['lag_mean']:8.2f}  "
              f"{' '.join(f'{share:.0%}'[:-1] for share in one['lag_shares'])}")


def aims(rows: list[dict]) -> list[Aim]:
    """Of single rollouts, as far as --only let them and what they are compared with run."""
    if rows[-1]["schedule"] != "single rollouts":
        return []
    found = [Aim("single rollouts, of the bound", rows[-1]["of_bound"], BOUND_AIM, at_least=True)]
    if "speedup" in rows[-1]:
        found.append(Aim("single rollouts, times as fast as synchronous", rows[-1]["speedup"], SPEEDUP_AIM,
                         at_least=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32, help="trajectories of a step")
    parser.add_argument("--concurrency", type=int, default=32, help="episodes in flight")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--skip", type=int, default=3, help="first steps that do not count")
    parser.add_argument("--max-lag", type=int, default=3, help="of groups and single rollouts")
    parser.add_argument("--turns", type=float, default=3.0, help="median turns of an episode")
    parser.add_argument("--seconds", type=float, default=0.4, help="median seconds of a turn's environment")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, help="some of the schedules")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        rows = [run(options, Path(runs), name, change) for name, change in schedules(options).items()
                if not options.only or name in options.only]
    if rows[0]["schedule"] == "synchronous":
        for one in rows:
            one["speedup"] = rows[0]["seconds_per_trajectory"] / one["seconds_per_trajectory"]
    show(rows)
    conclude(rows, aims(rows), options.json)


if __name__ == "__main__":
    main()
