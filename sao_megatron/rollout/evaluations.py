"""When a run is evaluated: before its first episode, after its last, and while it trains."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sao_megatron.config import RunConfig
from sao_megatron.rollout.evaluate import EvaluationSet, evaluate
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.telemetry.evaluations import write_evaluation
from sao_megatron.trajectory.store import Store, is_within, within
from sao_megatron.trajectory.versions import updates_in

log = logging.getLogger("controller")
LOOK_SECONDS = 0.2


class Evaluations:
    """`evaluates`: whether this controller is the one that does; the others only wait for the first one's end, since
    nothing may be trained before it."""

    def __init__(self, config: RunConfig, sets: list[EvaluationSet], pool: EnginePool, store: Store, evaluates: bool):
        self._config, self._sets, self._pool, self._store = config, sets, pool, store
        self._evaluates = evaluates
        self._running: asyncio.Task | None = None
        self._seen = max((updates_in(row.version) for row in store.evaluations()
                          if is_within(row.name) and self._is_done(row.name)), default=0)
        """Policy updates in the weights that were looked at last."""

    @property
    def running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def once(self, name: str) -> None:
        """Evaluate, unless the store has it: "start" and "end" of a run."""
        if not self._config.evaluation.count:
            return
        while not self._evaluates and name == "start" and not self._is_done(name):
            await asyncio.sleep(LOOK_SECONDS)
        if self._evaluates:
            await self._evaluate(name, self._store.published()[0])

    def begin_if_due(self, version: int, failure: asyncio.Future) -> None:
        """Start the evaluation of weights that were published just now, beside the episodes; its error goes to
        `failure`. One that would begin while the one before runs is left out."""
        every, updates = self._config.evaluation.every, updates_in(version)
        if not (self._evaluates and self._sets and every) or updates >= self._config.steps:
            return
        before, self._seen = self._seen, updates
        if updates // every <= before // every:
            return
        if self.running:
            log.warning("version %d is not evaluated: the evaluation before is not done", version)
            return
        self._running = asyncio.create_task(self._evaluate(within(updates), version))
        self._running.add_done_callback(_reporter(failure))

    async def finish(self) -> None:
        """Wait for what runs; raises its error."""
        if self._running:
            await self._running

    async def stop(self) -> None:
        """End what runs, if it does."""
        if self.running:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _is_done(self, name: str) -> bool:
        return {chosen.name for chosen in self._sets} <= {row.task_set for row in self._store.evaluations()
                                                          if row.name == name}

    async def _evaluate(self, name: str, version: int) -> None:
        done = {row.task_set for row in self._store.evaluations() if row.name == name}
        missing = [chosen for chosen in self._sets if chosen.name not in done]
        if not missing:
            return
        _, step = self._store.published()
        await evaluate(self._config, missing, self._pool, name, version, self._store)
        write_evaluation(self._config.run_dir / "tensorboard", step,
                         [row for row in self._store.evaluations() if row.name == name])


def _reporter(failure: asyncio.Future) -> Callable[[asyncio.Task], None]:
    def report(evaluation: asyncio.Task) -> None:
        if not evaluation.cancelled() and evaluation.exception() and not failure.done():
            failure.set_exception(evaluation.exception())
    return report
