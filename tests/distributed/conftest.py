"""Starts real Megatron-Core ranks over Gloo."""
from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import World

SECONDS = 500.0


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory) -> Callable[..., World]:
    """start_ranks(script, ranks, *arguments): a World that is not started yet."""
    folder, numbers = tmp_path_factory.mktemp("ranks"), itertools.count()
    here = Path(__file__).parent
    return lambda script, ranks, *arguments: World(here / script, ranks, arguments, folder / f"{next(numbers)}.log")


@pytest.fixture(scope="session")
def run_ranks(start_ranks) -> Callable[..., str]:
    """run_ranks(script, ranks, *arguments): run `script` on that many ranks; returns their output."""
    def run(script: str, ranks: int, *arguments: str) -> str:
        with start_ranks(script, ranks, *arguments) as world:
            return world.wait(SECONDS)
    return run


@pytest.fixture(scope="session")
def run_worlds(start_ranks) -> Callable[..., dict]:
    """run_worlds(script, folder, jobs, *arguments): run `script FOLDER JOBS[ranks] arguments` on each number of ranks,
    all at the same time; returns together what each world wrote into results-RANKS.json."""
    def run(script: str, folder: Path, jobs: dict[int, object], *arguments: str) -> dict:
        with ExitStack() as running:
            worlds = [running.enter_context(start_ranks(script, ranks, str(folder), json.dumps(own), *arguments))
                      for ranks, own in jobs.items()]
            for world in worlds:
                world.wait(SECONDS)
        return {name: result for ranks in jobs
                for name, result in json.loads((folder / f"results-{ranks}.json").read_text()).items()}
    return run
