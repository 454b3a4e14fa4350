"""A start costs most of a minute on two cores: tests that only look share one run, those that kill start their own."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from real_run import FINISHED, START_SECONDS, Run


@pytest.fixture
def start_run(tmp_path) -> Iterator[Callable[..., Run]]:
    """start_run(name, *overrides, verb=…): a run that is ended, whatever happens, with the test."""
    runs: list[Run] = []

    def start(name: str, *overrides: str, verb: str = "train") -> Run:
        runs.append(Run(tmp_path, name, list(overrides), verb))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Iterator[Run]:
    """A run that came to its end: 2 critic-only steps and 6 policy updates of 16 trajectories."""
    run = Run(tmp_path_factory.mktemp("runs"), "finished", FINISHED)
    try:
        run.until(lambda: run.process.poll() is not None or run.steps(), "the first step")
        code = run.wait(START_SECONDS)
        assert code == 0, f"exit code {code}:\n{run.out}\n{run.err}"
        yield run
    finally:
        run.end()
