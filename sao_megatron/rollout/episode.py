"""One episode: generate → environment → generate …, token in, token out.

What the engine sampled goes back to the engine and into the trajectory as it is; nothing is decoded or tokenised on the
way. Three kinds of failure are kept apart: a failing environment is retried and then recorded as an `error` trajectory,
a spent budget makes a `truncated` one, and an engine that answers nonsense (RunError) is
nobody's episode: it ends the run. One that dies is the pool's business (pool.py), unless the episode itself kills every
engine that it reaches: then that is an `error` too.
"""
from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from sao_megatron.algorithm.presets import resolve
from sao_megatron.config import LimitsSection, RunConfig
from sao_megatron.errors import EngineGone, RunError
from sao_megatron.rollout.agents import AgentAttempt, error_info
from sao_megatron.rollout.half_done import Diary, Turn
from sao_megatron.rollout.pool import Generator
from sao_megatron.rollout.sampling import sample_turn
from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Environment, Prompt, Step, Task
from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder

LAST_ANSWER = 1.0  # seconds that an environment has at least to judge a turn that was sampled past the episode's time


@dataclass(frozen=True)
class EpisodeSettings:
    temperature: float
    max_new_tokens: int
    """Most tokens sampled in one turn; a task's own limit applies as well."""
    max_tokens: int
    """Longest trajectory, all its segments together."""
    environment_retries: int
    request_timeout: float
    """Seconds in which an engine that aborts must sample a token again."""
    group: int = 1
    """This many consecutive seqs are one group: the rollouts of a prompt that are trained, and the redundant ones."""
    limits: LimitsSection = field(default_factory=LimitsSection)
    """Of every episode whose prompt has none of its own."""
    routing_replay: bool = False
    """Record the experts that each token was routed to."""

    @classmethod
    def of(cls, config: RunConfig, **changes) -> EpisodeSettings:
        rollout = config.rollout
        preset = resolve(config.algorithm.preset, **config.algorithm.model_dump(exclude={"preset"}))
        return cls(**dict(
            temperature=config.algorithm.temperature, max_new_tokens=rollout.max_new_tokens,
            max_tokens=rollout.max_tokens, environment_retries=rollout.environment_retries,
            request_timeout=rollout.request_timeout, limits=config.task.limits,
            group=preset.rollouts_per_prompt + rollout.redundancy,
            routing_replay=rollout.routing_replay) | changes)


async def run_episode(client: Generator, task: Task, prompt: Prompt, settings: EpisodeSettings, seq: int,
                      diary: Diary | None = None) -> Trajectory:
    """Play `prompt` to its end, with fresh tries while its environment fails. The first try begins with the turns that
    `diary` kept of an earlier controller, and all of them write their turns into it.

    The status is completed where the environment said done, truncated where max_turns, max_new_tokens, max_tokens or
    the episode's limits came first, error where every try failed, or where engine after engine died under it. `info`
    holds the environment's last info, `seconds` (all tries), `turns` and `retries`; `out_of_time` where limits.seconds
    were over; for an error also `error` (one line) and `traceback`. Raises RunError where the engine fails otherwise or
    answers nonsense.
    """
    started, task = time.monotonic(), prompt.task or task
    for retry in range(settings.environment_retries + 1):
        if isinstance(task, AgentTask):
            attempt = AgentAttempt(client, task, prompt, settings, seq)
        else:
            attempt = _Attempt(client, task, prompt, settings, seq, diary, replay=retry == 0)
        status, info = await attempt.outcome()
        info |= {"seconds": round(time.monotonic() - started, 4), "turns": attempt.turns, "retries": retry}
        if status is not Status.ERROR or attempt.deadly:
            break
    try:
        return attempt.builder.build(status, **info)
    except ValueError as error:
        raise RunError(f"the engine's answers do not make a valid trajectory (seq {seq}): {error}") from None


class _OutOfTime(Exception):
    """The environment was still answering when the episode's time was over."""


class _EnvironmentFailure(Exception):
    """An exception left the environment, or what it returned is not valid; the cause says which."""


@contextmanager
def _blame_environment():
    try:
        yield
    except _OutOfTime:
        raise
    except Exception as error:
        raise _EnvironmentFailure from error


@asynccontextmanager
async def _closed(environment: Environment):
    """Closes it at the end, where it can be closed."""
    try:
        yield
    finally:
        if close := getattr(environment, "close", None):
            with _blame_environment():
                await close()


