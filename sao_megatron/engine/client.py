"""EngineClient: SGLang's own HTTP protocol, token in and token out.

Every answer is checked before anyone uses it: as many log-probs as tokens, a weight version for each, a known end.
An answer that does not fit is a RunError that names the engine, the endpoint and what it said.

Short requests of one moment travel together: a request costs SGLang about as much in HTTP and scheduling as a short
turn costs it in arithmetic, so requests for at most SHORT_TURN tokens that are made in one turn of the event loop
share a POST. One of them then waits for its neighbours, which is at most SHORT_TURN decoding steps. Longer requests
go alone, and so do those that ask for routed experts.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import aiohttp
import orjson

from sao_megatron.engine.reply import (
    Generation,
    check_batch,
    error_message,
    read_checksums,
    read_generation,
    read_metrics,
    read_scores,
    read_version,
)
from sao_megatron.errors import EngineGone, RunError

SHORT_TURN = 16
HEALTH_SECONDS = 5.0
JSON = {"Content-Type": "application/json"}


class EngineClient:
    """One engine; `close` it in the end, or use `async with`.

    `url` is http://host:port, `vocab_size` bounds the ids that may be sent, `timeout` (seconds) bounds every request.
    Every method raises RunError where the engine refuses, and EngineGone, a RunError too, where it cannot be reached,
    does not answer in time, or its server fails.
    """

    def __init__(self, url: str, vocab_size: int, timeout: float):
        self.url, self.vocab_size, self.timeout = url.rstrip("/"), vocab_size, timeout
        self._session: aiohttp.ClientSession | None = None
        self._short: list[tuple[dict, asyncio.Future]] = []
        self._sending: set[asyncio.Task] = set()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_exception) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is still on its way with an error."""
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The server drops a connection that was idle for 5 s; a request just then would fail: we drop it first.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(connector=connector,
                                                  timeout=aiohttp.ClientTimeout(total=self.timeout))
        return self._session

    # Tokens

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, temperature: float,
                       stop_token_ids: list[int], rid: str | None = None, priority: int = 0,
                       routing_from: int | None = None) -> Generation:
        """Sample until a stop token or `max_new_tokens`. `rid` names the request for `abort`. Of requests that wait for
        a place, the engine takes that of the highest `priority` first.

        `routing_from`: also return which experts every token from this position on, the last one left out, was routed
        to; at most len(input_ids), and only from engines that run with rollout.routing_replay.
        An id outside the vocabulary is a ValueError and is not sent. Tokens that were sampled before any version was
        published are a RunError.
        """
        self._check_ids(input_ids)
        request = {"input_ids": list(input_ids), "rid": rid, "priority": priority, "return_logprob": True,
                   "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": temperature,
                                       "stop_token_ids": stop_token_ids}}
        if routing_from is not None:  # SGLang takes one start for all requests of a POST, so this one goes alone
            request |= {"return_routed_experts": True, "routed_experts_start_len": routing_from}
        short = max_new_tokens <= SHORT_TURN and rid is None and routing_from is None
        reply = await (self._share(request) if short else self._post("/generate", request))
        return self._read("/generate", reply, read_generation, routing_from)

    async def score(self, tokens: list[int]) -> list[float]:
        """Log-probs of tokens[1:] under the live weights at temperature 1; float list of length len(tokens) − 1."""
        self._check_ids(tokens)
        if len(tokens) < 2:
            raise ValueError(f"score needs at least 2 tokens, got {len(tokens)}")
        # logprob_start_len=0 makes SGLang compute every position anew instead of taking a prefix from its cache.
        reply = await self._post("/generate", {
            "input_ids": list(tokens), "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}})
        return self._read("/generate", reply, read_scores, list(tokens))

    # Control

    async def abort(self, rid: str) -> None:
        """End request `rid` early; its `generate` returns what it has. Unknown ids are ignored."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request early."""
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, mode: Literal["retract", "in_place", "abort"]) -> None:
        """Stop sampling until `resume`; `mode` says what running requests do (config.PublicationSection)."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Sample again after `pause`."""
        await self._post("/continue_generation")

    async def flush_cache(self) -> None:
        """Forget cached prefixes. The engine refuses while requests run, or are paused in place."""
        await self._post("/flush_cache")

    # Weights: begin, update for each bucket, end

    async def init_weight_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int,
                                group_name: str, backend: Literal["nccl", "gloo"]) -> None:
        """Join the broadcast group whose rank 0 is the learner; returns when all ranks have joined.

        The engine's ranks are rank_offset + its TP rank. A name can be used once in an engine's life.
        """
        await self._post("/init_weights_update_group", {
            "master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
            "world_size": world_size, "group_name": group_name, "backend": backend})

    async def destroy_weight_group(self, group_name: str) -> None:
        """Leave the group."""
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_weight_update(self) -> None:
        """Open an update. On an engine that is not paused this waits for its running requests."""
        await self._post("/begin_weight_update", {"selector": "all"})

    async def update_weights(self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, *,
                             last: bool, weight_version: int | None = None, flush_cache: bool = False) -> None:
        """Receive one bucket: one broadcast of uint8, the bytes of the named tensors in order, wide dtypes first.

        `dtypes` are torch's names without "torch.". The last bucket, and only that, carries `weight_version`, and
        `flush_cache` with it. Success does not prove that the engine knows the names: verify with `score`.
        """
        if last == (weight_version is None) or (flush_cache and not last):
            raise ValueError("weight_version belongs to the last bucket, flush_cache too: "
                             f"last={last}, weight_version={weight_version}, flush_cache={flush_cache}")
        await self._post("/update_weights_from_distributed", {
            "names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name,
            "load_format": "flattened_bucket", "flush_cache": flush_cache,
            "weight_version": None if weight_version is None else str(weight_version)})

    async def end_weight_update(self) -> None:
        """Close the update."""
        await self._post("/end_weight_update")

    async def load_weights(self, folder: str, weight_version: int, *, flush_cache: bool) -> None:
        """Load an HF checkpoint folder that the engine's host sees under this path. Needs no begin and end."""
        await self._post("/update_weights_from_disk", {
            "model_path": folder, "load_format": "auto", "weight_version": str(weight_version),
            "flush_cache": flush_cache})

    async def scramble_weights(self) -> None:
        """Overwrite every tensor of the model with random numbers: what an update then misses is seen."""
        await self._post("/weights_checker", {"action": "reset_tensors"})

    async def checksums(self) -> dict[str, str]:
        """A hash of every tensor as the engine holds it: fused and cut as SGLang does ("<rank>:<its name>")."""
        reply = await self._post("/weights_checker", {"action": "checksum"})
        return self._read("/weights_checker", reply, read_checksums)

    # Information

    async def model_version(self) -> int | None:
        """The version of the live weights; None if none was published."""
        return self._read("/model_info", await self._call("GET", "/model_info"), read_version)

    async def healthy(self) -> bool:
        """Whether the engine answers /health with 200 within HEALTH_SECONDS; False for an engine that is away."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            async with self.session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def metrics(self) -> dict[str, float]:
        """How busy it is, by name of reply.METRICS; before its first request it says nothing."""
        return self._read("/metrics", await self._call("GET", "/metrics"), read_metrics)

    async def server_info(self) -> dict[str, Any]:
        """SGLang's version and resolved arguments."""
        return await self._call("GET", "/server_info")

    # Below here: how requests travel

    def _check_ids(self, ids: list[int]) -> None:
        """An id outside the vocabulary kills SGLang's scheduler, and every request with it."""
        if not ids:
            raise ValueError("a request needs at least one token id")
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token id {wrong[0]} at position {ids.index(wrong[0])} is outside the vocabulary of "
                             f"{self.vocab_size}: it was not sent")

    async def _share(self, request: dict) -> dict:
        """Send with the other short requests of this turn of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._short:
            loop.call_soon(self._send_short)
        answer = loop.create_future()
        self._short.append((request, answer))
        return await answer

    def _send_short(self) -> None:
        requests, self._short = self._short, []
        task = asyncio.create_task(self._send_together(requests))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_together(self, requests: list[tuple[dict, asyncio.Future]]) -> None:
        try:
            replies = await self._post("/generate", {
                "input_ids": [request["input_ids"] for request, _ in requests], "return_logprob": True,
                "priority": max(request["priority"] for request, _ in requests),
                "sampling_params": [request["sampling_params"] for request, _ in requests]})
            self._read("/generate", replies, check_batch, len(requests))
        except RunError as error:
            replies = [error] * len(requests)
        for (_, answer), reply in zip(requests, replies, strict=True):
            if answer.done():  # its caller gave up
                continue
            if isinstance(reply, RunError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    async def _post(self, path: str, body: dict | None = None) -> Any:
        return await self._call("POST", path, body or {})

    async def _call(self, method: str, path: str, body: dict | None = None) -> Any:
        """JSON of the answer, or its text where that is not JSON."""
        sent = None if body is None else orjson.dumps(body)  # a context of 32,768 ids in 0.2 ms, where json takes 1.6
        try:
            async with self.session.request(method, self.url + path, data=sent, headers=JSON) as response:
                status, answer = response.status, await response.read()
        except TimeoutError:
            raise EngineGone(f"engine {self.url} did not answer {path} within {self.timeout:g} s: is it paused, "
                           f"or waiting for a rank that is gone?") from None
        except aiohttp.ClientError as error:
            raise EngineGone(f"engine {self.url} could not be asked {path}: {type(error).__name__}: {error}; "
                           f"see the engine's log") from None
        try:
            reply = orjson.loads(answer)
        except orjson.JSONDecodeError:
            reply = answer.decode(errors="replace")
        if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
            kind = EngineGone if status >= 500 else RunError
            raise kind(f"engine {self.url} refused {path} (HTTP {status}): {error_message(reply)}")
        return reply

    def _read(self, path: str, reply: Any, reader: Callable, *arguments) -> Any:
        try:
            return reader(reply, *arguments)
        except (KeyError, TypeError, ValueError) as fault:
            what = f"{fault} is missing" if isinstance(fault, KeyError) else fault
            raise RunError(f"engine {self.url} answered {path} unexpectedly ({what}): {str(reply)[:500]}") from None
