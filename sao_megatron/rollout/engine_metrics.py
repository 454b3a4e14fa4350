"""What the engines say of themselves (SGLang's /metrics), and their GPUs' counters (telemetry/engine_gpus.py), in the
store, where the learner takes them up at each step."""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.telemetry.engine_gpus import of_engine
from sao_megatron.trajectory.store import ENGINES, Store

EVERY = 2.0
"""Seconds between two looks."""
PATIENCE = 5.0
"""Seconds for an answer."""


async def watch_engines(find: Callable[[], list[EngineClient]], store: Store, gpus: Path, every: float = EVERY) -> None:
    """Look at the engines that `find` lists, again and again until cancelled; `gpus` is the folder of the counters of
    their GPUs. An engine that does not answer has no metrics."""
    while True:
        clients = find()
        said = await asyncio.gather(*map(_ask, clients))
        counted = await asyncio.to_thread(_counted, gpus, [client.url for client in clients])
        store.set_state(ENGINES, counted | {f"sglang/{name} {index}": value for index, metrics in enumerate(said)
                                            for name, value in metrics.items()})
        await asyncio.sleep(every)


def _counted(gpus: Path, urls: list[str]) -> dict[str, float]:
    return {f"gpu/{name} engine-{index}.{number}": value for index, url in enumerate(urls)
            for number, counters in enumerate(of_engine(gpus, urlsplit(url).port)) for name, value in counters.items()}


async def _ask(client: EngineClient) -> dict[str, float]:
    try:
        async with asyncio.timeout(PATIENCE):
            return await client.metrics()
    except (RunError, TimeoutError):  # gone, or started with other arguments: whoever samples from it will say so
        return {}
