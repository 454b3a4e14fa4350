"""The process that watches one session from outside its namespaces, and the only one that talks to its owner.

It passes cells on to the worker, gathers their output, counts what all processes of the session use together, and ends
them by ending process 1 of their namespace: nothing that runs in it can outlive that, ignore it or hide from it. What
comes from the worker is bytes of output and single bytes of result; a cell that forges these deceives only itself.
"""
from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress

from sao_megatron.sandbox import jail, linux, worker
from sao_megatron.sandbox.accounting import processes_below, usage
from sao_megatron.sandbox.limits import CODE_LIMIT, Limits
from sao_megatron.sandbox.output import Output

START_SECONDS = 20.0
"""Until a new session must be ready."""
GRACE_SECONDS = 1.0
"""Between interrupting a cell and ending its session."""
_WATCH_SECONDS, _IDLE_SECONDS = 0.05, 2.0
"""Between two looks at what a session uses, during a cell and otherwise."""


class _OwnerGone(Exception):
    """The session is not wanted any more."""


def watch(connection: socket.socket, limits: Limits, mapped_us) -> None:
    """Start one session, serve its owner at `connection` until it or the session ends, and leave nothing behind.

    `mapped_us()` returns when somebody outside has given our user namespace its ids.
    """
    warden = None
    try:
        warden = Warden(connection, limits, mapped_us)
        warden.serve()
    except _OwnerGone:
        pass
    except OSError as error:
        _send(connection, {"failed": str(error)})
    finally:
        if warden:
            warden.end()


def _send(connection: socket.socket, message: dict) -> None:
    data = json.dumps(message).encode()
    try:
        connection.sendall(struct.pack("<I", len(data)) + data)
    except OSError:
        raise _OwnerGone from None


