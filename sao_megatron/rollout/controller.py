"""The controller: one asyncio process that keeps episodes in flight and appends each trajectory the moment it ends.

It meets the learner only in the store: it reads which weights are published and how many trajectories wait or are
trained, starts as many episodes as pacing admits, and never waits for the learner while it may start one. Killed and
started again it first plays the episodes that were in flight (of a task that is replayable, from where they were), then
continues at the next prompts. Several controllers share one store: each deals the groups that are its own.
"""
from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.evaluate import EvaluationSet
from sao_megatron.rollout.evaluations import Evaluations
from sao_megatron.rollout.half_done import HalfDone
from sao_megatron.rollout.pacing import Deal, admissible, share
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.quarantine import Quarantine
from sao_megatron.rollout.tasks.base import Task
from sao_megatron.trajectory.store import MAX_LAG, Store
from sao_megatron.trajectory.types import Status, Trajectory

log = logging.getLogger("controller")

REFRESH = 0.05  # seconds between two looks at the store
EVERY_SECOND = 1.0  # between two writes of the progress display's numbers, and two looks for new engines
LEARNER_PATIENCE = 3600.0  # seconds without news from the learner after which an idle controller gives up
CANCEL_PATIENCE = 30.0  # seconds that cancelled episodes get to unwind
MOST_ERRORS_IN_A_ROW = 20
OLDEST = 15
"""Of the ages, in batches, that engines tell apart. They must be few: SGLang's metrics have a series for each priority
that ever was (0.5.23; sgl-project/sglang, issue 20814), and after 20,000 of them took 2.6 s to read."""
CANCELLED = "redundant"
"""Key of the store's state: redundant episodes that were cancelled or came too late, by controller."""


async def run_controller(config: RunConfig, task: Task, store: Store, clients: list, *, index: int = 0,
                         sets: list[EvaluationSet] = (), find_clients: Callable[[], list] | None = None,
                         learner_patience: float = LEARNER_PATIENCE) -> None:
    """Roll out until the store's state says "finished" (then evaluates and returns) or "stop" (returns).

    Where nothing trains (`mode: rollout`) it says "finished" itself, when the trajectories of all steps are there.
    `index`: which of `rollout.controllers`; number 0 evaluates `sets`, before the first episode, after the last, and
    every `evaluation.every` updates, each once in a run. `find_clients` lists the engines' clients anew, so that
    engines may join and leave.

    Raises RunError if an engine fails though it lives, if none lives for `engine.start_timeout`, if 20 episodes in a
    row failed, or if the controller could do nothing for `learner_patience` seconds because the learner published
    nothing.
    """
    # None is trusted yet: an engine may have started anew, too, and have no weights.
    pool = EnginePool([], config.engine.start_timeout, config.rollout.request_tokens,
                      lambda: (store.published() or (None,))[0])
    pool.use(clients)
    controller = _Controller(config, task, store, pool, index, list(sets), learner_patience)
    try:
        await controller.run(find_clients or (lambda: clients))
    finally:
        await controller.evaluations.stop()
        pool.close()


