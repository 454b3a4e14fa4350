"""What the processes of a session use, read from outside of it."""
from __future__ import annotations

import os

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def processes_below(pid: int) -> list[int]:
    """`pid`, first, and its descendants. Below process 1 of a PID namespace these are all of the namespace: whoever
    loses its parent becomes a child of that."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop(0))
        try:
            for thread in os.listdir(f"/proc/{found[-1]}/task"):
                with open(f"/proc/{found[-1]}/task/{thread}/children") as file:
                    todo += [int(child) for child in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found


def usage(pid: int) -> tuple[float, int]:
    """CPU seconds, those of children that have ended included, and resident bytes of a process; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    return sum(int(field) for field in fields[11:15]) / _TICK, int(fields[21]) * _PAGE
