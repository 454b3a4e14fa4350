"""The HTTP server, in the controller's own event loop. It listens while any episode is open, and not otherwise."""
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from sao_megatron.errors import RunError
from sao_megatron.rollout.gateway.protocol import Chunks, Request, RequestError, error_body
from sao_megatron.rollout.gateway.session import Session

LARGEST_REQUEST = 64 * 2**20


class Gateway:
    """POST {url}/chat/completions; the API key says which episode it is."""

    def __init__(self, host: str, port: int):
        """Port 0: any that is free whenever it begins to listen."""
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """Answer the session's requests meanwhile; gives the base URL for OpenAI's clients."""
        self._sessions[session.key] = session
        try:
            async with self._changing:
                if self._runner is None:
                    await self._listen()
            yield self.url
        finally:
            del self._sessions[session.key]
            for request in session.requests:
                request.cancel()
            async with self._changing:
                if not self._sessions and self._runner:
                    await self._runner.cleanup()
                    self._runner = None

    async def _listen(self) -> None:
        application = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_as_openai])
        application.router.add_post("/v1/chat/completions", self._complete)
        # A client that hangs up cancels its turn.
        self._runner = runner = web.AppRunner(application, handler_cancellation=True, access_log=None,
                                               shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            self._runner = None
            await runner.cleanup()
            raise RunError(f"the gateway for agents cannot listen at {self._host}:{self._port} (the task's options "
                           f"host and port): {error}") from None
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            raise RequestError("the API key names no open episode", "invalid_api_key", status=401)
        try:
            body = await http.json()
        except json.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        request = Request.read(body)
        stream = _Stream(http, request) if request.stream else None
        task = asyncio.current_task()
        session.requests.add(task)
        try:
            reply = await session.complete(request, stream and stream.say)
        except Exception as error:
            if stream is None or not stream.response.prepared:
                raise
            return await stream.end([_failure(error)[0]])
        finally:
            session.requests.discard(task)
        if stream is None:
            return web.json_response(reply.body(request.model))
        return await stream.end(stream.chunks.end(reply, request.include_usage))


class _Stream:
    """Server-sent events. It begins with the first words, so that what is refused before is an ordinary answer."""

    def __init__(self, http: web.Request, request: Request):
        self.http, self.chunks = http, Chunks(request.model)
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def say(self, text: str) -> None:
        """Send what is new in the turn's words so far. Raises RequestError where nobody listens any more."""
        try:
            await self._send(self.chunks.words(text))
        except ConnectionError:
            raise RequestError("the client has hung up", status=499) from None

    async def end(self, last: Iterable[dict]) -> web.StreamResponse:
        with suppress(ConnectionError):
            await self._send(last)
            await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()
        return self.response

    async def _send(self, chunks: Iterable[dict]) -> None:
        for chunk in chunks:
            if not self.response.prepared:
                await self.response.prepare(self.http)
            await self.response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@web.middleware
async def _as_openai(request: web.Request, handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = error_body(f"{request.method} {request.path}: {error.reason}", "invalid_request_error")
        return web.json_response(body, status=error.status)
    except Exception as error:
        body, status = _failure(error)
        return web.json_response(body, status=status)


def _failure(error: Exception) -> tuple[dict, int]:
    """Body and HTTP status."""
    if isinstance(error, RequestError):
        return error.body(), error.status
    return error_body(str(error), "server_error"), 500  # the session has it too, and ends the episode with it
