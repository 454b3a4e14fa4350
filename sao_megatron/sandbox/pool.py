"""Sessions on this machine: started ahead of their use, at most so many, and at most so many cells at a time."""
from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from sao_megatron.errors import RunError
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.linux import supported

if TYPE_CHECKING:
    from sao_megatron.config import SandboxSection

Status = Literal["ok", "error", "timeout", "cpu", "memory", "processes", "ended"]
"""ok; the cell raised; a limit was exceeded; the session's process ended in the cell."""
_WHY = {"timeout": "it took too long", "cpu": "it used too much CPU time", "memory": "it used too much memory",
        "processes": "it had too many processes", "ended": "the interpreter ended"}
IMPORT_SECONDS = 120.0
"""Until the template has imported its modules."""
ANSWER_SECONDS = 30.0
"""Beyond a cell's own time, until its result must be there."""
_START = """\
import sys
sys.path.insert(0, {root!r})
from sao_megatron.sandbox.template import main
del sys.path[0]
main()"""
"""Isolated (-I), so by a path of our own: the current folder and the user's packages must not be what is imported."""


_TRY_TO_LEAVE = """
import os, socket
try:
    socket.socket()
    print("it can open a socket")
except PermissionError:
    print("closed in" if os.getpid() == 2 and not os.path.exists("/proc/self") else "it sees other processes")
"""


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the cell."""


@dataclass(frozen=True)
class CellResult:
    """What one cell did."""

    status: Status
    output: str
    """What it printed, its last expression's value, its traceback; shortened with a notice."""
    seconds: float
    alive: bool
    """Whether its variables are still there."""

    def text(self) -> str:
        """The output, and where it did not end by itself, why: for a model to read."""
        why = _WHY.get(self.status)
        if why is None:
            return self.output
        kept = "variables are kept" if self.alive else "all variables are lost"
        return f"{self.output}\n[The code was stopped: {why}; {kept}.]".lstrip()


class Session(Protocol):
    """One trajectory's interpreter."""

    async def run(self, code: str, seconds: float | None = None) -> CellResult:
        """Run one cell. `seconds` may shorten its time. Raises SandboxError where the sandbox fails."""

    async def close(self) -> None:
        """End it with all that it has started."""


class Sandbox(Protocol):
    """Where sessions come from: a Pool here, or servers (client.RemoteSandbox)."""

    async def open(self) -> Session: ...


class Template:
    """The process that sessions are forked from."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket):
        self.process, self.control = process, control

    @classmethod
    async def start(cls, limits: Limits, modules: list[str]) -> Template:
        """Raises SandboxError where it does not start, with what it wrote."""
        if reason := supported():
            raise SandboxError(f"this machine cannot isolate a sandbox: {reason}")
        ours, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | kept
        root = str(Path(__file__).parents[2])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", _START.format(root=root), json.dumps(asdict(limits)), json.dumps(modules),
            stdin=theirs, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environment, cwd="/",
            start_new_session=True)
        theirs.close()
        ours.setblocking(False)
        try:
            ready = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1), IMPORT_SECONDS)
        except TimeoutError:
            ready = b""
        if not ready:
            process.kill()
            said = (await process.stderr.read()).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {said.splitlines()[-1] if said else 'no reason given'}")
        return cls(process, ours)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def fork(self) -> LocalSession:
        """A new session. Raises SandboxError where it cannot be isolated, or the template has died."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self.control, [b"s"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's template process has died ({error})") from None
        session = LocalSession(*await asyncio.open_connection(sock=ours))
        first = await session.answer(ANSWER_SECONDS)
        if "failed" in first:
            await session.close()
            raise SandboxError(f"this machine cannot isolate a sandbox: {first['failed']}")
        return session

    async def stop(self) -> None:
        """End it and all sessions."""
        self.control.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class LocalSession:
    """A session of this machine; not reusable once a cell has ended it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.alive = True

    async def run(self, code: str, seconds: float) -> CellResult:
        data = json.dumps({"code": code, "seconds": seconds}).encode()
        try:
            self._writer.write(struct.pack("<I", len(data)) + data)
            await self._writer.drain()
        except ConnectionError:
            pass  # the answer, which is none, says so
        try:
            answer = await self.answer(seconds + ANSWER_SECONDS)
            if "failed" in answer:
                raise SandboxError(f"a sandbox session failed: {answer['failed']}")
            result = CellResult(**answer)
        except BaseException:
            await self.close()  # whatever was under way must not answer the next cell
            raise
        self.alive = result.alive
        return result

    async def answer(self, timeout: float) -> dict:
        try:
            async with asyncio.timeout(timeout):
                (length,) = struct.unpack("<I", await self._reader.readexactly(4))
                return json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxError("a sandbox session was killed from outside") from None
        except TimeoutError:
            raise SandboxError(f"a sandbox session did not answer for {timeout:.0f} s") from None

    @property
    def gone(self) -> bool:
        """Whether it has ended without having been asked to."""
        return self._reader.at_eof()

    async def close(self) -> None:
        self.alive = False
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


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
