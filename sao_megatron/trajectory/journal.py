"""Which journal of SQLite's is safe where a store lies."""
from __future__ import annotations

from pathlib import Path

import psutil

LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs"}
"""File systems whose processes share memory through a file; any other (nfs4, lustre, gpfs, fuse …) may be a network's.
"""


def journal_mode(path: Path) -> str:
    """WAL on a local file system, TRUNCATE (a rollback journal, several times slower) elsewhere."""
    return "WAL" if file_system(path) in LOCAL else "TRUNCATE"


def file_system(path: Path) -> str:
    """Type of the file system that the folder of `path` is on, such as ext4 or nfs4; "" if unknown."""
    folder = path.absolute().parent.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    mounts.reverse()  # of two that are mounted on one place, the later one is seen
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
