"""Starts the processes of a run and follows them to its end: shows steps, and starts again what died, if it may."""
from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sao_megatron.blame import last_words
from sao_megatron.config import RunConfig
from sao_megatron.engine_watch import EngineWatch
from sao_megatron.errors import RunError, Unfinished
from sao_megatron.hang import Watchdog
from sao_megatron.placement.plan import Placement
from sao_megatron.run_folder import RunFolder
from sao_megatron.sandbox_watch import SandboxWatch
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.telemetry.events import Kind
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import ALARMS, STOPPED, Store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.5
EXIT_SECONDS = 600.0
"""Between the end of the first learner rank or of the controller, and the end of all of them."""
ENGINE_END_SECONDS = 15.0
"""For an engine that lost its scheduler to end (SGLang notices within 1 s, then collects dumps for 5 s)."""
HASTE_SECONDS = 30.0
"""Kept of the seconds before the time limit, to end the processes and put the job back into the queue."""


class Watch:
    """Raises RunError when a process has failed and may not be started again, Unfinished when time or a node is lost.
    """

    def __init__(self, config: RunConfig, placement: Placement, store: Store, supervisor: Supervisor,
                 progress: Progress):
        self._config, self._placement, self._store = config, placement, store
        self._supervisor, self._progress = supervisor, progress
        self._plan = placement.plan()
        self._engines = EngineWatch(config, placement, supervisor, progress)
        self._sandboxes = SandboxWatch(placement, supervisor, progress)
        self._workers = {spec.name for spec in [*self._plan.learners, self._plan.controller] if spec}
        self._first_end: float | None = None
        self._end_by: float | None = None
        """When there is no more time, once we were asked to end."""
        self._generation = store.get_state("generation")
        self._last_step = self._furthest = max((row.step for row in store.steps()), default=-1)
        self._alarmed = set(self._alarms())
        """Alarms that were shown; a learner that goes on from a checkpoint takes back those of lost steps."""
        self._paused = False
        self._causes: list[str] = []
        """Why processes were started again since the run last got further."""
        self._rendezvous: TCPStore | None = None
        self._watchdog: Watchdog | None = None

    @property
    def _learners(self) -> set[str]:
        return {spec.name for spec in self._plan.learners}

    def start(self) -> None:
        """Start everything."""
        self._start(self._engines.urls.keys() | self._workers | self._sandboxes.names)

    def until_done(self) -> None:
        """Return when the learner ranks and the controller have ended well."""
        try:
            self._follow()
        except Exception as cause:  # a Ctrl-C or a SIGTERM is none: it ends all at once
            with suppress(RunError, sqlite3.Error):  # of a store that fails too
                self._save_first(cause)
            raise

    def _follow(self) -> None:
        while not self._all_ended(self._revived(self._supervisor.poll())):
            self._show_steps()
            self._show_alarms()
            self._engines.check()
            self._mind_hangs()
            self._mind_the_time()
            self._show_status()
            time.sleep(POLL_SECONDS)
        self._show_steps()
        self._show_alarms()
        if self._end_by and not self._store.get_state("finished", False):
            raise Unfinished("ended before the time limit, with a checkpoint")

    def _start(self, names: set[str]) -> None:
        self._plan = self._placement.plan()
        learners = [spec for spec in self._plan.learners if spec.name in names]
        if learners:
            learners = self._meeting(learners)
        others = [spec for spec in [*self._plan.engines, *self._plan.sandboxes, self._plan.controller]
                  if spec and spec.name in names]
        if engines := self._engines.urls.keys() & names:
            self._engines.note_start(engines)
            self._store.unpublish()  # else the controller would sample from what they start with
            if self._config.mode == "rollout":
                self._store.set_published(0, 0)  # which is what it should do here
        self._supervisor.start([*learners, *others])

    def _meeting(self, learners: list[ProcessSpec]) -> list[ProcessSpec]:
        """The ranks meet at a store of ours, as under torchrun: a free port that rank 0 were to bind later could be
        taken. Ranks that start again need a new one."""
        from torch.distributed import TCPStore
        self._rendezvous = TCPStore(self._plan.address, 0, is_master=True, wait_for_workers=False)
        self._watchdog = Watchdog(self._rendezvous, self._config.parallel.ranks, self._config.hang_timeout)
        place = {"MASTER_PORT": str(self._rendezvous.port)}
        return [replace(spec, environment=spec.environment | place) for spec in learners]

    def _revived(self, ended: dict[str, int]) -> dict[str, int]:
        """What ended, without the engines that the run can do without or that were started again alone."""
        self._placement.tend(self._supervisor, ended)
        self._engines.revive(ended)
        self._sandboxes.revive(ended)
        return ended

    def _mind_hangs(self) -> None:
        if self._watchdog is None:
            return
        if (self._store.published() is None or self._engines.starting or self._store.get_state("finished", False)
                or RunFolder(self._config.run_dir).paused_path.exists()):
            self._watchdog.rest()  # the learner may wait for engines, for the last evaluation, for a person
        elif self._watchdog.hangs():
            report = self._watchdog.report(self._supervisor, sorted(self._learners))
            self._watchdog = None  # of the next start; this learner will not save anything
            self._start_again(report, self._learners, "hang")

    def _mind_the_time(self) -> None:
        """Once the supervisor was asked to end: have the learner save a checkpoint, and all end."""
        if not self._supervisor.asked_to_end:
            return
        self._ask_to_end("time is nearly up: the learner saves a checkpoint after its step, then all end")
        if time.monotonic() > self._end_by:
            raise Unfinished(f"the learner saved no checkpoint within the {self._config.cluster.signal_seconds} s "
                             "before the time limit (cluster.signal_seconds): the run goes on from an older one")

    def _ask_to_end(self, note: str) -> None:
        if self._end_by is None:
            self._end_by = time.monotonic() + max(self._config.cluster.signal_seconds - HASTE_SECONDS, HASTE_SECONDS)
            self._progress.note(note)
            self._store.set_state("stop", True)

    def _save_first(self, cause: Exception) -> None:
        """Before the learner is ended for what is not its fault: have it save the steps that no checkpoint holds."""
        while self._learner_lives() and self._unsaved():
            self._ask_to_end(f"{str(cause).partition(chr(10))[0]}: the learner saves a checkpoint of its steps first")
            if time.monotonic() > self._end_by:
                self._progress.note("the learner saved no checkpoint in time: the run goes on from an older one")
                return
            time.sleep(POLL_SECONDS)

    def _learner_lives(self) -> bool:
        ended = self._supervisor.poll()
        codes = [ended.get(name) for name in self._learners]
        return self._watchdog is not None and None in codes and not any(codes)

    def _unsaved(self) -> bool:
        """Whether there is a step that no checkpoint holds and that one is to hold."""
        latest = RunFolder(self._config.run_dir).checkpoints.latest()
        saved = latest.step if latest else 0
        return bool(self._config.checkpoint.every) and any(row.step >= saved for row in self._store.last_steps(1))

    def _all_ended(self, ended: dict[str, int]) -> bool:
        if failed := self._failed(ended):
            self._start_again(*self._failure(failed))
            return False
        if ended and self._first_end is None:
            self._first_end = time.monotonic()
        missing = sorted(self._workers - ended.keys())
        if missing and ended and not self._end_by and time.monotonic() - self._first_end > EXIT_SECONDS:
            raise RunError(f"{', '.join(missing)} still run {EXIT_SECONDS:.0f} s after the run had finished and "
                           f"{', '.join(sorted(ended))} had ended: see {self._supervisor.log_path(missing[0])}")
        return not missing

    def _failed(self, ended: dict[str, int]) -> list[str]:
        # Read after the exit codes were: a rank first says that the run is finished, then ends.
        may_end = self._end_by is not None or self._store.get_state("finished", False)
        return [name for name, code in ended.items()
                if (code or not may_end or name not in self._workers) and name not in self._engines.lost]

    def _failure(self, failed: list[str]) -> tuple[RunError, set[str]]:
        """The error for processes that ended, and which must be started for the run to go on.

        Where they blame an engine, it gets time to end and to say why itself. The weights of an engine that starts come
        from a learner that starts. Learner ranks live and die together; the controller does not mind their absence.
        """
        deadline = time.monotonic() + ENGINE_END_SECONDS
        everything = self._engines.urls.keys() | self._workers
        while not (engines := [name for name in failed if name in self._engines.urls]):
            blamed = self._blame_an_engine(failed)
            if not blamed or time.monotonic() > deadline:
                again = set(failed) | (self._learners if self._learners & set(failed) else set())
                return self._supervisor.failure(failed), everything if blamed else again
            time.sleep(POLL_SECONDS)
            failed = self._failed(self._supervisor.poll())
        return self._supervisor.failure(failed, suspects=engines), everything

    def _blame_an_engine(self, failed: list[str]) -> bool:
        logs = [self._supervisor.log_path(self._supervisor.culprit(name)[0]) for name in failed]
        reasons = [last_words(log)[0] for log in logs]
        return any(url in reason for url in self._engines.urls.values() for reason in reasons)

    def _start_again(self, error: RunError, names: set[str], kind: Kind = "restart") -> None:
        if self._learners <= names:
            self._save_first(error)
        if self._supervisor.asked_to_end:
            raise Unfinished(f"{str(error).splitlines()[0]}, while the run was to end before its time limit")
        if self._store.get_state(STOPPED):  # an alarm, which would ring again
            raise error
        names = self._off_lost_nodes(names)
        self._causes.append(str(error))
        if len(self._causes) > self._config.restarts:
            raise _crash_loop(self._causes)
        reason, _, details = str(error).partition("\n")
        which = ", ".join(sorted(names))
        self._progress.event(kind, which, f"{reason}; starting {which} again ({len(self._causes)} of restarts="
                             f"{self._config.restarts})\n{details}".rstrip())
        self._supervisor.end(names)
        self._store.forget("stop")
        self._first_end = self._end_by = None
        self._start(names)

    def _off_lost_nodes(self, names: set[str]) -> set[str]:
        """`names` without engines whose node is down: these are started on another, or given up. Raises Unfinished if
        anything else ran there."""
        for name in sorted(names):
            if node := self._placement.lost(name):
                if name not in self._engines.urls:
                    raise Unfinished(f"{node} is down, where {name} ran")
                self._engines.replace(name, node)
                self._store.unpublish()
                names = names - {name}
        return names

    def _show_steps(self) -> None:
        if (generation := self._store.get_state("generation")) != self._generation:  # a learner has begun
            self._generation, self._last_step = generation, self._store.get_state("first_step") - 1
        for row in self._store.steps(after=self._last_step):
            self._last_step = row.step
            self._progress.step(row.step + 1, row.metrics)
        if self._last_step > self._furthest:
            self._furthest, self._causes = self._last_step, []
        self._progress.flush(now=False)

    def _show_alarms(self) -> None:
        alarms = self._alarms()
        for step, sentence in alarms:
            if (step, sentence) not in self._alarmed:
                self._progress.note(f"alarm at step {step + 1}: {sentence}")
        self._alarmed = set(alarms)

    def _alarms(self) -> list[tuple[int, str]]:
        return [(step, sentence) for step, sentence in self._store.get_state(ALARMS, [])]

    def _show_status(self) -> None:
        """Start-up stage by stage; later only when a pause begins, or where nothing else was shown for a while."""
        before, self._paused = self._paused, RunFolder(self._config.run_dir).paused_path.exists()
        if self._store.published() is None and self._last_step < self._store.get_state("first_step", 0):
            count = len(self._engines.urls)
            engines = f"engines {count - len(self._engines.starting)}/{count} ready, " if count else ""
            self._progress.status(f"start-up: {engines}learner {self._learner_stage()}")
        elif self._progress.quiet() or self._paused and not before:
            self._progress.status(self._doing())

    def _learner_stage(self) -> str:
        warmup = self._store.get_state("warmup")
        if warmup is None:
            return "starting"
        if warmup["step"] < warmup["steps"]:
            return f"in warm-up step {warmup['step']}/{warmup['steps']}"
        return "publishes its first weights" if self._engines.urls else "begins"

    def _doing(self) -> str:
        if self._store.get_state("finished", False):
            return "learner finished; waiting for the last evaluation and the export"
        if (paused := RunFolder(self._config.run_dir).paused_path).exists():
            return f"paused until {paused} is deleted: {paused.read_text().strip()}"
        if self._config.evaluation.only:
            return "evaluating"
        ready, in_flight = self._store.counts()["ready"], self._store.sum_of("in_flight")
        batch = self._config.batch.trajectories
        if not self._plan.learners:
            return f"{ready} of {self._config.total_steps * batch} trajectories, {in_flight} episodes in flight"
        return (f"step {self._last_step + 2} under way: {ready} trajectories ready of {batch}, "
                f"{in_flight} episodes in flight")


def _crash_loop(causes: list[str]) -> RunError:
    """The first cause on top: what came later may be its consequence."""
    if len(causes) == 1:
        return RunError(causes[0])
    return RunError(f"{causes[0]}\nand after {len(causes) - 1} restarts without a step the last cause is: {causes[-1]}")
