"""Engines that refuse, hang or cut their answers off, over real HTTP: the request goes on at one that works."""
from __future__ import annotations

import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import free_port
from sao_megatron.errors import EngineGone
from sao_megatron.rollout import pool as pools
from sao_megatron.rollout.pool import EnginePool

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "benchmark"))
import stub_engine  # noqa: E402


@asynccontextmanager
async def served(fault: str | None, version: int = 1):
    """A client of a stub engine."""
    port = free_port()
    arguments = ["--port", str(port), "--version", str(version)] + (["--fault", fault] if fault else [])
    runner = web.AppRunner(stub_engine.application(stub_engine.parse(arguments)), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with EngineClient(f"http://127.0.0.1:{port}", 64, timeout=0.2) as client:
        yield client
    await runner.cleanup()


# If one fails, a timeout, an error of the server or a lost connection ends a run that other engines could go on with,
# or is repeated for ever where there is no other.
@pytest.mark.parametrize("fault", ["refuse", "hang", "cut"])
@pytest.mark.parametrize("length", [8, 40], ids=["shared POST", "own POST"])
async def test_a_request_survives_a_faulty_engine(monkeypatch, fault, length):
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(pools, "BACKOFF_SECONDS", 0.01)
    sampling = dict(max_new_tokens=length, temperature=1.0, stop_token_ids=[])
    async with AsyncExitStack() as stack:
        bad, good = [await stack.enter_async_context(served(which)) for which in (fault, None)]
        pool = EnginePool([bad, good], patience=5)
        with pool.seat() as seat:
            assert len((await seat.generate([1, 2], **sampling)).tokens) == length
        pool.close()
        alone = EnginePool([bad], patience=5)
        with alone.seat() as seat, pytest.raises(EngineGone):
            await seat.generate([1, 2], **sampling)
        alone.close()
