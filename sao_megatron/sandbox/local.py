"""The template process of this machine and the sessions that it forks, from their owner's side."""
from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sao_megatron.sandbox.jail import HOME
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.linux import supported
from sao_megatron.sandbox.session import CellResult, SandboxError

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
        environment = kept | {
            "PATH": "/usr/bin:/bin", "HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
        session = LocalSession(self, *await asyncio.open_connection(sock=ours))
        try:
            first = await session.answer(ANSWER_SECONDS)
        except BaseException:
            await session.close()  # its processes end when nobody is at the other end
            raise
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

    def __init__(self, template: Template, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._template, self._reader, self._writer = template, reader, writer
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
        return self._reader.at_eof() or not self._template.alive  # dying with it, before that can be read here

    async def close(self) -> None:
        self.alive = False
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
