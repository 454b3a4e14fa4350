"""The sandbox servers of a run: started again when they die, given up when their node does."""
from __future__ import annotations

from sao_megatron.placement.plan import Placement
from sao_megatron.supervisor import Supervisor
from sao_megatron.telemetry.progress import Progress

MOST_RESTARTS = 5
"""Of one server; then it fails the run, for instance because its machine cannot isolate a sandbox."""


class SandboxWatch:
    """The controller's client finds out by itself which servers live, and does a lost session's work again."""

    def __init__(self, placement: Placement, supervisor: Supervisor, progress: Progress):
        self._placement, self._supervisor, self._progress = placement, supervisor, progress
        self._specs = {spec.name: spec for spec in placement.plan().sandboxes}
        self._restarts = dict.fromkeys(self._specs, 0)
        self._lost: set[str] = set()

    @property
    def names(self) -> set[str]:
        return set(self._specs)

    def revive(self, ended: dict[str, int]) -> None:
        """Take out of `ended` the servers that are started again, or that the run can do without."""
        for name in self._specs.keys() & ended:
            if name in self._lost or self._is_lost(name):
                ended.pop(name)
            elif self._restarts[name] < MOST_RESTARTS:
                self._again(name, ended.pop(name))

    def _is_lost(self, name: str) -> bool:
        if node := self._placement.lost(name):
            self._lost.add(name)
            self._progress.event("sandbox_lost", name, f"{node} is down: the run goes on without {name}")
        return name in self._lost

    def _again(self, name: str, code: int) -> None:
        self._restarts[name] += 1
        self._supervisor.end({name})
        self._supervisor.start([self._specs[name]])
        self._progress.event("sandbox_restart", name, f"{name} ended with exit code {code} and is started again "
                             f"({self._restarts[name]} of {MOST_RESTARTS})")
