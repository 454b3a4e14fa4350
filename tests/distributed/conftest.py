"""Starts real Megatron-Core ranks over Gloo."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_ranks():
    """run_ranks(script, ranks, *args): start `script` on that many ranks and wait; fails with the ranks' output."""

    def run(script: str, ranks: int, *args: str, timeout: float = 420) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
             str(HERE / script), *args], env=environment, text=True, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout
    return run
