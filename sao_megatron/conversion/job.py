"""A conversion that any number of processes share and that goes on where it was stopped.

Processes (RANK and WORLD_SIZE, as torchrun sets them) do not talk: process r takes the parts r, r + n, …, and they meet
only in the target's `.partial` folder, where each finished part has a mark. The first process completes the folder.
"""
from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sao_megatron.errors import RunError, UserError
from sao_megatron.files import write_whole
from sao_megatron.learner.megatron_folder import WholeModel
from sao_megatron.telemetry.progress import Progress, duration
from sao_megatron.weights import saving
from sao_megatron.weights.saving import partial_of

JOB = "conversion.json"
WAIT_SECONDS = 3600.0
"""How long the first process waits for the next part of another."""
GIB = 2**30


class Job:
    """One conversion, of which this process does a share."""

    def __init__(self, target: Path, what: dict, model: WholeModel):
        self.rank, self.world = share()
        self.is_first = self.rank == 0
        self.target, self.model, self.partial = target, model, partial_of(target)
        self.mine = [part for part in range(len(model.parts)) if part % self.world == self.rank]
        if self.is_first and target.exists():
            raise UserError(f"{target} exists: give another folder, or remove it")
        if not self.is_first and self._is_mine_done():
            self.mine = []
            return
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = self._alone()
        what |= {"parts": len(model.parts), "files": _fingerprint(Path(what["source"]))}
        path = self.partial / JOB
        if not path.exists():
            write_whole(path, json.dumps(what))
        elif (found := json.loads(path.read_text())) != what:
            changed = [f"{key} was {found.get(key)!r}, is {what[key]!r}" for key in what if found.get(key) != what[key]]
            raise UserError(f"{self.partial} holds the beginning of another conversion ({', '.join(changed)}): remove "
                            f"it, or give another target")

    def _alone(self) -> IO:
        """Be the only process of this number at this conversion: two would write the same files. Raises UserError."""
        lock = (self.partial / f"process-{self.rank:05d}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.target}: this conversion is already running: wait for it, or end it first"
                            ) from None
        return lock

    def _is_mine_done(self) -> bool:
        """The first process may have completed the folder already, but only if this one's share was done."""
        try:
            marks = set(os.listdir(self.partial))
        except FileNotFoundError:
            return self.target.exists() or not self.mine
        return all(self._mark(part).name in marks for part in self.mine)

    def run(self, write: Callable[[int], None]) -> None:
        """Do this process's parts that are not done yet; the first process then waits for the others'."""
        todo = self._missing()
        progress = _Bytes(self.model, todo, quiet=not self.is_first)
        for part in self.mine:
            if part in todo:
                write(part)
                self._mark(part).touch()  # what it marks is on the disk
                progress.show(self._missing())
        last: list[int] = []
        while self.is_first and (missing := self._missing()):
            if not set(missing).isdisjoint(self.mine):
                raise RunError(f"{self.partial} has lost part {missing[0]}, which was written: was it removed? Start "
                               f"the same command again")
            if missing != last:
                last, deadline = missing, time.monotonic() + WAIT_SECONDS
            if time.monotonic() > deadline:
                raise RunError(f"process {missing[0] % self.world} did not finish part {missing[0]} of {self.target} "
                               f"within {WAIT_SECONDS:.0f} s: start the same command again, it goes on from here")
            progress.show(missing)
            time.sleep(0.2)
        progress.close()

    def complete(self, rename: Callable[[], None] | None = None) -> None:
        """Remove the marks, with what kill −9 left of such files, and give the folder its name."""
        for pattern in ("part-*.done", "part-*.json*", "part-*.metadata", f"{JOB}*", "process-*.lock"):
            for path in self.partial.glob(pattern):
                path.unlink()
        if rename:
            rename()
        else:
            saving.rename(self.partial, self.target)

    def _missing(self) -> list[int]:
        return [part for part in range(len(self.model.parts)) if not self._mark(part).exists()]

    def _mark(self, part: int) -> Path:
        return self.partial / f"part-{part:05d}.done"


class _Bytes:
    """Progress in bytes, with the time that is left."""

    def __init__(self, model: WholeModel, todo: list[int], quiet: bool):
        self.model, self.todo, self.quiet = model, todo, quiet
        self.total = sum(map(model.bytes, range(len(model.parts))))
        self.kept = self.total - sum(map(model.bytes, todo))
        self.began = time.monotonic()
        self.progress = None if quiet else Progress(len(model.parts))
        if self.progress and self.kept:
            self.progress.note(f"going on: {self._of_total(self.kept)} was written before")

    def show(self, missing: list[int]) -> None:
        if self.progress is None:
            return
        done = self.total - sum(map(self.model.bytes, missing))
        seconds = time.monotonic() - self.began
        left = (self.total - done) * seconds / (done - self.kept) if done > self.kept else None
        self.progress.status(f"{self._of_total(done)} written" + ("" if left is None else f", left {duration(left)}"))

    def _of_total(self, count: int) -> str:
        unit, name = (GIB, "GiB") if self.total >= GIB else (GIB / 1024, "MiB")
        return f"{count / unit:.2f} of {self.total / unit:.2f} {name}"

    def close(self) -> None:
        if self.progress:
            self.progress.close()


def share() -> tuple[int, int]:
    """(this process, how many there are)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _fingerprint(folder: Path) -> str:
    """Of names, sizes and times of a folder's files: parts of two sources under one path must not meet in one model."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return f"{zlib.crc32(repr(files).encode()):08x}"
