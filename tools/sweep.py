"""The stability comparison: one job at fixed lags, for every preset and seed, as many side by side as there are cores.

    python tools/sweep.py --quick          # every preset at three lags, one seed, half the length: minutes
    python tools/sweep.py                  # all grids: 648 runs of about 25 CPU seconds; Ctrl-C and start again at will
    python tools/sweep.py --grid presets   # one of them: presets, mini_batches, recovery
    python tools/sweep.py --report         # only the tables and pictures of what has been run

Each run that ends adds a line to results.jsonl under --out; a run that has one is not repeated. At the end (and with
--report) it prints a table and writes it, pictures (PNG) and TensorBoard curves there; tools/sweep_report.py defines
"collapsed". To go on from the runs of docs/stability.md, copy docs/stability-results.jsonl to --out/results.jsonl.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import queue
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sweep_report import compact, report, write_tensorboard

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs/fixed-lag-cpu.yaml"
RESULTS = "results.jsonl"
PRESETS = ("grpo", "grpo_dis", "vapo", "sao_dis_only", "sao", "sao_recover", "running_mean", "icepop", "decoupled_ppo",
           "cispo")
LAGS = (0, 1, 4, 16, 64)
TASKS = {"guess_number": (), "levers": ("task.name=levers", "task.options={action: number, malformed_reward: -0.2}")}
RATES = (3e-4, 1e-3, 3e-3)
RATE = 1e-3
"""Policy learning rate of all grids but `recovery`."""
ARMS = (("sao", 0.0), ("sao_recover", 0.0), ("sao", 0.1))
"""(preset, anchor) of the grid `recovery`."""


@dataclass(frozen=True)
class Job:
    """One run."""

    preset: str
    lag: int
    seed: int
    task: str = "guess_number"
    lr: float = RATE
    mini_batches: int = 1
    anchor: float = 0.0
    steps: int = 200

    @property
    def key(self) -> str:
        parts = [self.task, self.preset, f"lag{self.lag}", f"lr{self.lr:g}", f"seed{self.seed}"]
        parts += [f"mb{self.mini_batches}"] * (self.mini_batches > 1) + [f"anchor{self.anchor:g}"] * bool(self.anchor)
        return "-".join([*parts, f"steps{self.steps}"])

    def overrides(self) -> list[str]:
        return [*TASKS[self.task], f"algorithm.preset={self.preset}", f"seed={self.seed}", f"steps={self.steps}",
                f"policy_optimizer.lr={self.lr}", f"batch.mini_batches={self.mini_batches}",
                f"algorithm.anchor={self.anchor}"]


def grids() -> dict[str, list[Job]]:
    """Every grid's jobs, all seeds of 0 before those of 1, so that a sweep that is cut short is a smaller sweep."""
    return {
        "presets": [Job(preset, lag, seed) for seed, lag, preset in product(range(3), LAGS, PRESETS)],
        "mini_batches": [Job(preset, lag, seed, mini_batches=4, steps=100) for seed, lag, preset in product(
            range(3), (0, 4), ("grpo", "grpo_dis", "vapo", "sao", "sao_recover", "icepop", "decoupled_ppo", "cispo"))],
        "recovery": [Job(preset, lag, seed, task, lr, anchor=anchor, steps=150)
                     for seed, task, lr, lag, (preset, anchor) in product(range(5), TASKS, RATES, LAGS, ARMS)],
        "quick": [Job(preset, lag, 0, steps=100) for lag, preset in product((0, 4, 64), PRESETS)],
    }