def collect_rarely() -> None:
    """For the whole process: have Python's collector of cycles look at everything only once in five million objects,
    and at what is there now never. It looks at every token of every episode in flight: 0.05 s for 100 episodes of
    32,000 tokens, and so seconds, in which nothing else happens, for a fleet's."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


class _Controller:
    def __init__(self, config: RunConfig, task: Task, store: Store, pool: EnginePool, index: int,
                 sets: list[EvaluationSet], learner_patience: float):
        self.config, self.task, self.store, self.pool, self.index = config, task, store, pool, index
        self.learner_patience = learner_patience
        self.settings = EpisodeSettings.of(config)
        self.evaluations = Evaluations(config, sets, pool, store, evaluates=index == 0)
        self.quarantine = Quarantine(store, config.rollout.quarantine_after)
        self.deal = Deal(store, self.settings.group - config.rollout.redundancy, config.rollout.redundancy, index,
                         config.rollout.controllers, self._is_quarantined)
        self.half_done = HalfDone(store) if getattr(task, "replayable", False) else None
        self.concurrency = share(config.rollout.concurrency, index, config.rollout.controllers)
        self.room = 0
        """Episodes that pacing still admits. One that ends as ready does not change it: it stays live."""
        self.episodes: dict[asyncio.Task, int] = {}
        """Those under way, and their seqs."""
        self.finished: list[tuple[Trajectory, int]] = []
        self.failure = asyncio.get_running_loop().create_future()
        self.errors_in_a_row = 0
        self.first_error = ""
        self.cancelled = store.get_state(f"{CANCELLED}/{index}", 0)
        self.written = 0.0

    async def run(self, find_clients: Callable[[], list]) -> None:
        if not await self._weights_published():
            return
        if self.config.evaluation.only:
            await self.evaluations.once("end")
            self.store.set_state("finished", True)
            return
        await self.evaluations.once("start")
        try:
            finished = await self._roll_out(find_clients)
        finally:
            await self._cancel_episodes()
        if finished:
            await self.evaluations.finish()
            await self.evaluations.once("end")

    async def _weights_published(self) -> bool:
        """Wait for the first publication; False if told to stop."""
        deadline = time.monotonic() + self.learner_patience
        while self.store.published() is None:
            if self.store.get_state("stop"):
                return False
            if time.monotonic() > deadline:
                raise RunError(f"the controller waited {self.learner_patience:.0f} s for the learner's first "
                               "publication of weights: see the learner's log")
            await asyncio.sleep(REFRESH)
        return True

    async def _roll_out(self, find_clients: Callable[[], list]) -> bool:
        """Keep episodes in flight; True when the learner has finished, False when told to stop."""
        published, idle_since = None, time.monotonic()
        while True:
            if self.store.get_state("finished"):
                return True
            if self.store.get_state("stop"):
                return False
            before, published = published, self.store.published() or published
            self._admit(steps=published[1])
            self.evaluations.begin_if_due(published[0], self.failure)
            if time.monotonic() - self.written >= EVERY_SECOND:
                self.pool.use(find_clients())
                self._write_numbers()
            if self.episodes or self.evaluations.running or published != before:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > self.learner_patience:
                raise RunError(f"nothing to roll out for {self.learner_patience:.0f} s: pacing waits for weights newer "
                               f"than version {published[0]}, which the learner did not publish: see the learner's log")
            await asyncio.wait([self.failure], timeout=REFRESH)
            if self.failure.done():
                self.failure.result()

    def _write_numbers(self) -> None:
        self.written = time.monotonic()
        self.store.set_state(f"in_flight/{self.index}", len(self.episodes))
        if self.cancelled:
            self.store.set_state(f"{CANCELLED}/{self.index}", self.cancelled)

    def _admit(self, steps: int) -> None:
        if self.half_done:
            self.half_done.write()
        rollout, batch = self.config.rollout, self.config.batch.trajectories
        live = self.deal.live(self.store.dropped(self.settings.group, self.index, rollout.controllers))
        if self.config.mode == "rollout":
            window = self.config.total_steps * batch
            if self.store.counts()["ready"] >= window:
                self.store.set_state("finished", True)
        else:
            window = admissible(0, steps, self._max_lag(), batch)
        size = self.deal.size  # a batch is of whole groups, and so is a share
        self.room = max(0, share(window // size, self.index, rollout.controllers) * size - live)
        self._start_episodes()

    def _max_lag(self) -> int:
        """What the recipe wants, or less while the learner's alarms ask for fresher samples."""
        wanted = self.config.rollout.max_lag
        return min(wanted, self.store.get_state(MAX_LAG, wanted))

    def _start_episodes(self) -> None:
        while len(self.episodes) < self.concurrency and (self.room > 0 or self._may_add_redundant()):
            seq, places = self.deal.start()
            self.room -= places
            episode = asyncio.create_task(self._episode(seq))
            self.episodes[episode] = seq
            episode.add_done_callback(self._ended)

    def _may_add_redundant(self) -> bool:
        return self.config.rollout.redundancy > 0 and not self.failure.done() and self.deal.next_is_free()

    def _is_quarantined(self, group: int) -> bool:
        return bool(self.quarantine.ids) and self.task.prompt(group).id in self.quarantine.ids

    async def _episode(self, seq: int) -> Trajectory:
        prompt = self.task.prompt(seq // self.settings.group)
        diary = self.half_done.diary(seq) if self.half_done else None
        with self.pool.seat(lambda: self._age(seq), seq // self.settings.group) as client:
            return await run_episode(client, self.task, prompt, self.settings, seq, diary)

    def _age(self, seq: int) -> int:
        """An episode's priority: how many batches were dealt since it was."""
        return min(OLDEST, max(0, self.deal.next - seq) // self.config.batch.trajectories)

    def _ended(self, episode: asyncio.Task) -> None:
        seq = self.episodes.pop(episode)
        trajectory = None
        try:
            if not episode.cancelled():
                trajectory = episode.result()
                self._count_errors(trajectory, seq)
        except Exception as error:
            self._fail(error)
        if self.deal.complete(seq):  # its group needs it no more
            self.cancelled += trajectory is not None  # it ended together with the last that did
            trajectory = None
            if self.half_done:
                self.half_done.give_up(seq)
        outcome = trajectory is not None and trajectory.status is not Status.ERROR
        if self.deal.end(seq, outcome) and outcome and self.config.rollout.redundancy:
            self._cancel_group(seq // self.settings.group)
        if trajectory is not None:
            self._append(trajectory, seq)
        self._start_episodes()

    def _cancel_group(self, group: int) -> None:
        for episode, seq in self.episodes.items():
            if seq // self.settings.group == group and not episode.done():
                self.cancelled += episode.cancel()

    def _append(self, trajectory: Trajectory, seq: int) -> None:
        """In one write with the others that end in this turn of the event loop."""
        self.finished.append((trajectory, seq))
        if len(self.finished) == 1:
            asyncio.get_running_loop().call_soon(self._write_finished)

    def _write_finished(self) -> None:
        finished, self.finished = self.finished, []
        if not finished:
            return
        try:
            if self.half_done:
                self.half_done.forget({seq for _, seq in finished})
            self.store.append_all(finished)
        except Exception as error:  # nobody awaits this
            self._fail(error)

    def _count_errors(self, trajectory: Trajectory, seq: int) -> None:
        error = trajectory.info["error"] if trajectory.status is Status.ERROR else None
        self.quarantine.note(trajectory.prompt_id, seq // self.settings.group, error)
        if error is None:
            self.errors_in_a_row = 0
            return
        if self.errors_in_a_row == 0:
            self.first_error = error
            log.warning("an episode of prompt %s failed:\n%s", trajectory.prompt_id, trajectory.info["traceback"])
        self.errors_in_a_row += 1
        if self.errors_in_a_row >= MOST_ERRORS_IN_A_ROW:
            self._fail(RunError(f"{self.errors_in_a_row} episodes of task {self.task.name} in a row failed; the first "
                                f"with: {self.first_error} (its traceback is in the controller's log)"))

    def _fail(self, error: Exception) -> None:
        self.room = 0
        if not self.failure.done():
            self.failure.set_exception(error)

    async def _cancel_episodes(self) -> None:
        self.room, self.concurrency = 0, 0
        running = list(self.episodes)
        for episode in running:
            episode.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=CANCEL_PATIENCE)
            if stuck:
                raise RunError(f"{len(stuck)} episodes of task {self.task.name} did not end within "
                               f"{CANCEL_PATIENCE:.0f} s of being cancelled: its environment must let "
                               "asyncio.CancelledError through")
        await asyncio.sleep(0)  # the callbacks of those that ended
        self._write_finished()
        if self.half_done:
            self.half_done.write()
        self._write_numbers()
