"""What looking costs: `python tools/benchmark/telemetry.py`.

Learner steps of one rank with everything that is recorded of them (statistics, experts' load, token records, JSON lines
and TensorBoard with its pictures, alarms) and, in turn with them, without any of it. CPU seconds of the process, which
other jobs change little; on a GPU elapsed seconds. Each part is timed where it is called, so that its share does not
drown in the noise between two steps; the difference of the two kinds of step is the check.

What a step waits for comes first. Files are written in a thread beside the learner, which goes on meanwhile; here it
waits for them, so that the two are told apart. Pictures are drawn every ten steps at most, and a run gives them 1 % of
its time at most (telemetry/tensorboard.py): shown is one drawing of all.

Two sizes: the demo, a model so small that anything is much beside it, and one of 15 M parameters with sequences of 512
tokens, of which a token is still hundreds of times less work than of a large model and is watched just the same. The
aim is a share of the step of at most 2 % at the larger one.
"""
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

from sao_megatron.learner import runtime  # isort: skip  (before Megatron)
import numpy as np
import torch
from common import Aim, be_the_only_rank, conclude

from sao_megatron import config as run_config
from sao_megatron.device import has_gpu
from sao_megatron.learner import trainer as trainers
from sao_megatron.learner.bookkeeping import batch_metrics
from sao_megatron.learner.expert_load import ExpertLoad
from sao_megatron.learner.records import gather_records
from sao_megatron.learner.reporting import Reporter
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.records import Recorder
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.telemetry.tensorboard import TensorBoardWriter
from sao_megatron.telemetry.writers import JsonLines
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder
from sao_megatron.weights import hf

AIM = 0.02
DEMO = Path(__file__).parents[2] / "configs/guess-number-cpu.yaml"
LARGER = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_experts=32, num_experts_per_tok=4,
              moe_intermediate_size=128, vocab_size=8192, head_dim=32, max_position_embeddings=1024)
SIZES = {"demo": ({}, 64, 16), "larger": (LARGER, 8, 512)}
"""Fields of config.json in place of the demo's, trajectories of a step, tokens of each."""
WAITED, BESIDE = ("statistics", "expert load", "gathering", "alarms"), ("records", "writers")
"""Parts that the step waits for, and those of the thread beside it."""


class Parts:
    """Seconds by part, of calls that do not contain each other, and a switch that leaves them all out."""

    def __init__(self):
        self.on, self.spent = True, defaultdict(float)

    def watch(self, owner, name: str, part: str, instead=lambda *_: None) -> None:
        """Time owner.name as `part`; when off `instead` is called."""
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            if not self.on:
                return instead(*args)
            begin = clock()
            result = call(*args, **kwargs)
            self.spent[part] += clock() - begin
            return result
        setattr(owner, name, watched)


