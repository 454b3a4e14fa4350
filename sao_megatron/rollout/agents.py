"""One try of an episode whose agent owns its loop: the agent plays against the gateway, which records."""
from __future__ import annotations

import asyncio
import math
import traceback
from typing import TYPE_CHECKING, Any

from sao_megatron.errors import EngineGone, RunError
from sao_megatron.rollout.gateway.session import Session
from sao_megatron.rollout.pool import Generator
from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Status, TrajectoryBuilder

if TYPE_CHECKING:
    from sao_megatron.rollout.episode import EpisodeSettings

CANCEL_PATIENCE = 10.0  # seconds that a cancelled agent gets to unwind


class AgentAttempt:
    def __init__(self, client: Generator, task: AgentTask, prompt: Prompt, settings: EpisodeSettings, seq: int):
        self.task, self.prompt, self.settings = task, prompt, settings
        self.group_id = f"group-{seq // settings.group}"
        limits = prompt.limits or settings.limits
        self.seconds = min(task.max_seconds, limits.seconds or task.max_seconds)
        self.session = Session(client, task.template, settings, min(settings.max_tokens, limits.tokens or math.inf),
                               min(task.max_turns, limits.turns or math.inf), self._begin)
        self.builder = self._begin([])
        self.deadly = False
        """Whether engine after engine died under it, so that it must not be tried again."""

    @property
    def turns(self) -> int:
        return self.session.turns

    def _begin(self, prompt_tokens: list[int]) -> TrajectoryBuilder:
        return TrajectoryBuilder(prompt_tokens, self.prompt.id, self.task.name, self.group_id,
                                 self.settings.routing_replay)

    async def outcome(self) -> tuple[Status, dict[str, Any]]:
        """Play; returns the status and the trajectory's info.

        completed: the agent returned. truncated: its time was over, or it failed after a budget had refused its last
        request or cut its last turn; its reward is then 0. error: it failed otherwise, returned nonsense or never
        sampled a turn, or engine after engine died under it. Raises the engine's RunError where it fails otherwise.
        """
        session = self.session
        async with self.task.gateway.serving(session) as base_url:
            agent = asyncio.create_task(self._play(base_url))
            try:
                await asyncio.wait([agent, session.failure], timeout=self.seconds,
                                   return_when=asyncio.FIRST_COMPLETED)
                finished = agent.done()
                if session.failure.done():
                    session.failure.result()
            except EngineGone as error:
                self.deadly = True
                return Status.ERROR, error_info(error)
            finally:
                await self._end(agent)
        if session.turns:
            self.builder = session.joined()
        return self._judged(agent.result() if finished else None)

    async def _play(self, base_url: str) -> Step | Exception:
        try:
            step = _checked(await self.task.agent(self.prompt, base_url, self.session.key))
            if self.session.turns == 0:
                raise RuntimeError("the agent ended without having sampled a turn")
            return step
        except Exception as error:
            return error

    async def _end(self, agent: asyncio.Task) -> None:
        agent.cancel()
        _, stuck = await asyncio.wait([agent], timeout=CANCEL_PATIENCE)
        if stuck:
            raise RunError(f"an agent of task {self.task.name} did not end within {CANCEL_PATIENCE:.0f} s of being "
                           "cancelled: it must let asyncio.CancelledError through")

    def _judged(self, result: Step | Exception | None) -> tuple[Status, dict[str, Any]]:
        """`result`: None where the agent's time was over."""
        if isinstance(result, Step):
            self.builder.add_reward(result.reward)
            return Status.COMPLETED, dict(result.info)
        cut = self.session.spent if result else f"the agent was still at work after {self.seconds:g} s"
        if cut and self.session.turns:
            return Status.TRUNCATED, {"cut": cut} | ({} if result else {"out_of_time": True})
        return Status.ERROR, error_info(result or TimeoutError(f"{cut}, without having sampled a turn"))


def _checked(result: Any) -> Step:
    """What an agent returned, as a Step with a finite reward."""
    if isinstance(result, int | float):
        result = Step(reward=float(result), info={"solved": result >= 1})
    if not isinstance(result, Step):
        raise TypeError(f"the agent returned {result!r}: expected its reward, or a Step with reward and info")
    if not math.isfinite(result.reward):
        raise ValueError(f"the agent's reward is {result.reward}: it must be finite")
    return result


def error_info(cause: BaseException) -> dict[str, str]:
    """What a trajectory of status `error` says of its cause."""
    return {"error": " ".join(f"{type(cause).__name__}: {cause}".split()),
            "traceback": "".join(traceback.format_exception(cause))}
