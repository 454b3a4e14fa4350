"""The stub that benchmarks ask in the real server's place, held to the real server."""
from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web
from served import VOCAB

from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import free_port

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "benchmark"))
import stub_engine  # noqa: E402


def shape(reply):
    """Types in the place of values."""
    if isinstance(reply, dict):
        return {key: shape(value) for key, value in reply.items()}
    if isinstance(reply, list):
        return [shape(reply[0])] if reply else []
    return type(reply)


def assert_within(stub, real, where: str = "reply") -> None:
    """Whatever the stub says, the real server says too, in the same form."""
    if isinstance(stub, dict):
        for key, value in stub.items():
            assert key in real, f"{where}: the real server has no {key}"
            assert_within(value, real[key], f"{where}.{key}")
    elif isinstance(stub, list):
        assert len(stub) == len(real), where
        for ours, theirs in zip(stub, real, strict=True):
            assert_within(ours, theirs, f"{where}[]")
    else:
        assert stub == real, where


# If this fails, the controller's benchmark measures a protocol that no engine speaks.
async def test_the_stub_answers_as_the_real_server(engine):
    port = free_port()
    runner = web.AppRunner(stub_engine.application(stub_engine.parse(["--port", str(port), "--tokens", "4"])))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    asked = [dict(max_new_tokens=4, stop_token_ids=[]), dict(max_new_tokens=40, stop_token_ids=list(range(VOCAB)))]
    async with engine.client() as real, EngineClient(f"http://127.0.0.1:{port}", VOCAB, 30) as stub:
        for parameters in asked:
            body = {"input_ids": [3, 4, 5], "return_logprob": True,
                    "sampling_params": parameters | {"temperature": 1.0}}
            batch = body | {"input_ids": [[3], [4]], "sampling_params": [body["sampling_params"]] * 2}
            for request in (body, batch):
                ours, theirs = await asyncio.gather(*(c._post("/generate", request) for c in (stub, real)))
                assert_within(shape(ours), shape(theirs))
        assert_within(*[shape(await c._call("GET", "/model_info")) for c in (stub, real)])
        assert await stub.healthy() and await real.healthy()
        for client in (stub, real):
            got = await client.generate([3], max_new_tokens=40, temperature=1.0, stop_token_ids=list(range(VOCAB)))
            assert got.finish == "stop" and len(got.tokens) == len(got.versions) == len(got.logprobs)
    await runner.cleanup()