def clock() -> float:
    if has_gpu():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def make(size: str, trajectories: int | None, folder: Path) -> tuple[run_config.RunConfig, dict, list[Trajectory]]:
    fields, count, length = SIZES[size]
    count = trajectories or count
    config = run_config.load(DEMO, ["parallel={}", f"runs_dir={folder}", f"batch.trajectories={count}",
                                    "algorithm.preset=sao_recover", "writers.jsonl=true"])
    hf_config = hf.canonical(config.model.fresh | fields)
    rng, result = np.random.default_rng(0), []
    for index in range(count):
        builder = TrajectoryBuilder(rng.integers(0, 32, length // 4).tolist(), f"p{index}", "random")
        for _ in range(3):
            builder.add_action(rng.integers(0, 32, length // 8).tolist(), rng.normal(-3.5, 1, length // 8).clip(
                max=-0.01).tolist(), rng.integers(0, 2, length // 8).tolist())
            builder.add_observation(rng.integers(0, 32, length // 8).tolist())
        builder.add_reward(float(rng.integers(0, 2)))
        result.append(builder.build())
    return config, hf_config, result


def measure(size: str, args: argparse.Namespace, folder: Path) -> dict:
    """Medians over the steps of each kind; seconds a step by part."""
    config, hf_config, trajectories = make(size, args.trajectories, folder)
    trainer = trainers.Trainer(config, hf_config, hf.FreshTensors(0, 0.05))
    trainer.begin_reinforcement()
    run = RunFolder(folder / size)
    run.path.mkdir()
    parts = Parts()
    with Store(run.store_path) as store:
        reporter = Reporter(config, run, store, 0)
        seconds, by_part = {True: [], False: []}, defaultdict(list)
        for step in range(2 * args.steps + 2):  # the first of each kind warms up
            parts.on, parts.spent = step % 2 == 0, defaultdict(float)
            begin = clock()
            result = trainer.train_step(trajectories, 2, True)
            middle = clock()
            if parts.on:
                recorded = gather_records(result.batches, trajectories, config.tokens.trajectories, (0, step))
                parts.spent["gathering"] = clock() - middle
                metrics = result.metrics | batch_metrics(trajectories, 2)
                middle = clock()
                reporter.step(step, 2, metrics, result.statistics, recorded)
                reporter.settle()
                parts.spent["alarms"] = clock() - middle - sum(parts.spent[part] for part in BESIDE)
            if step > 1:
                seconds[parts.on].append(clock() - begin)
                for part in (*WAITED, *BESIDE) if parts.on else ():
                    by_part[part].append(parts.spent[part])
            if step == 1:
                watch(parts)
        writer = next(one for one in reporter.writers if isinstance(one, TensorBoardWriter))
        middle = clock()
        writer._draw()
        drawing = clock() - middle
        reporter.close()
    parts.on = True  # what it left out must be there for the next size
    found = {part: statistics.median(values) for part, values in by_part.items()}
    base = statistics.median(seconds[False])
    waited, beside = (sum(found[part] for part in names) / base for names in (WAITED, BESIDE))
    return dict(size=size, tokens=sum(map(len, trajectories)), step=base, with_all=statistics.median(seconds[True]),
                parts=found, drawing=drawing, waited=waited, beside=beside)


def watch(parts: Parts) -> None:
    """Time what train_step does for the statistics, and make it possible to leave that out."""
    parts.watch(trainers, "_counted", "statistics")
    parts.watch(trainers, "reduce_statistics", "statistics", instead=lambda unreduced: unreduced)
    parts.watch(Statistics, "add_tokens", "statistics")
    parts.watch(Statistics, "metrics", "statistics", instead=lambda _: {})
    parts.watch(ExpertLoad, "watch", "expert load", instead=lambda *_: nullcontext())
    for name in ("begin", "_see", "finish"):
        parts.watch(ExpertLoad, name, "expert load")
    parts.watch(Recorder, "write", "records")
    for writer in (TensorBoardWriter, JsonLines):
        parts.watch(writer, "write", "writers")


def show(rows: list[dict]) -> None:
    print(f"{'GPU' if has_gpu() else 'CPU'} seconds of a learner step on one rank, medians")
    for row in rows:
        print(f"{row['size']}: {row['tokens']} tokens, {row['step']:.3f} s a step without any of it, "
              f"{row['with_all'] / row['step'] - 1:+.1%} with all")
        for title, names, share in (("waited for", WAITED, row["waited"]), ("beside", BESIDE, row["beside"])):
            for part in names:
                print(f"  {part:<14}{1e3 * row['parts'][part]:>8.2f} ms{row['parts'][part] / row['step']:>7.1%}")
            print(f"  {title:<14}{1e3 * share * row['step']:>8.2f} ms{share:>7.1%}")
        print(f"  pictures, once{1e3 * row['drawing']:>8.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--trajectories", type=int, help="of a step (default: the size's own number)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    be_the_only_rank()
    runtime.initialize(run_config.ParallelSection(), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(size, args, Path(folder)) for size in args.size or SIZES]
    show(rows)
    conclude(rows, [Aim("larger, waited for and beside, of a step", row["waited"] + row["beside"], AIM)
                    for row in rows if row["size"] == "larger"], args.json)


if __name__ == "__main__":
    main()
