"""Sample one turn: from a context until the model stops or a budget is spent, whatever aborts on the way."""
from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sao_megatron.errors import RunError
from sao_megatron.rollout.pool import Generator
from sao_megatron.trajectory.types import TrajectoryBuilder

if TYPE_CHECKING:
    from sao_megatron.rollout.episode import EpisodeSettings

ABORT_PAUSE = 0.05  # seconds before asking again an engine that aborted a request without sampling a token


async def sample_turn(client: Generator, builder: TrajectoryBuilder, budget: int, stop_token_ids: list[int],
                      settings: EpisodeSettings) -> tuple[list[int], bool]:
    """Sample up to `budget` tokens (at least 1) into `builder`; returns them, and whether a stop token ended them.

    Raises RunError where an engine answers nonsense, or aborts for `settings.request_timeout` without a token.
    """
    action: list[int] = []
    deadline = time.monotonic() + settings.request_timeout
    while True:
        answer = await client.generate(builder.segment_tokens, max_new_tokens=budget - len(action),
                                       temperature=settings.temperature, stop_token_ids=stop_token_ids,
                                       **builder.wanted_routing())
        builder.add_action(answer.tokens, answer.logprobs, answer.versions,
                           answer.routing if settings.routing_replay else None)
        action += answer.tokens
        if answer.finish == "stop" and action:
            return action, True
        if len(action) >= budget:
            return action, False
        if answer.finish != "abort":
            raise RunError(f"an engine ended a request as {answer.finish!r} after {len(action)} of {budget} tokens")
        if answer.tokens:
            deadline = time.monotonic() + settings.request_timeout
        elif time.monotonic() > deadline:
            raise RunError("an engine kept aborting a request and sampled no new token for "
                           f"{settings.request_timeout:.0f} s (rollout.request_timeout)")
        else:
            await asyncio.sleep(ABORT_PAUSE)
