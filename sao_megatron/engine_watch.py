"""The engines of a run: followed until they are healthy, started again when they die, moved when their node does."""
from __future__ import annotations

import time

from sao_megatron.config import RunConfig
from sao_megatron.engine.process import answers
from sao_megatron.errors import RunError, Unfinished
from sao_megatron.placement.plan import Placement
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import Supervisor
from sao_megatron.telemetry.progress import Progress

HEALTH_SECONDS = 0.5
"""For an engine to say that it is healthy."""


class EngineWatch:
    """Learner and controllers read the engines' URLs again and again, so that an engine may change its place."""

    def __init__(self, config: RunConfig, placement: Placement, supervisor: Supervisor, progress: Progress):
        self._config, self._placement = config, placement
        self._supervisor, self._progress = supervisor, progress
        self.urls: dict[str, str] = {}
        self.starting: dict[str, float] = {}
        """Engines that are not healthy yet, and since when they start."""
        self.lost: set[str] = set()
        """Engines that were started often enough, or whose node is down: the run goes on without them."""
        self._restarts: dict[str, int] = {}
        self._read_plan()

    def _read_plan(self) -> None:
        plan = self._placement.plan()
        self._specs = {spec.name: spec for spec in plan.engines}
        self.urls = dict(zip(self._specs, plan.urls, strict=True))

    def note_start(self, names: set[str]) -> None:
        """These engines are started along with the rest of the run."""
        self.starting |= dict.fromkeys(names, time.monotonic())
        self._restarts |= dict.fromkeys(names, 0)
        self.lost -= names

    def revive(self, ended: dict[str, int]) -> None:
        """Take out of `ended` the engines that the run can do without, or that are started again alone.

        Raises Unfinished where the last engine's node is down and no other takes its place.
        """
        for name in [name for name in ended if name in self.urls]:
            if name in self.lost:
                ended.pop(name)
            elif node := self._placement.lost(name):
                ended.pop(name)
                self.replace(name, node)
            elif self._may_die(name):
                self._again(name, ended.pop(name))

    def _may_die(self, name: str) -> bool:
        """Whether an engine was once healthy, so that it is no fault of the recipe, and can be started again or other
        engines are left. (Without a learner nobody could give it weights again.)"""
        once_healthy = name not in self.starting or self._restarts[name]
        again = self._restarts[name] < self._config.engine.restarts
        return bool(self._config.mode != "rollout" and once_healthy and (again or self._others(name)))

    def _others(self, name: str) -> set[str]:
        return self.urls.keys() - self.lost - {name}

    def _again(self, name: str, code: int) -> None:
        most = self._config.engine.restarts
        if self._restarts[name] == most:
            self.lost.add(name)
            self._progress.event("engine_lost", name, f"{name} ended again (exit code {code}): the run goes on without "
                                 "it")
            return
        self._restarts[name] += 1
        self._start(name)
        self._progress.event("engine_restart", name, f"{name} ended with exit code {code} and is started again "
                             f"({self._restarts[name]} of engine.restarts={most})")

    def replace(self, name: str, node: str) -> None:
        """An engine whose node is down goes to another node, or is given up."""
        if self._placement.move(name):
            self._read_plan()
            RunFolder(self._config.run_dir).place_engines(list(self.urls.values()))
            self._progress.event("engine_restart", name, f"{node} is down: {name} is started anew at {self.urls[name]}")
            self._start(name)
        elif self._others(name):
            self.lost.add(name)
            self._progress.event("engine_lost", name, f"{node} is down, and no spare node is left: the run goes on "
                                 f"without {name}")
        else:
            raise Unfinished(f"{node} is down, where the last engine ({name}) ran, and no spare node is left")

    def _start(self, name: str) -> None:
        self._supervisor.end({name})  # nothing may be left of what it had started
        self._supervisor.start([self._specs[name]])
        self.starting[name] = time.monotonic()

    def check(self) -> None:
        """Note which engines have become healthy. Raises RunError if one takes too long."""
        for name, since in list(self.starting.items()):
            if name in self.lost or answers(self.urls[name], HEALTH_SECONDS):
                del self.starting[name]
            elif time.monotonic() - since > self._config.engine.start_timeout:
                raise RunError(f"{name} at {self.urls[name]} is not healthy after "
                               f"{self._config.engine.start_timeout:.0f} s (engine.start_timeout): see "
                               f"{self._supervisor.log_path(name)}")
