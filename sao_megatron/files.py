"""Files that a crash leaves as they were or as they should be, never half written."""
from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Under its name only when it is whole and on the disk; by several processes at once, if they write the same."""
    unfinished = path.with_name(f"{path.name}.tmp{os.getpid()}")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)
