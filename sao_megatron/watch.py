"""Starts the processes of a run and follows them to its end: shows steps, and starts again what died, if it may."""
from __future__ import annotations

import time
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec, Supervisor, last_words
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import Store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.5
EXIT_SECONDS = 600.0
"""Between the end of the first learner rank or of the controller, and the end of all of them."""
ENGINE_END_SECONDS = 15.0
"""For an engine that lost its scheduler to end (SGLang notices within 1 s, then collects dumps for 5 s)."""


@dataclass(frozen=True)
class Plan:
    """What to start."""

    engines: list[ProcessSpec]
    controller: ProcessSpec | None
    learners: list[ProcessSpec]
    """The ranks, without the port at which they find each other."""
    urls: list[str]
    """Of the engines."""


class Watch:
    """Raises RunError when a process has failed and may not be started again."""

    def __init__(self, config: RunConfig, plan: Plan, store: Store, supervisor: Supervisor, progress: Progress):
        self._config, self._plan, self._store = config, plan, store
        self._supervisor, self._progress = supervisor, progress
        self._workers = {spec.name for spec in [*plan.learners, plan.controller] if spec}
        self._urls = dict(zip((spec.name for spec in plan.engines), plan.urls, strict=True))
        self._starting: dict[str, float] = {}
        """Engines that are not healthy yet, and since when they start."""
        self._engine_restarts = dict.fromkeys(self._urls, 0)
        self._lost: set[str] = set()
        """Engines that were started often enough: the run goes on without them."""
        self._first_end: float | None = None
        self._generation = store.get_state("generation")
        self._last_step = self._furthest = max((row.step for row in store.steps()), default=-1)
        self._restarts = 0
        self._rendezvous: TCPStore | None = None

    def start(self) -> None:
        """Start everything."""
        self._start({spec.name for spec in [*self._plan.engines, *self._plan.learners, self._plan.controller] if spec})

    def until_done(self) -> None:
        """Return when the learner ranks and the controller have ended well."""
        while not self._all_ended(self._revived(self._supervisor.poll())):
            self._show_steps()
            self._check_engines()
            self._show_status()
            time.sleep(POLL_SECONDS)
        self._show_steps()

    def _start(self, names: set[str]) -> None:
        learners = [spec for spec in self._plan.learners if spec.name in names]
        if learners:
            learners = self._meeting(learners)
        others = [spec for spec in [*self._plan.engines, self._plan.controller] if spec and spec.name in names]
        if engines := self._urls.keys() & names:
            self._starting |= dict.fromkeys(engines, time.monotonic())
            self._engine_restarts |= dict.fromkeys(engines, 0)
            self._lost -= engines
            self._store.unpublish()  # else the controller would sample from what they start with
            if self._config.mode == "rollout":
                self._store.set_published(0, 0)  # which is what it should do here
        self._supervisor.start([*learners, *others])

    def _meeting(self, learners: list[ProcessSpec]) -> list[ProcessSpec]:
        """The ranks meet at a store of ours, as under torchrun: a free port that rank 0 were to bind later could be
        taken. Ranks that start again need a new one."""
        from torch.distributed import TCPStore
        self._rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"MASTER_PORT": str(self._rendezvous.port)}
        return [replace(spec, environment=spec.environment | place) for spec in learners]

    def _revived(self, ended: dict[str, int]) -> dict[str, int]:
        """What ended, without the engines that the run can do without or that were started again alone."""
        for name in [name for name in ended if name in self._urls and self._may_die(name)]:
            code = ended.pop(name)
            if name in self._lost:
                continue
            most = self._config.engine.restarts
            if self._engine_restarts[name] == most:
                self._lost.add(name)
                self._progress.note(f"{name} ended again (exit code {code}): the run goes on without it")
                continue
            self._engine_restarts[name] += 1
            self._supervisor.end({name})  # nothing may be left of what it had started
            self._supervisor.start([spec for spec in self._plan.engines if spec.name == name])
            self._starting[name] = time.monotonic()
            self._progress.note(f"{name} ended with exit code {code} and is started again "
                                f"({self._engine_restarts[name]} of engine.restarts={most})")
        return ended

    def _may_die(self, name: str) -> bool:
        """Whether an engine was once healthy, so that it is no fault of the recipe, and can be started again or other
        engines are left. (Without a learner nobody could give it weights again.)"""
        once_healthy = name not in self._starting or self._engine_restarts[name]
        again = self._engine_restarts[name] < self._config.engine.restarts
        return bool(self._plan.learners and once_healthy and (again or self._urls.keys() - self._lost - {name}))

    def _all_ended(self, ended: dict[str, int]) -> bool:
        if failed := self._failed(ended):
            self._start_again(*self._failure(failed))
            return False
        if ended and self._first_end is None:
            self._first_end = time.monotonic()
        missing = sorted(self._workers - ended.keys())
        if missing and ended and time.monotonic() - self._first_end > EXIT_SECONDS:
            raise RunError(f"{', '.join(missing)} still run {EXIT_SECONDS:.0f} s after the run had finished and "
                           f"{', '.join(sorted(ended))} had ended: see {self._supervisor.log_path(missing[0])}")
        return not missing

    def _failed(self, ended: dict[str, int]) -> list[str]:
        # Read after the exit codes were: a rank first says that the run is finished, then ends.
        finished = self._store.get_state("finished", False)
        return [name for name, code in ended.items()
                if (code or not finished or name not in self._workers) and name not in self._lost]

    def _failure(self, failed: list[str]) -> tuple[RunError, set[str]]:
        """The error for processes that ended, and which must be started for the run to go on.

        Where they blame an engine, it gets time to end and to say why itself. The weights of an engine that starts come
        from a learner that starts. Learner ranks live and die together; the controller does not mind their absence.
        """
        deadline = time.monotonic() + ENGINE_END_SECONDS
        everything = self._urls.keys() | self._workers
        while not (engines := [name for name in failed if name in self._urls]):
            blamed = self._blame_an_engine(failed)
            if not blamed or time.monotonic() > deadline:
                ranks = {spec.name for spec in self._plan.learners}
                again = set(failed) | (ranks if ranks & set(failed) else set())
                return self._supervisor.failure(failed), everything if blamed else again
            time.sleep(POLL_SECONDS)
            failed = self._failed(self._supervisor.poll())
        return self._supervisor.failure(failed, suspects=engines), everything

    def _blame_an_engine(self, failed: list[str]) -> bool:
        reasons = [last_words(self._supervisor.log_path(name))[0] for name in failed]
        return any(url in reason for url in self._urls.values() for reason in reasons)

    def _start_again(self, error: RunError, names: set[str]) -> None:
        if self._restarts >= self._config.restarts:
            raise error
        self._restarts += 1
        self._progress.note(f"{str(error).splitlines()[0]}; starting {', '.join(sorted(names))} again "
                            f"({self._restarts} of restarts={self._config.restarts})")
        self._supervisor.end(names)
        self._first_end = None
        self._start(names)

    def _check_engines(self) -> None:
        for name, since in list(self._starting.items()):
            if name in self._lost or _is_healthy(self._urls[name]):
                del self._starting[name]
            elif time.monotonic() - since > self._config.engine.start_timeout:
                raise RunError(f"{name} at {self._urls[name]} is not healthy after "
                               f"{self._config.engine.start_timeout:.0f} s (engine.start_timeout): see "
                               f"{self._supervisor.log_path(name)}")

    def _show_steps(self) -> None:
        if (generation := self._store.get_state("generation")) != self._generation:  # a learner has begun
            self._generation, self._last_step = generation, self._store.get_state("first_step") - 1
        for row in self._store.steps(after=self._last_step):
            self._last_step = row.step
            self._progress.step(row.step + 1, row.metrics)
        if self._last_step > self._furthest:
            self._furthest, self._restarts = self._last_step, 0
        self._progress.flush(now=False)

    def _show_status(self) -> None:
        """Start-up stage by stage; later only where nothing else was shown for a while."""
        if self._store.published() is None and self._last_step < self._store.get_state("first_step", 0):
            engines = f"engines {len(self._urls) - len(self._starting)}/{len(self._urls)} ready, " if self._urls else ""
            self._progress.status(f"start-up: {engines}learner {self._learner_stage()}")
        elif self._progress.quiet():
            self._progress.status(self._doing())

    def _learner_stage(self) -> str:
        warmup = self._store.get_state("warmup")
        if warmup is None:
            return "starting"
        if warmup["step"] < warmup["steps"]:
            return f"in warm-up step {warmup['step']}/{warmup['steps']}"
        return "publishes its first weights" if self._urls else "begins"

    def _doing(self) -> str:
        if self._store.get_state("finished", False):
            return "learner finished; waiting for the last evaluation and the export"
        if (paused := RunFolder(self._config.run_dir).paused_path).exists():
            return f"paused until {paused} is deleted: {paused.read_text().strip()}"
        ready, in_flight = self._store.counts()["ready"], self._store.sum_of("in_flight")
        batch = self._config.batch.trajectories
        if not self._plan.learners:
            return f"{ready} of {self._config.total_steps * batch} trajectories, {in_flight} episodes in flight"
        return (f"step {self._last_step + 2} under way: {ready} trajectories ready of {batch}, "
                f"{in_flight} episodes in flight")


def _is_healthy(url: str) -> bool:
    """Whether GET /health says 200. Not by urllib, which would ask an HTTP proxy."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=0.5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
