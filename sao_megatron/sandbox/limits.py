"""What one session may use."""
from __future__ import annotations

from dataclasses import dataclass

CODE_LIMIT = 256 * 1024
"""Bytes of one cell's source."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    """Wall time of one cell; then it is interrupted, and the session ended if that does not help."""
    cpu_seconds: float = 20.0
    """CPU time of one cell, all its processes together, and of what goes on between two cells."""
    memory_mb: float = 512.0
    """Of all processes of a session, above what a fresh one has."""
    disk_mb: float = 64.0
    """Of its temporary folder, which is memory as well."""
    file_mb: float = 32.0
    """Of one file."""
    processes: int = 16
    """Processes and threads of a session."""
    output: int = 8192
    """Bytes of one cell's output that are kept: the first and the last half."""
