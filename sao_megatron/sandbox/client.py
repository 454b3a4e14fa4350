"""Sandbox servers from the controller's side: the one with most room, and another when that dies.

A session whose server has died, or does not know it any more, begins anew elsewhere: what its cells have done is done
again there, unseen, so that the variables are back. A cell that had exceeded its time cannot be repeated so; then, and
where no server answers, SandboxError ends the episode as an `error`, which is retried.
"""
from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress

import aiohttp

from sao_megatron.sandbox.local import ANSWER_SECONDS
from sao_megatron.sandbox.session import CellResult, SandboxError

LOOK_SECONDS = 2.0
"""How old news of a server's room may be."""
CONNECT_SECONDS = 5.0
MOST_MOVES = 5
"""Servers that may fail under one call."""


class _ServerFailed(Exception):
    """The server is gone, or has lost the session."""


class _Full(Exception):
    """The server has no room for another session."""


class _ServerState:
    """What is known of one server."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.load = 0.0
        """Share of its room that is taken; infinite where it does not answer."""
        self.capacity = 1
        self.looked = float("-inf")
        self.sessions = 0
        """That we have opened and not closed."""


class RemoteSandbox:
    """Sessions on the servers at `urls`. Use `async with`.

    `seconds`: most wall time of one cell; `patience`: seconds that a call waits while no server has room.
    """

    def __init__(self, urls: list[str], token: str, seconds: float, patience: float):
        self.servers = [_ServerState(url) for url in urls]
        self.token, self.seconds, self.patience = token, seconds, patience
        self._http: aiohttp.ClientSession | None = None
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> RemoteSandbox:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                           headers={"Authorization": f"Bearer {self.token}"})
        return self

    async def __aexit__(self, *_exception) -> None:
        await self._http.close()

    async def open(self) -> RemoteSession:
        return RemoteSession(self)

    async def check(self) -> None:
        """Raises SandboxError where no server answers within `patience`, or one refuses the token."""
        session = await self.open()
        await session.run("1")
        await session.close()

    async def choose(self) -> _ServerState:
        """The server with most room that answers; raises SandboxError if none does within `patience`."""
        deadline = time.monotonic() + self.patience
        while True:
            async with self._looking:
                await asyncio.gather(*(self._look(server) for server in self.servers))
            best = min(self.servers, key=lambda server: (server.load, server.sessions))
            if best.load < 1:
                best.sessions += 1
                best.load += 1 / best.capacity  # until the next look
                return best
            if time.monotonic() > deadline:
                raise SandboxError(f"no sandbox server had room for {self.patience:.0f} s (sandbox.patience): "
                                   + ", ".join(f"{server.url} {'full' if server.load == 1 else 'does not answer'}"
                                               for server in self.servers))
            await asyncio.sleep(0.2)

    async def _look(self, server: _ServerState) -> None:
        now = time.monotonic()
        if now - server.looked < (LOOK_SECONDS if server.load < 1 else LOOK_SECONDS / 4):
            return
        server.looked = now
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            async with self._http.get(f"{server.url}/health", timeout=timeout) as response:
                room = await response.json()
            server.capacity = room["capacity"]
            running = room["running"] / (room["running"] + room["cells"])
            full = room["sessions"] / room["capacity"]
            server.load = 1.0 if full >= 1 else max(running, full)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            server.load = float("inf")

    async def call(self, server: _ServerState, session: str, cell: int, code: str, seconds: float) -> CellResult:
        """Raises _ServerFailed, _Full, or SandboxError where the server refuses us."""
        body = {"session": session, "cell": cell, "code": code, "seconds": seconds}
        timeout = aiohttp.ClientTimeout(total=seconds + ANSWER_SECONDS + self.patience, sock_connect=CONNECT_SECONDS)
        try:
            async with self._http.post(f"{server.url}/run", json=body, timeout=timeout) as response:
                if response.status == 200:
                    return CellResult(**await response.json())
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _ServerFailed(f"{type(error).__name__}: {error}") from None
        if status == 503:
            raise _Full
        if status in (400, 401, 413):
            raise SandboxError(f"sandbox server {server.url} refuses a call (HTTP {status}): {text[:200]}")
        raise _ServerFailed(f"HTTP {status}: {text[:200]}")

    async def end(self, server: _ServerState, session: str) -> None:
        server.sessions -= 1
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        with suppress(aiohttp.ClientError, TimeoutError):
            await (await self._http.delete(f"{server.url}/session/{session}", timeout=timeout)).release()


class RemoteSession:
    """One trajectory's interpreter on whichever server."""

    def __init__(self, sandbox: RemoteSandbox):
        self._sandbox = sandbox
        self._server: _ServerState | None = None
        self._name = ""
        self._cells: list[tuple[str, float]] = []
        """What made the variables that there are: code and its seconds."""
        self._sent = 0
        """Cells that the server has got under this name."""
        self._unrepeatable = False

    async def run(self, code: str, seconds: float | None = None) -> CellResult:
        """As pool.Session says."""
        seconds = min(seconds or self._sandbox.seconds, self._sandbox.seconds)
        reason = ""
        for _ in range(MOST_MOVES):
            try:
                if self._server is None:
                    await self._begin()
                result = await self._call(code, seconds)
                self._remember(code, seconds, result)
                return result
            except _Full:
                await self._leave(load=1.0)
            except _ServerFailed as failure:
                reason = f"{self._server.url}: {failure}"
                await self._leave(load=float("inf"))
        raise SandboxError(f"{MOST_MOVES} sandbox servers failed under one call; the last: {reason or 'full'}")

    async def _begin(self) -> None:
        """At a server with room, and with the variables that there were."""
        if self._unrepeatable:
            raise SandboxError("the sandbox server of a session died after code in it had exceeded its time: what that "
                               "had done cannot be repeated")
        self._server, self._name, self._sent = await self._sandbox.choose(), uuid.uuid4().hex, 0
        for code, seconds in self._cells:
            if not (await self._call(code, seconds)).alive:
                raise SandboxError("the sandbox server of a session died, and its code did not run again elsewhere")

    async def _call(self, code: str, seconds: float) -> CellResult:
        self._sent += 1
        return await self._sandbox.call(self._server, self._name, self._sent - 1, code, seconds)

    def _remember(self, code: str, seconds: float, result: CellResult) -> None:
        if not result.alive:
            self._cells, self._unrepeatable = [], False
            return
        self._cells.append((code, seconds))
        self._unrepeatable |= result.status not in ("ok", "error")

    async def _leave(self, load: float) -> None:
        server, self._server = self._server, None
        server.load, server.looked = load, time.monotonic()
        await self._sandbox.end(server, self._name)

    async def close(self) -> None:
        if self._server:
            server, self._server = self._server, None
            await self._sandbox.end(server, self._name)
