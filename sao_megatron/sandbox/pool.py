"""Sessions on this machine: started ahead of their use, at most so many, and at most so many cells at a time."""
from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.local import LocalSession, Template
from sao_megatron.sandbox.session import CellResult, SandboxError

if TYPE_CHECKING:
    from sao_megatron.config import SandboxSection

_TRY_TO_LEAVE = """
import os, socket
try:
    socket.socket()
    print("it can open a socket")
except PermissionError:
    print("closed in" if os.getpid() == 2 and not os.path.exists("/proc/self") else "it sees other processes")
"""


class Pool:
    """Up to `sessions` sessions, of which `warm` wait ready, and up to `cells` cells at a time. Use `async with`."""

    def __init__(self, limits: Limits, sessions: int, cells: int, warm: int, modules: list[str]):
        self.limits, self.modules, self.warm = limits, modules, warm
        self.sessions, self.cells = sessions, cells
        self._places, self._turns = asyncio.Semaphore(sessions), asyncio.Semaphore(cells)
        self._ready: deque[LocalSession] = deque()
        self._template: Template | None = None
        self._starting = asyncio.Lock()
        self._refill: asyncio.Task | None = None
        self.open_sessions = self.waiting_cells = 0

    @classmethod
    def of(cls, section: SandboxSection) -> Pool:
        limits = Limits(**{field.name: getattr(section, field.name) for field in fields(Limits)})
        return cls(limits, section.sessions, section.cores, section.warm, section.modules)

    async def __aenter__(self) -> Pool:
        return self

    async def check(self) -> None:
        """Start, and prove that a session works and is closed in. Raises SandboxError."""
        session = await self.take()
        result = await session.run(_TRY_TO_LEAVE, 10.0)
        await session.close()
        if result.output != "closed in\n":
            raise SandboxError(f"this machine cannot isolate a sandbox: {result.text().strip()}")

    async def __aexit__(self, *_exception) -> None:
        if self._refill:
            self._refill.cancel()
        for session in self._ready:
            await session.close()
        if self._template:
            await self._template.stop()

    async def open(self) -> PooledSession:
        """A place for one trajectory; waits while all are taken."""
        await self._places.acquire()
        self.open_sessions += 1
        return PooledSession(self)

    async def take(self) -> LocalSession:
        """A fresh session, a warm one where there is one."""
        session = None
        while self._ready and (session is None or session.gone):
            session = self._ready.popleft()
        if session is None or session.gone:
            session = await self._new()
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._warm_up())
        return session

    async def _warm_up(self) -> None:
        with suppress(SandboxError):  # whoever needs one next will be told
            while len(self._ready) < self.warm:
                self._ready.append(await self._new())

    async def _new(self) -> LocalSession:
        async with self._starting:
            if self._template is None or not self._template.alive:
                self._template = await Template.start(self.limits, self.modules)
            return await self._template.fork()

    async def run(self, session: LocalSession, code: str, seconds: float) -> CellResult:
        self.waiting_cells += 1
        try:
            async with self._turns:
                return await session.run(code, seconds)
        finally:
            self.waiting_cells -= 1

    def give_back(self) -> None:
        self.open_sessions -= 1
        self._places.release()


class PooledSession:
    """A trajectory's place in a Pool. Where a cell ends its interpreter, the next cell gets a fresh one."""

    def __init__(self, pool: Pool):
        self._pool, self._session, self._closed = pool, None, False
        self._used: float | None = time.monotonic()

    async def run(self, code: str, seconds: float | None = None) -> CellResult:
        if self._session is None or not self._session.alive:
            self._session = await self._pool.take()
        most = self._pool.limits.seconds
        self._used = None
        try:
            return await self._pool.run(self._session, code, min(most, seconds or most))
        finally:
            self._used = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Since its last cell; 0 while one runs."""
        return 0.0 if self._used is None else time.monotonic() - self._used

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._session:
                await self._session.close()
            self._pool.give_back()


async def check(section: SandboxSection) -> None:
    """Whether this machine can do what the recipe wants. Raises SandboxError."""
    async with Pool.of(section) as pool:
        await pool.check()
