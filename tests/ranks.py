"""Real Megatron-Core ranks over Gloo, as forks of one process that has imported Megatron: that takes longer than most
of what is tested on them."""
from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

from sao_megatron.device import has_gpu
from sao_megatron.engine.process import free_port

os.environ.setdefault("OMP_NUM_THREADS", "1")  # which the process that is forked reads when it starts
CONTEXT = multiprocessing.get_context("forkserver")
if not has_gpu():  # CUDA cannot be used in a fork of a process that has looked for it
    CONTEXT.set_forkserver_preload(["sao_megatron.learner.trainer", "sao_megatron.learner.checkpoint"])


def be_rank(script: Path, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    """Do what `python script arguments` would, with the output in `log`."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


class World:
    """Runs a script on so many ranks. Use `with`: afterwards none of them lives."""

    def __init__(self, script: Path, ranks: int, arguments: tuple[str, ...], log: Path):
        self.script, self.log = script, log
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [CONTEXT.Process(target=be_rank, args=(
            script, arguments, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
            for rank in range(ranks)]

    def start(self) -> World:
        for process in self.processes:
            process.start()
        return self

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                process.kill()
                process.join()

    @property
    def runs(self) -> bool:
        """Whether none has ended."""
        return all(process.exitcode is None for process in self.processes)

    def wait(self, timeout: float) -> str:
        """Until all have ended; returns their output, and fails with it if one fails."""
        deadline = time.monotonic() + timeout
        while living := [process.sentinel for process in self.processes if process.exitcode is None]:
            wait(living, timeout=1)
            assert not any(process.exitcode for process in self.processes), self.output()[-6000:]
            assert time.monotonic() < deadline, f"{self.script.name} took {timeout:.0f} s:\n{self.output()[-6000:]}"
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""