class _Attempt:
    """One try of one episode, with a fresh environment."""

    def __init__(self, client: Generator, task: Task, prompt: Prompt, settings: EpisodeSettings, seq: int,
                 diary: Diary | None, replay: bool):
        self.client, self.task, self.prompt, self.settings = client, task, prompt, settings
        limits = prompt.limits or settings.limits
        self.max_tokens = min(settings.max_tokens, limits.tokens or settings.max_tokens)
        self.max_turns = min(self.task.max_turns, limits.turns or self.task.max_turns)
        self.deadline = time.monotonic() + (limits.seconds or math.inf)
        self.group_id = f"group-{seq // settings.group}"
        self.builder = self._begin([])
        self.turns = 0
        self.deadly = False
        """Whether engine after engine died under it, so that it must not be tried again."""
        self.diary, self.kept = diary, diary.kept if diary and replay else []

    def _begin(self, prompt_tokens: list[int]) -> TrajectoryBuilder:
        return TrajectoryBuilder(prompt_tokens, self.prompt.id, self.task.name, self.group_id,
                                 self.settings.routing_replay)

    async def outcome(self) -> tuple[Status, dict]:
        """Play; returns the status and the trajectory's info."""
        try:
            with _blame_environment():
                environment = self.task.environment(self.prompt)
            async with _closed(environment):
                return await self._play(environment)
        except _OutOfTime:
            return Status.TRUNCATED, {"out_of_time": True}
        except _EnvironmentFailure as failure:
            return Status.ERROR, error_info(failure.__cause__)
        except EngineGone as error:
            self.deadly = True
            return Status.ERROR, error_info(error)

    async def _play(self, environment: Environment) -> tuple[Status, dict]:
        """Fill the builder; returns (status, the environment's last info)."""
        max_tokens = self.max_tokens
        with _blame_environment():
            self.builder = self._begin(_checked_prompt(await environment.reset(), self.task.vocab_size, max_tokens))
        builder = self.builder
        while True:
            action, cut = self._kept_turn() or await self._sample_turn()
            with _blame_environment():
                step = _checked_step(await self._in_time(environment.step(action)), self.task.vocab_size)
                self._keep(action, cut, step)
            builder.add_reward(step.reward)
            self.turns += 1
            fits = len(builder.tokens) + len(step.context or step.observation) <= max_tokens
            if fits:
                self._observe(step)
            if step.done:
                return Status.COMPLETED, dict(step.info)
            if cut or not fits or len(builder.tokens) == max_tokens or self.turns == self.max_turns:
                return Status.TRUNCATED, dict(step.info)
            if time.monotonic() > self.deadline:
                return Status.TRUNCATED, dict(step.info) | {"out_of_time": True}

    async def _in_time(self, answer: Awaitable[Step]) -> Step:
        """The environment's answer; raises _OutOfTime where it does not come before the deadline."""
        remaining = None if self.deadline == math.inf else max(LAST_ANSWER, self.deadline - time.monotonic())
        try:
            async with asyncio.timeout(remaining) as limit:
                return await answer
        except TimeoutError:
            if limit.expired():
                raise _OutOfTime from None
            raise

    def _kept_turn(self) -> tuple[list[int], bool] | None:
        """The turn as a dead controller sampled it, put into the builder."""
        if self.turns >= len(self.kept):
            return None
        turn = self.kept[self.turns]
        self.builder.add_action(turn.tokens, turn.logprobs, turn.versions)
        return list(turn.tokens), turn.cut

    def _keep(self, action: list[int], cut: bool, step: Step) -> None:
        """Note the turn; hold a rebuilt environment to what it answered before."""
        if self.turns < len(self.kept):
            if (step.context or step.observation) != self.kept[self.turns].observation:
                raise ValueError(f"replayed turn {self.turns} was answered otherwise than before: the task says that "
                                 "it is replayable, so its environment must be deterministic")
        elif self.diary:
            self.diary.add(self.turns, Turn(*self.builder.last_action(len(action)), cut,
                                            list(step.context or step.observation)))

    def _observe(self, step: Step) -> None:
        self.builder.add_observation([] if step.context else step.observation)
        if step.context and not step.done:
            self.builder.add_segment(self._begin(step.context))

    async def _sample_turn(self) -> tuple[list[int], bool]:
        """Sample one turn into the builder; returns (its tokens, whether a budget of the run cut it off).

        Reaching the task's own max_new_tokens is no cut: it is the task's format; the environment judges the action.
        """
        settings, task = self.settings, self.task
        run_budget = min(settings.max_new_tokens, self.max_tokens - len(self.builder.tokens))
        budget = run_budget if task.max_new_tokens is None else min(run_budget, task.max_new_tokens)
        action, stopped = await sample_turn(self.client, self.builder, budget, task.stop_token_ids, settings)
        return action, not stopped and budget != task.max_new_tokens


def _checked_prompt(tokens: list[int], vocab_size: int, max_tokens: int) -> list[int]:
    _check_ids(tokens, vocab_size, "prompt")
    if not tokens:
        raise ValueError("the environment's prompt is empty: reset() must return at least one token id")
    if len(tokens) >= max_tokens:
        raise ValueError(f"the prompt has {len(tokens)} tokens, which leaves none of rollout.max_tokens = {max_tokens} "
                         "to sample")
    return list(tokens)


def _checked_step(step: Step, vocab_size: int) -> Step:
    _check_ids(step.observation, vocab_size, "observation")
    _check_ids(step.context or [], vocab_size, "context")
    if not math.isfinite(step.reward):
        raise ValueError(f"the environment's reward is {step.reward}: it must be finite")
    return step


def _check_ids(tokens: list[int], vocab_size: int, what: str) -> None:
    """An id outside the vocabulary would kill the engine."""
    if wrong := [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocab_size)]:
        raise ValueError(f"the environment's {what} has {wrong[0]!r} at position {list(tokens).index(wrong[0])}: "
                         f"expected an int id in [0, {vocab_size})")
