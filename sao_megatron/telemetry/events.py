"""The journal of a run: when its launcher started, what died and why, what was started again, how it ended.

One JSON object a line in runs/<name>/events.jsonl, written by the launcher alone, read by `sao-megatron status`.
"""
from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["start", "restart", "engine_restart", "engine_lost", "requeue", "node_excluded", "hang", "failure",
               "sandbox_restart", "sandbox_lost", "end"]


@dataclass(frozen=True)
class Event:
    time: float
    """Unix seconds."""
    kind: Kind
    what: str
    """The processes or nodes that it is about, such as `learner-0, learner-1`."""
    why: str
    """One sentence."""
    job: str | None = None
    """Slurm's job id."""
    step: int = 0
    """Learner steps in the newest checkpoint then."""


class Events:
    """Appends to the journal; what a killed writer left of a line stays a line of its own."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, kind: Kind, what: str = "", why: str = "", step: int = 0) -> None:
        event = Event(time.time(), kind, what, " ".join(why.split()), os.environ.get("SLURM_JOB_ID"), step)
        with self.path.open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            gap = b"" if file.read() in (b"", b"\n") else b"\n"
            file.write(gap + json.dumps(asdict(event)).encode() + b"\n")


def read(path: Path) -> list[Event]:
    """All events, oldest first; a line that is not whole is left out."""
    if not path.is_file():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(Event(**json.loads(line)))
        except ValueError:  # being written, or cut off by a crash
            continue
    return events


def fruitless(events: list[Event]) -> list[Event]:
    """The events since the last start that found more in the newest checkpoint than every start before it.

    As many of them are starts as were made without any progress that outlives a launcher."""
    begin, reached = 0, -1
    for index, event in enumerate(events):
        if event.kind == "start" and event.step > reached:
            begin, reached = index, event.step
    return events[begin:]
