"""Real runs of the demo recipe, shortened: Megatron-Core on two ranks, SGLang, controller and store, nothing replaced.

Every process that a run was ever seen to have is remembered, so that a test can ask which of them still live.
"""
from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

from sao_megatron.rollout.tasks.guess_number import GuessNumber
from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory, decode

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "guess-number-cpu.yaml"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
START_SECONDS = 300.0
"""Until a run's first learner steps, on a machine that does other things too."""
END_SECONDS = 60.0
"""Until `train` has ended after one of its processes was killed or after Ctrl-C."""

STEPS, CRITIC_ONLY, BATCH, EVALUATED = 6, 2, 16, 64
FINISHED = [f"steps={STEPS}", f"algorithm.critic_only_steps={CRITIC_ONLY}", f"batch.trajectories={BATCH}",
            f"evaluation.episodes={EVALUATED}", "evaluation.every=3", "evaluation.pinned=true",
            "warmup.steps=30", "warmup.trajectories=64",
            # Rollouts never reach the bound on the lag and so never wait for the learner, however fast the engine is:
            # every publication meets episodes in flight, and versions mix.
            "task.options.turns=10", "rollout.concurrency=4", f"rollout.max_lag={STEPS + CRITIC_ONLY}",
            "publication.verify_every=1", "tokens.every=2", "writers.jsonl=true",
            "sandbox.servers=1", "sandbox.modules=[]",
            # The last update changes nothing: its forward pass saw the weights that were exported (test_export.py).
            "policy_optimizer.warmup_steps=0", "policy_optimizer.min_lr_ratio=0.0"]


class Run:
    """One `sao-megatron train` (or another verb that runs a run), started."""

    def __init__(self, runs_dir: Path, name: str, overrides: list[str], verb: str = "train"):
        self.folder = RunFolder(runs_dir / name)
        self.out_path, self.err_path = runs_dir / f"{name}-{verb}.out", runs_dir / f"{name}-{verb}.err"
        run = [str(self.folder.path)] if verb == "resume" else [str(RECIPE), f"runs_dir={runs_dir}", f"name={name}"]
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sao_megatron.cli", verb, *run, *overrides],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=ENVIRONMENT, cwd=ROOT)
        self.seen: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def children(self) -> list[psutil.Process]:
        """The processes below `train` now, at any depth."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= {child.pid: child for child in found}
        return found

    def survivors(self) -> list[str]:
        """Command lines of the processes of this run that still live."""
        return [repr(process) for process in self.seen.values() if is_alive(process)]

    def until(self, condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Wait for `condition`; fails with the run's output if it ends before, or if it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.children()
            assert self.process.poll() is None, f"train ended before {what}:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}:\n{self.out}\n{self.err}"
            time.sleep(0.1)

    def wait(self, seconds: float) -> int:
        """The exit code of `train`."""
        self.children()
        return self.process.wait(seconds)

    def steps(self) -> int:
        """Learner steps recorded so far."""
        if not self.folder.log_dir.is_dir():  # it is made when the store is complete
            return 0
        return query(self.folder.store_path, "SELECT COUNT(*) FROM steps")[0][0]

    def appended(self) -> set[str]:
        """Ids of the trajectories that are in the store."""
        return {name for name, in query(self.folder.store_path, "SELECT id FROM trajectories")}

    def kill_launcher(self) -> None:
        """Kill `train` itself, and see all that it started end too."""
        self.children()
        self.process.kill()
        self.process.wait(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.survivors() == []

    def end(self) -> None:
        """Kill whatever is left."""
        self.children()
        self.process.kill()
        self.process.wait(30)
        for process in self.seen.values():
            if is_alive(process):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def query(store: Path, sql: str, *values) -> list[tuple]:
    """Rows of a query on a store, read as another process would."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)) as database:
        return database.execute(sql, values).fetchall()


def stored(store: Path) -> list[Trajectory]:
    """Every trajectory of a store, in the order in which it was appended."""
    return [decode(blob) for blob, in query(store, "SELECT blob FROM blobs ORDER BY row")]


def recorded(path: Path, count: int) -> Path:
    """Write a store of demonstrations, for a replay to train on; returns `path`."""
    with Store(path) as store:
        for seq, trajectory in enumerate(GuessNumber(turns=4).demonstrations(count, 0)):
            store.append(trajectory, seq)
    return path