def work(jobs: multiprocessing.Queue, finished: multiprocessing.Queue, out: Path) -> None:
    """A worker process: runs jobs until there are none left."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import logging
    import warnings
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from fixed_lag import FixedLag  # Megatron: seconds to import
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        result = _run(job, out, FixedLag)
        write_tensorboard(out / "tensorboard" / job.key, result)
        finished.put((job, result))


def _run(job: Job, out: Path, fixed_lag: type) -> dict:
    import torch

    from sao_megatron import config
    start_file = out / "start" / f"{job.task}-seed{job.seed}.pt"
    start = torch.load(start_file) if start_file.is_file() else None
    run = fixed_lag(config.load(RECIPE, job.overrides()), job.lag, start)
    if start is None:
        partial = start_file.with_suffix(f".{os.getpid()}")
        torch.save(run.start, partial)
        partial.rename(start_file)  # whole, or not there
    return {"job": dataclasses.asdict(job)} | run.run()


def run_all(jobs: list[Job], out: Path, workers: int) -> None:
    """Run what has no result yet, with a line for each run that ends."""
    done = read_results(out)
    missing = [job for job in dict.fromkeys(jobs) if job not in done]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs have results; {len(missing)} to go on {workers} workers",
          flush=True)
    context = multiprocessing.get_context("spawn")
    waiting, finished = context.Queue(), context.Queue()
    for job in missing:
        waiting.put(job)
    processes = [context.Process(target=work, args=(waiting, finished, out), daemon=True)
                 for _ in range(min(workers, len(missing)))]
    for process in processes:
        process.start()
    begin = time.monotonic()
    for done in range(1, len(missing) + 1):
        job, result = _next(finished, processes)
        with (out / RESULTS).open("a") as file:
            file.write("\n" + json.dumps(compact(result)))  # first a line break: a kill may have cut the last one short
        left = (time.monotonic() - begin) / done * (len(missing) - done) / 60
        rates = [rate for _, rate, _ in result["evaluations"]]
        print(f"[{done}/{len(missing)}] {job.key}: solves {rates[0]:.2f} -> {rates[-1]:.2f}"
              f"{' (' + result['failed'] + ')' if result['failed'] else ''}; {result['cpu_seconds']:.0f} CPU s; "
              f"about {left:.0f} min left", flush=True)


def read_results(out: Path) -> dict[Job, dict]:
    """What has been run; a line that a kill cut short counts as not there."""
    path = out / RESULTS
    results = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[Job(**result["job"])] = result
    return results


def _next(finished: multiprocessing.Queue, processes: list) -> tuple[Job, dict]:
    while True:
        try:
            return finished.get(timeout=5)
        except queue.Empty:
            if dead := [p for p in processes if p.exitcode not in (None, 0)]:
                raise SystemExit(f"a worker ended with exit code {dead[0].exitcode} (its traceback is above); what had "
                                 "finished is kept: start the same command again to go on") from None


def _prepare(out: Path) -> None:
    """Make the folders; refuse one that holds results of another recipe."""
    for folder in ("start", "tensorboard"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    copy = out / RECIPE.name
    if copy.exists() and copy.read_text() != RECIPE.read_text():
        print(f"{out} holds results of another {RECIPE.name}: give another --out, or delete it", file=sys.stderr)
        raise SystemExit(2)
    shutil.copy(RECIPE, copy)


def main() -> None:
    names = list(grids())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the grid `quick` alone")
    parser.add_argument("--grid", choices=names, action="append",
                        help="this grid (may be repeated); default: all but quick")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/sweep", help="results (default runs/sweep)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs side by side (default: the cores)")
    parser.add_argument("--report", action="store_true", help="run nothing; report what there is")
    options = parser.parse_args()
    chosen = ["quick"] if options.quick else options.grid or [name for name in names if name != "quick"]
    _prepare(options.out)
    if not options.report:
        try:
            run_all([job for name in chosen for job in grids()[name]], options.out, options.workers)
        except KeyboardInterrupt:
            print("stopped; what had finished is kept: start the same command again to go on", file=sys.stderr)
            raise SystemExit(130) from None
    done = read_results(options.out)
    report({name: [done.get(job) for job in grids()[name]] for name in chosen}, options.out)


if __name__ == "__main__":
    main()
