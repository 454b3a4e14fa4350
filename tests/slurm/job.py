"""A run of the demo recipe, made tiny, as a Slurm job."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from cluster import Cluster

from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.events import Event, read
from sao_megatron.trajectory.store import Store

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 240.0
BATCH = 8
TINY = ["algorithm.critic_only_steps=1", f"batch.trajectories={BATCH}", "evaluation.episodes=0", "warmup.steps=2",
        "warmup.trajectories=8", "tokens.trajectories=0", "publication.verify_every=0"]


class Job:
    """`sbatch slurm/train.sbatch` of one run."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.out_path = cluster, folder / "job.out"
        self.run = RunFolder(folder / "run")
        self.id = ""

    def submit(self, *options: str, overrides: list[str]) -> None:
        """Queue the run. `options` are sbatch's, with ":" between the components of a heterogeneous job."""
        self.submit_script("train.sbatch", *options, arguments=[
            str(ROOT / "configs" / "guess-number-cpu.yaml"), f"runs_dir={self.run.path.parent}",
            f"name={self.run.path.name}", *TINY, *overrides])

    def submit_script(self, script: str, *options: str, arguments: list[str]) -> None:
        """Queue one of the scripts in slurm/."""
        self.cluster.environment |= {"SAO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.id = self.cluster.submit(f"--output={self.out_path}", *options, str(ROOT / "slurm" / script), *arguments,
                                      cwd=ROOT)

    @property
    def out(self) -> str:
        return self.out_path.read_text() if self.out_path.exists() else ""

    @property
    def log_dir(self) -> Path:
        return self.run.log_dir / self.id

    def steps(self) -> int:
        if not self.log_dir.is_dir():
            return 0
        with Store(self.run.store_path) as store:
            return len(store.steps())

    def events(self, kind: str) -> list[Event]:
        return [event for event in read(self.run.events_path) if event.kind == kind]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for `condition`; fails with the job's output if it ends before, or if it takes too long."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            state = self.cluster.state(self.id)
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), \
                f"the job ended ({state}) before {what}:\n{self.out}"
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:.0f} s for {what} ({state}):\n{self.out}"
            time.sleep(0.3)

    def until_more_steps(self, count: int, why: str) -> None:
        wanted = self.steps() + count
        self.until(lambda: self.steps() >= wanted, f"{count} more steps {why}")

    def exit_code(self) -> str:
        """Waits for the job's end; what Slurm says of it (code:signal)."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.cluster.state(self.id) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:.0f} s for the job's end:\n{self.out}"
            time.sleep(0.3)
        return self.cluster.job(self.id)["ExitCode"]

    def find(self, words: str, rank: int | None = None) -> psutil.Process:
        """The eldest process of this run with these words in its command line, of this rank."""
        found = []
        for process in psutil.process_iter(["cmdline", "create_time"]):
            with suppress(psutil.Error):
                line = " ".join(process.info["cmdline"] or [])
                if (words in line and str(self.run.path) in line and "srun" not in line
                        and (rank is None or process.environ().get("RANK") == str(rank))):
                    found.append((process.info["create_time"], process.pid, process))
        assert found, f"no process with {words!r}, rank {rank}"
        return min(found)[-1]

    def check_store(self) -> None:
        """Every step once and in order, each on a batch of its own."""
        with Store(self.run.store_path) as store:
            steps = [row.step for row in store.steps()]
            trained = store._db.execute("SELECT step, COUNT(*) FROM trajectories WHERE state = 'trained' "
                                        "GROUP BY step ORDER BY step").fetchall()
        assert steps == list(range(len(steps)))
        assert trained == [(step, BATCH) for step in steps]

    def end(self) -> None:
        if self.id:
            self.cluster.run("scancel", self.id)
