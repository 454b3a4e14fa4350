"""A process that must not outlive the one that started it."""
from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Called in a new process: the kernel ends it with this signal when the thread that started it ends, however."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
