"""Child processes of one run, which end together. On a cluster each is the srun of a step.

Each child leads a session of its own (so that a Ctrl-C in the terminal reaches only us, and so that everything it
forks can be found and ended) and writes one log file. Signals to us only set a mark that `poll` turns into an
exception: nothing is ever interrupted halfway, and the context manager ends every child on the way out. Should we be
killed with SIGKILL, the kernel ends the children. SIGUSR1 asks for an end at the next good moment (`asked_to_end`).
"""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from sao_megatron.blame import first_task, last_words
from sao_megatron.child import end_with_parent
from sao_megatron.errors import RunError

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one child; `environment` is added to ours, and the log is `<name>.log`."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    """Of a step of several tasks: the names under which each writes a log of its own."""
    orphan_signal: int = signal.SIGKILL
    """Ends it where we are killed and cannot. Not SIGTERM, at which an SGLang server first waits for its requests, for
    ever if a publication has paused them; but an srun needs it, to end its tasks."""


class Supervisor:
    """Context manager over a set of named children. Use it in the main thread (it handles signals)."""

    def __init__(self, log_dir: Path, grace: float = GRACE_SECONDS):
        """`grace`: seconds between SIGTERM and SIGKILL when children are stopped."""
        self.log_dir = log_dir
        self._grace = grace
        self._children: dict[str, subprocess.Popen] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self.asked_to_end = False
        """Whether SIGUSR1 came: soon there will be no more time."""
        self._signal: int | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Supervisor:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _HANDLED}
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_request)
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, _frame) -> None:
        self._signal = number

    def _on_request(self, _number, _frame) -> None:
        self.asked_to_end = True

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def start(self, specs: list[ProcessSpec]) -> None:
        """Start all of them without waiting. Raises RunError where a command cannot be executed."""
        for spec in specs:
            for name in (spec.name, *spec.parts):
                self._keep_log(name)
            self._parts[spec.name] = spec.parts
            with self.log_path(spec.name).open("wb") as log:
                try:
                    self._children[spec.name] = subprocess.Popen(
                        spec.command, env=os.environ | spec.environment, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True,
                        preexec_fn=partial(end_with_parent, spec.orphan_signal))
                except OSError as error:
                    raise RunError(f"{spec.name} cannot be started: {error}") from None

    def _keep_log(self, name: str) -> None:
        """Give the log of an earlier process of this name a number: learner-0.1.log, learner-0.2.log …"""
        number = 1
        while (kept := self.log_dir / f"{name}.{number}.log").exists():
            number += 1
        with suppress(FileNotFoundError):
            self.log_path(name).rename(kept)

    @property
    def names(self) -> list[str]:
        return list(self._children)

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
        self.end(self._children.keys())

    def end(self, names: Iterable[str]) -> None:
        """Like `stop`, for these children."""
        ending = [child for name, child in self._children.items() if name in names]
        sessions = {child.pid for child in ending}
        for process in _living(sessions):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        deadline = time.monotonic() + self._grace
        while (living := _living(sessions)) and time.monotonic() < deadline:
            time.sleep(0.05)
            self._reap()
        for process in living:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for child in ending:
            child.wait(timeout=GRACE_SECONDS)

    def forget(self, names: Iterable[str]) -> None:
        """Count these, which have ended, no longer among the children."""
        for name in names:
            del self._children[name]

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()

    def send_signal(self, names: Iterable[str], number: int) -> None:
        """Send a signal to these children alone (an srun passes it on to its tasks)."""
        for name in names:
            if self._children[name].poll() is None:
                self._children[name].send_signal(number)

    def culprit(self, name: str) -> tuple[str, str | None]:
        """(Of a child that ended: the name of the log that says why, what srun says of it.)"""
        parts = self._parts[name]
        if parts and (found := first_task(self.log_path(name))):
            task, how = found
            if self.log_path(parts[task]).exists():
                return parts[task], how
        return name, None

    def failure(self, names: list[str], suspects: list[str] | None = None) -> RunError:
        """The error for children that ended though they should not have.

        To blame is the one of `suspects` (of all, without) whose log ended first.
        """
        name = min(suspects or names, key=lambda name: self.log_path(name).stat().st_mtime)
        others = f" (then also {', '.join(sorted(set(names) - {name}))})" if len(names) > 1 else ""
        code = self._children[name].returncode
        how = f"with signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        name, srun = self.culprit(name)
        how = how if srun is None else f"({srun})"
        reason, tail = last_words(self.log_path(name))
        return RunError("\n".join([
            f"{name} ended unexpectedly {how}{others}: {reason}; its log is {self.log_path(name)}",
            *(f"  | {line}" for line in tail)]))


def _living(sessions: set[int]) -> list[psutil.Process]:
    """Processes of these sessions that have not ended; one whose leader is dead already is found all the same."""
    living = []
    for process in psutil.process_iter(["status"]):
        with suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if os.getsid(process.pid) in sessions and process.info["status"] != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living
