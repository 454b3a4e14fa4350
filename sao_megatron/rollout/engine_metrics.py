"""What the engines say of themselves (SGLang's /metrics), in the store, where the learner takes it up at each step."""
from __future__ import annotations

import asyncio
from collections.abc import Callable

from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.trajectory.store import ENGINES, Store

EVERY = 2.0
"""Seconds between two looks."""
PATIENCE = 5.0
"""Seconds for an answer."""


async def watch_engines(find: Callable[[], list[EngineClient]], store: Store, every: float = EVERY) -> None:
    """Look at the engines that `find` lists, again and again until cancelled; null stands for one that does not answer.
    """
    while True:
        store.set_state(ENGINES, await asyncio.gather(*map(_ask, find())))
        await asyncio.sleep(every)


async def _ask(client: EngineClient) -> dict[str, float] | None:
    try:
        async with asyncio.timeout(PATIENCE):
            return await client.metrics()
    except (RunError, TimeoutError):  # gone, or started with other arguments: whoever samples from it will say so
        return None
