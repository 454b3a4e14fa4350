"""The controller: one asyncio process that keeps episodes in flight and appends each trajectory the moment it ends.

It meets the learner only in the store: it reads which weights are published and how many trajectories wait or are
trained, starts as many episodes as pacing admits, and never waits for the learner while it may start one. Killed and
started again it continues at the next free seq; the episodes that were in flight are lost, finished ones are not. Where
several rollouts of a prompt make a group, it first plays again those that unfinished groups lost, then continues at the
next group.
"""
from __future__ import annotations

import asyncio
import time

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.evaluate import evaluate
from sao_megatron.rollout.pacing import admissible
from sao_megatron.rollout.pool import EnginePool, Generator
from sao_megatron.rollout.tasks.base import Task
from sao_megatron.trajectory.store import MAX_LAG, Store
from sao_megatron.trajectory.types import Status, Trajectory

REFRESH = 0.05  # seconds between two looks at the store
IN_FLIGHT_EVERY = 1.0  # seconds between two writes of the progress display's number
LEARNER_PATIENCE = 3600.0  # seconds without news from the learner after which an idle controller gives up
CANCEL_PATIENCE = 30.0  # seconds that cancelled episodes get to unwind
MOST_ERRORS_IN_A_ROW = 20


async def run_controller(config: RunConfig, task: Task, store: Store, clients: list[Generator],
                         learner_patience: float = LEARNER_PATIENCE) -> None:
    """Roll out until the store's state says "finished" (then evaluates and returns) or "stop" (returns).

    Where nothing trains (`mode: rollout`) it says "finished" itself, when the trajectories of all steps are there.

    Evaluates before the first episode and after the last where `evaluation.episodes` is set, each once in a run.
    Raises RunError if an engine fails though it lives, if none lives for `engine.start_timeout`, if 20 episodes in a
    row end with a failed environment, or if the controller could do nothing for `learner_patience` seconds because the
    learner published nothing.
    """
    pool = EnginePool(clients, config.engine.start_timeout)
    try:
        await _Controller(config, task, store, pool, learner_patience).run()
    finally:
        pool.close()


class _Controller:
    def __init__(self, config: RunConfig, task: Task, store: Store, pool: EnginePool, learner_patience: float):
        self.config, self.task, self.store, self.pool = config, task, store, pool
        self.learner_patience = learner_patience
        self.settings = EpisodeSettings.of(config)
        group = self.settings.rollouts_per_prompt
        self.next_seq = -(-store.next_seq() // group) * group
        self.again = store.missing_seqs(group) if group > 1 else []
        """Seqs of a dead controller's episodes that unfinished groups wait for."""
        self.room = 0
        """Episodes that pacing still admits. One that ends as ready does not change it: it stays live."""
        self.episodes: set[asyncio.Task] = set()
        self.finished: list[tuple[Trajectory, int]] = []
        self.failure = asyncio.get_running_loop().create_future()
        self.errors_in_a_row = 0
        self.first_error = ""
        self.in_flight_written = 0.0

    async def run(self) -> None:
        if not await self._weights_published():
            return
        await self._evaluate_once("start")
        try:
            finished = await self._roll_out()
        finally:
            await self._cancel_episodes()
        if finished:
            await self._evaluate_once("end")

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

    async def _evaluate_once(self, name: str) -> None:
        episodes = self.config.evaluation.episodes
        if episodes and name not in [done.name for done in self.store.evaluations()]:
            version, _ = self.store.published()
            await evaluate(self.config, self.task, self.pool, episodes, name, version, self.store)

    async def _roll_out(self) -> bool:
        """Keep episodes in flight; True when the learner has finished, False when told to stop."""
        published, idle_since = None, time.monotonic()
        while True:
            if self.store.get_state("finished"):
                return True
            if self.store.get_state("stop"):
                return False
            before, published = published, self.store.published()
            self._admit(steps=published[1])
            if self.episodes or published != before:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > self.learner_patience:
                raise RunError(f"nothing to roll out for {self.learner_patience:.0f} s: pacing waits for weights newer "
                               f"than version {published[0]}, which the learner did not publish: see the learner's log")
            await asyncio.wait([self.failure], timeout=REFRESH)
            if self.failure.done():
                self.failure.result()

    def _admit(self, steps: int) -> None:
        counts = self.store.counts()
        live = len(self.episodes) + counts["ready"] + counts["leased"] + counts["trained"]
        batch = self.config.batch.trajectories
        if self.config.mode == "rollout":
            self.room = max(0, self.config.total_steps * batch - live)
            if counts["ready"] >= self.config.total_steps * batch:
                self.store.set_state("finished", True)
        else:
            self.room = admissible(live, steps, self._max_lag(), batch)
        self._start_episodes()
        if time.monotonic() - self.in_flight_written >= IN_FLIGHT_EVERY:
            self.in_flight_written = time.monotonic()
            self.store.set_state("in_flight", len(self.episodes))

    def _max_lag(self) -> int:
        """What the recipe wants, or less while the learner's alarms ask for fresher samples."""
        wanted = self.config.rollout.max_lag
        return min(wanted, self.store.get_state(MAX_LAG, wanted))

    def _start_episodes(self) -> None:
        while self.room > 0 and len(self.episodes) < self.config.rollout.concurrency:
            episode = asyncio.create_task(self._episode(self._take_seq()))
            episode.add_done_callback(self._ended)
            self.episodes.add(episode)
            self.room -= 1

    def _take_seq(self) -> int:
        if self.again:
            return self.again.pop(0)
        self.next_seq += 1
        return self.next_seq - 1

    async def _episode(self, seq: int) -> None:
        prompt = self.task.prompt(seq // self.settings.rollouts_per_prompt)
        with self.pool.seat() as client:
            trajectory = await run_episode(client, self.task, prompt, self.settings, seq)
        self._append(trajectory, seq)
        self._count_errors(trajectory)

    def _append(self, trajectory: Trajectory, seq: int) -> None:
        """In one write with the others that end in this turn of the event loop: before its episode counts as ended."""
        self.finished.append((trajectory, seq))
        if len(self.finished) == 1:
            asyncio.get_running_loop().call_soon(self._write_finished)

    def _write_finished(self) -> None:
        finished, self.finished = self.finished, []
        try:
            self.store.append_all(finished)
        except Exception as error:  # nobody awaits this
            if not self.failure.done():
                self.failure.set_exception(error)

    def _count_errors(self, trajectory: Trajectory) -> None:
        if trajectory.status is not Status.ERROR:
            self.errors_in_a_row = 0
            return
        if self.errors_in_a_row == 0:
            self.first_error = trajectory.info["traceback"].strip().splitlines()[-1]
        self.errors_in_a_row += 1
        if self.errors_in_a_row >= MOST_ERRORS_IN_A_ROW:
            raise RunError(f"the environment of task {self.task.name} failed in {self.errors_in_a_row} episodes in a "
                           f"row; the first with: {self.first_error}")

    def _ended(self, episode: asyncio.Task) -> None:
        self.episodes.discard(episode)
        if episode.cancelled():
            return
        if error := episode.exception():
            self.room = 0
            if not self.failure.done():
                self.failure.set_exception(error)
        self._start_episodes()

    async def _cancel_episodes(self) -> None:
        self.room = 0
        running = list(self.episodes)
        for episode in running:
            episode.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=CANCEL_PATIENCE)
            if stuck:
                raise RunError(f"{len(stuck)} episodes of task {self.task.name} did not end within "
                               f"{CANCEL_PATIENCE:.0f} s of being cancelled: its environment must let "
                               "asyncio.CancelledError through")
        self.store.set_state("in_flight", 0)