class Warden:
    def __init__(self, connection: socket.socket, limits: Limits, mapped_us):
        self.connection, self.limits = connection, limits
        os.unshare(jail.NAMESPACES)
        mapped_us()
        linux.die_with_parent()
        cells, self.cells = os.pipe()
        self.output_end, output = os.pipe()
        self.results, results = os.pipe()
        for descriptor in (self.cells, self.output_end, self.results):
            os.set_blocking(descriptor, False)
        self.init = os.fork()
        if self.init == 0:
            _become_init(limits, cells, output, results)
        for descriptor in (cells, output, results):
            os.close(descriptor)
        self.output, self.result = Output(limits.output), b""
        self.worker, self.baseline, self.cpu_before = 0, 0, 0.0
        self.broken = False

    def serve(self) -> None:
        self._start()
        while not self.broken:
            request, reason = self._request()
            started = time.monotonic()
            status = reason or self._run(request["code"].encode(errors="replace"), request["seconds"])
            _send(self.connection, {"status": status, "output": self.output.text(), "alive": not self.broken,
                                    "seconds": round(time.monotonic() - started, 4)})
            self.output = Output(self.limits.output)

    def _start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.result and not self.broken and time.monotonic() < deadline:
            self._gather(0.1)
        if not self.result:
            self.broken = True
            _send(self.connection, {"failed": self.output.text().strip() or "it did not become ready"})
            return
        processes = processes_below(self.init)
        if len(processes) < 2:
            raise OSError("/proc does not list a process's children (CONFIG_PROC_CHILDREN)")
        self.worker = processes[1]
        self.baseline = usage(self.worker)[1]
        _send(self.connection, {"ready": True})

    def _request(self) -> tuple[dict, str | None]:
        """The next cell; and the limit that what the last one left running has exceeded meanwhile, if it has."""
        reason = None
        while not select.select([self.connection], [], [], None if reason else _IDLE_SECONDS)[0]:
            if reason := self._exceeded():
                self._break(reason)
        try:
            (length,) = struct.unpack("<I", _receive(self.connection, 4))
            return json.loads(_receive(self.connection, length)), reason
        except OSError:
            raise _OwnerGone from None

    def _run(self, code: bytes, seconds: float) -> str:
        """Run one cell; `broken` afterwards where its session has ended. Returns its status (pool.Status)."""
        if len(code) > CODE_LIMIT:
            self.output.add(f"the code has {len(code)} bytes, at most {CODE_LIMIT} are run".encode())
            return "error"
        self._gather(0)
        self.result = b""
        waiting = struct.pack("<I", len(code)) + code
        self.cpu_before = self._cpu()
        deadline, interrupted = time.monotonic() + seconds, False
        while not self.result and not self.broken:
            waiting = self._pass_on(waiting)
            self._gather(_WATCH_SECONDS)
            if reason := self._exceeded():
                return self._break(reason)
            if time.monotonic() > deadline:
                if interrupted:
                    return self._break("timeout")
                with suppress(ProcessLookupError):
                    os.kill(self.worker, signal.SIGINT)
                interrupted, deadline = True, deadline + GRACE_SECONDS
        self._gather(0)
        if self.broken:
            return "ended"
        if interrupted and len(processes_below(self.init)) > 2:
            return self._break("timeout")  # others go on that nobody has interrupted
        return "timeout" if interrupted else "ok" if self.result[:1] == worker.OK else "error"

    def _break(self, reason: str) -> str:
        self.end()
        self.broken = True  # before looking at the connection, on which the next cell may be there already
        self._gather(0)
        return reason

    def _pass_on(self, data: bytes) -> bytes:
        """As much of `data` as the pipe takes; returns the rest."""
        try:
            return data[os.write(self.cells, data):] if data else data
        except BlockingIOError:
            return data
        except BrokenPipeError:
            self.broken = True
            return b""

    def _gather(self, timeout: float) -> None:
        """Read what there is of output and result, after waiting for it up to `timeout` seconds."""
        readable, _, _ = select.select([self.output_end, self.results, self.connection], [], [], timeout)
        if self.connection in readable and not self.broken:
            raise _OwnerGone  # it may only say goodbye while a cell runs
        # The result first: what was printed before it is then in the pipe.
        if self.results in readable:
            data = os.read(self.results, 2**20)
            self.result += data[:1]
            self.broken |= not data
        for _ in range(64):  # an endless output must not keep us here
            try:
                data = os.read(self.output_end, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            self.output.add(data)

    def _cpu(self) -> float:
        return sum(usage(pid)[0] for pid in processes_below(self.init))

    def _exceeded(self) -> str | None:
        """Which limit the session exceeds. Between two cells the last one's CPU time goes on counting."""
        each = [usage(pid) for pid in processes_below(self.init)]
        if sum(cpu for cpu, _ in each) - self.cpu_before > self.limits.cpu_seconds:
            return "cpu"
        if len(each) > self.limits.processes + 2:  # RLIMIT_NPROC does not hold for the machine's root
            return "processes"
        used = sum(max(0, resident - self.baseline) for _, resident in each)
        return "memory" if used > self.limits.memory_mb * 2**20 else None

    def end(self) -> None:
        """Returns when no process of the session is left."""
        if self.init:
            os.kill(self.init, signal.SIGKILL)
            os.waitpid(self.init, 0)
            self.init = 0


def _receive(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise _OwnerGone
    return data


def _become_init(limits: Limits, cells: int, output: int, results: int) -> None:
    """Process 1 of the session: builds the jail, starts the worker, and ends when that ends. Does not return."""
    try:
        ours = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100)
                for descriptor in (os.open("/dev/null", os.O_RDWR), output, output, cells, results)]
        for target, descriptor in enumerate(ours):
            os.dup2(descriptor, target)
        os.closerange(5, 4096)
        mapped = jail.address_space()
        jail.close_in(limits)
        jail.drop_rights()
        linux.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child = os.fork()
        if child == 0:
            os.setsid()
            jail.limit_resources(limits, mapped)
            worker.main(3, 4)
        os.closerange(0, 5)
        while os.wait()[0] != child:
            pass
    except BaseException as error:
        os.write(1, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)
