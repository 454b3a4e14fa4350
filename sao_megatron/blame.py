"""Who is to blame when a process ended, and why it says it did: read from its log."""
from __future__ import annotations

import re
from pathlib import Path

_RANK = re.compile(r"^\[rank\d+\]: ")
"""What torch.distributed puts before each line of a traceback."""
_SRUN = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<task>\d+)[\d,-]*: (?P<how>.+)")
"""What srun says of the tasks that ended; the first was the first to end."""


def first_task(log: Path) -> tuple[int, str] | None:
    """Of a step of several tasks, by srun's own log: the first that failed, and how ("node2: Killed")."""
    found = _SRUN.search(_tail(log))
    return (int(found["task"]), f"{found['node']}: {found['how']}") if found else None


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
