"""Child processes of one run on one machine, which end together.

Each child leads a session of its own (so that a Ctrl-C in the terminal reaches only us, and so that everything it
forks can be found and ended) and writes one log file. Signals to us only set a mark that `poll` turns into an
exception: nothing is ever interrupted halfway, and the context manager ends every child on the way out. Should we be
killed with SIGKILL, the kernel ends the children.
"""
from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sao_megatron.errors import RunError

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_RANK = re.compile(r"^\[rank\d+\]: ")
"""What torch.distributed puts before each line of a traceback."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one child; `environment` is added to ours, and the log is `<name>.log`."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


class Supervisor:
    """Context manager over a set of named children. Use it in the main thread (it handles signals)."""

    def __init__(self, log_dir: Path, grace: float = GRACE_SECONDS):
        """`grace`: seconds between SIGTERM and SIGKILL when children are stopped."""
        self.log_dir = log_dir
        self._grace = grace
        self._children: dict[str, subprocess.Popen] = {}
        self._signal: int | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Supervisor:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _HANDLED}
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, _frame) -> None:
        self._signal = number

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def start(self, specs: list[ProcessSpec]) -> None:
        """Start all of them without waiting. Raises RunError where a command cannot be executed."""
        for spec in specs:
            with self.log_path(spec.name).open("ab") as log:
                try:
                    self._children[spec.name] = subprocess.Popen(
                        spec.command, env=os.environ | spec.environment, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent)
                except OSError as error:
                    raise RunError(f"{spec.name} cannot be started: {error}") from None

    def poll(self) -> dict[str, int]:
        """Exit codes of the children that have ended (−n: by signal n).

        Raises KeyboardInterrupt or SystemExit(128 + n) if a signal asked this process to end.
        """
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        return {name: child.returncode for name, child in self._children.items() if child.poll() is not None}

    def stop(self) -> None:
        """End every child and all that it started: SIGTERM, then SIGKILL after the grace. Returns when all are gone."""
        sessions = {child.pid for child in self._children.values()}
        for process in _living(sessions):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        deadline = time.monotonic() + self._grace
        while _living(sessions) and time.monotonic() < deadline:
            time.sleep(0.05)
            self._reap()
        self._kill(sessions)
        for child in self._children.values():
            child.wait(timeout=GRACE_SECONDS)

    def restart(self, spec: ProcessSpec) -> None:
        """Start a child that has ended again, once nothing is left of what it had started; its log goes on."""
        self._kill({self._children[spec.name].pid})
        self.start([spec])

    def _kill(self, sessions: set[int]) -> None:
        for process in _living(sessions):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()

    def failure(self, names: list[str], suspects: list[str] | None = None) -> RunError:
        """The error for children that ended though they should not have.

        To blame is the one of `suspects` (of all, without) whose log ended first.
        """
        name = min(suspects or names, key=lambda name: self.log_path(name).stat().st_mtime)
        others = f" (then also {', '.join(sorted(set(names) - {name}))})" if len(names) > 1 else ""
        code = self._children[name].returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason, tail = last_words(self.log_path(name))
        return RunError("\n".join([
            f"{name} ended unexpectedly with {how}{others}: {reason}; its log is {self.log_path(name)}",
            *(f"  | {line}" for line in tail)]))


def _end_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _living(sessions: set[int]) -> list[psutil.Process]:
    """Processes of these sessions that have not ended; one whose leader is dead already is found all the same."""
    living = []
    for process in psutil.process_iter(["status"]):
        with suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if os.getsid(process.pid) in sessions and process.info["status"] != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def last_words(log: Path, lines: int = 5) -> tuple[str, list[str]]:
    """Why a process ended, as far as its log tells: (the reason in one line, the last `lines` lines).

    The reason is our own one-sentence error, else what SGLang says of a process of its own that a signal killed (which
    left no traceback: one in the log is older), else the last line of the last traceback, else the last line.
    """
    text = [_RANK.sub("", line).rstrip() for line in _tail(log).splitlines()]
    text = [line for line in text if line]
    if not text:
        return "its log is empty", []
    return _own_error(text) or _killed_part(text) or _traceback_end(text) or text[-1].strip(), text[-lines:]


def _own_error(text: list[str]) -> str | None:
    own = [line for line in text if line.startswith("sao-megatron: ")]
    return own[-1].removeprefix("sao-megatron: ") if own else None


def _traceback_end(text: list[str]) -> str | None:
    starts = [i for i, line in enumerate(text) if "Traceback (most recent call last)" in line]
    if not starts:
        return None
    return next((line for line in text[starts[-1] + 1:] if not line[0].isspace()), None)


def _killed_part(text: list[str]) -> str | None:
    killed = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -\d")
    return next((line for line in text if killed.search(line)), None)


def _tail(path: Path, size: int = 65536) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
