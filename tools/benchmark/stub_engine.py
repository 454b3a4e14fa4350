"""A server that answers SGLang's protocol after a latency, without a model: for measuring what asks it.

    python tools/benchmark/stub_engine.py --port 8000 --latency 5 --sigma 0.5

tests/engine/test_stub_engine.py holds its answers to the real server's. With --fault it answers with HTTP 503
("refuse"), never ("hang") or with half an answer ("cut").
"""
from __future__ import annotations

import argparse
import asyncio
import math
import random
from typing import Any

import orjson
from aiohttp import web

STATE: web.AppKey[argparse.Namespace] = web.AppKey("options", argparse.Namespace)


def sampled(input_ids: list[int], parameters: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the real server says of one request: up to `options.tokens` tokens, the last a stop token if any is named.
    """
    length = min(parameters["max_new_tokens"], options.tokens)
    ids = [random.randrange(options.vocab) for _ in range(length)]
    finish: dict[str, Any] = {"type": "length", "length": parameters["max_new_tokens"]}
    if stops := parameters.get("stop_token_ids"):
        ids[-1] = stops[0]
        finish = {"type": "stop", "matched": ids[-1]}
    elif length < parameters["max_new_tokens"]:
        ids += [0] * (parameters["max_new_tokens"] - length)
    return {"output_ids": ids, "meta_info": {
        "id": "", "finish_reason": finish, "prompt_tokens": len(input_ids), "completion_tokens": len(ids),
        "cached_tokens": 0, "weight_version": str(options.version),
        "weight_versions": [{"version": str(options.version), "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-1.0, token, None] for token in ids], "e2e_latency": 0.0}}


async def generate(request: web.Request) -> web.StreamResponse:
    options, body = request.app[STATE], orjson.loads(await request.read())
    if options.fault == "refuse":
        return web.json_response({"error": {"message": "overloaded"}}, status=503)
    if options.fault == "hang":
        await asyncio.sleep(3600)
    await asyncio.sleep(options.latency * math.exp(random.gauss(0, options.sigma) - options.sigma**2 / 2))
    ids, parameters = body["input_ids"], body["sampling_params"]
    if isinstance(ids[0], list):
        reply: Any = [sampled(one, its, options) for one, its in zip(ids, parameters, strict=True)]
    else:
        reply = sampled(ids, parameters, options)
    if options.fault == "cut":
        request.transport.close()
    return web.Response(body=orjson.dumps(reply), content_type="application/json")


async def health(_request: web.Request) -> web.Response:
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    return web.json_response({"weight_version": str(request.app[STATE].version)})


def application(options: argparse.Namespace) -> web.Application:
    app = web.Application(client_max_size=2**28)
    app[STATE] = options
    app.add_routes([web.post("/generate", generate), web.get("/health", health), web.get("/model_info", model_info)])
    return app


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency", type=float, default=0.0, help="mean seconds of a request")
    parser.add_argument("--sigma", type=float, default=0.0, help="of its logarithm (lognormal)")
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer that a stop token may end")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--version", type=int, default=0, help="of the weights that it says it has")
    parser.add_argument("--fault", choices=["refuse", "hang", "cut"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    OPTIONS = parse()
    web.run_app(application(OPTIONS), host="127.0.0.1", port=OPTIONS.port, print=None, access_log=None)
