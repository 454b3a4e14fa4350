"""The sandbox of one machine behind HTTP, for controllers elsewhere.

GET /health: how full it is, for anyone. With the token as bearer: POST /run {"session", "cell", "code", "seconds"}
answers a CellResult; `cell` counts the session's cells from 0, and a session that is unknown begins only with cell 0
(410 otherwise: its variables are lost). DELETE /session/NAME ends one. 503: there is no room.
"""
from __future__ import annotations

import asyncio
import hmac
import signal
from contextlib import suppress
from dataclasses import asdict

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sao_megatron.errors import RunError
from sao_megatron.sandbox.limits import CODE_LIMIT
from sao_megatron.sandbox.pool import Pool, PooledSession
from sao_megatron.sandbox.session import SandboxError


class Call(BaseModel):
    """The body of /run."""

    model_config = ConfigDict(strict=True)
    session: str
    cell: int = Field(ge=0)
    code: str
    seconds: float = Field(gt=0)


class Server:
    """Answers for `pool`; sessions that are idle for `idle_timeout` seconds end."""

    def __init__(self, pool: Pool, token: str, idle_timeout: float):
        self.pool, self.token, self.idle_timeout = pool, token, idle_timeout
        self.sessions: dict[str, PooledSession] = {}

    def application(self) -> web.Application:
        application = web.Application(client_max_size=4 * CODE_LIMIT, middlewares=[self._authenticated])
        application.add_routes([web.get("/health", self._health), web.post("/run", self._run),
                                web.delete("/session/{name}", self._end)])
        return application

    @web.middleware
    async def _authenticated(self, request: web.Request, handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/health" and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        pool = self.pool
        return web.json_response({"sessions": pool.open_sessions, "capacity": pool.sessions,
                                  "running": pool.waiting_cells, "cells": pool.cells})

    async def _run(self, request: web.Request) -> web.Response:
        try:
            call = Call.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        session = self.sessions.get(call.session)
        if session is None and call.cell > 0:
            raise web.HTTPGone(text=f"session {call.session} is not known here")
        if session is None:
            if self.pool.open_sessions >= self.pool.sessions:
                raise web.HTTPServiceUnavailable(text=f"all {self.pool.sessions} sessions are taken")
            session = self.sessions[call.session] = await self.pool.open()
        try:
            result = await session.run(call.code, call.seconds)
        except SandboxError as error:
            await self._forget(call.session)
            raise web.HTTPInternalServerError(text=str(error)) from None
        return web.json_response(asdict(result))

    async def _end(self, request: web.Request) -> web.Response:
        await self._forget(request.match_info["name"])
        return web.json_response({})

    async def _forget(self, name: str) -> None:
        if session := self.sessions.pop(name, None):
            await session.close()

    async def end_idle_sessions(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(min(60.0, self.idle_timeout / 2))
            for name, session in list(self.sessions.items()):
                if session.idle_seconds > self.idle_timeout:
                    await self._forget(name)


async def serve(pool: Pool, token: str, host: str, port: int, idle_timeout: float) -> None:
    """Serve until SIGTERM or SIGINT. Raises SandboxError where this machine cannot isolate, before it listens."""
    async with pool:
        await pool.check()
        server = Server(pool, token, idle_timeout)
        runner = web.AppRunner(server.application(), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise RunError(f"the sandbox server cannot listen at {host}:{port}: {error}") from None
        print(f"sandbox server at http://{host}:{port}: {pool.sessions} sessions, {pool.cells} cells at a time",
              flush=True)
        idle = asyncio.create_task(server.end_idle_sessions())
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        with suppress(asyncio.CancelledError):
            await ended.wait()
        idle.cancel()
        await runner.cleanup()
