"""The watchdog: finds that the learner hangs, and says which rank waits where.

A hang is that no rank has begun a new phase for `hang_timeout` seconds. (While they wait for trajectories they begin
one every ten seconds.) Then each rank is asked for its Python stacks by SIGUSR2 (roles.learner registers faulthandler);
a rank whose log shows none is not even able to answer, and is the first to suspect.
"""
from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sao_megatron.errors import RunError
from sao_megatron.heartbeat import Beat, beats
from sao_megatron.supervisor import Supervisor

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STACK_SECONDS = 5.0
"""For all ranks to write their stacks."""
LOOK_SECONDS = 2.0
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class Watchdog:
    """Over the ranks of one learner; a new one for every start."""

    def __init__(self, store: TCPStore, ranks: int, timeout: float):
        """`store`: where the ranks met. `timeout`: seconds, 0 = never bark."""
        self._store, self._ranks, self._timeout = store, ranks, timeout
        self._last: list[Beat] = []
        self._since = self._looked = time.monotonic()

    def rest(self) -> None:
        """What is waited for now has a deadline of its own."""
        self._since = time.monotonic()

    def hangs(self) -> bool:
        now = time.monotonic()
        if not self._timeout or now - self._looked < min(LOOK_SECONDS, self._timeout / 4):
            return False
        self._looked = now
        if (last := beats(self._store, self._ranks)) != self._last or not last:
            self._last, self._since = last, now
        return now - self._since > self._timeout

    def report(self, supervisor: Supervisor, names: list[str]) -> RunError:
        """Have all ranks write their stacks, and say where each of them is. `names`: the learner's children."""
        logs = [supervisor.log_path(f"learner-{rank}") for rank in range(self._ranks)]
        sizes = [_size(log) for log in logs]
        supervisor.send_signal(names, signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(map(_has_stack, logs, sizes)):
            time.sleep(0.2)
        places = [where(_after(log, size)) for log, size in zip(logs, sizes, strict=True)]
        return RunError(_sentence(self._last, places, self._timeout, logs[0].parent))


def _sentence(last: list[Beat], places: list[str | None], timeout: float, log_dir: Path) -> str:
    silent = [beat for beat, place in zip(last, places, strict=True) if place is None]
    lines = [f"  | rank {beat.rank} ({beat.node}) {place or 'gives no sign of life'}, in {beat.phase}"
             for beat, place in sorted(zip(last, places, strict=True), key=lambda pair: pair[1] is not None)]
    if silent:
        cause = "the others wait for " + ", ".join(f"rank {beat.rank} on {beat.node}" for beat in silent[:8])
    else:
        behind = min(last, key=lambda beat: beat.count)
        cause = f"the furthest behind is rank {behind.rank} on {behind.node}"
    return "\n".join([f"the learner hangs: no rank has got further for {timeout:.0f} s (hang_timeout); {cause}; the "
                      f"stacks of all ranks are in {log_dir}", *lines[:32]])


def where(dump: str) -> str | None:
    """Where a rank's main thread is, by faulthandler's dump: "in all_reduce at learner/passes.py:80"; None without."""
    threads = [_frames(part) for part in re.split(r"^(?:Current t|T)hread 0x", dump, flags=re.MULTILINE)[1:]]
    mains = [frames for frames in threads if any(function == "main" and file.endswith("cli.py")
                                                 for file, _, function in frames)]
    if not mains:
        return "writes only other threads' stacks" if threads else None
    frames = mains[-1]
    collective = [function for file, _, function in frames if "torch/distributed/" in file and function != "wrapper"]
    ours = next((f"{file.partition('sao_megatron/')[2]}:{line}" for file, line, _ in frames
                 if "sao_megatron/" in file and "torch/" not in file), "an unknown place")
    return f"is in {collective[-1] if collective else frames[0][2]} at {ours}"


def _frames(part: str) -> list[tuple[str, str, str]]:
    """Innermost first."""
    found = [_FRAME.match(line) for line in part.splitlines()]
    return [(match["file"], match["line"], match["function"]) for match in found if match]


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _after(log: Path, size: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace")


def _has_stack(log: Path, size: int) -> bool:
    return where(_after(log, size)) is not None
