"""tools/sweep.py: runs side by side, is taken up again where it stopped, and reports."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import sweep_report  # noqa: E402

SMALL = """
import sys, sweep
from sweep import Job
sweep.grids = lambda: {{"quick": [Job(preset, 1, 0, steps=25) for preset in ("sao", "grpo")]}}
sys.argv = ["sweep.py", "--quick", "--workers", "1", "--out", {out!r}, *{more!r}]
sweep.main()
"""


def sweep(out: Path, *more: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run([sys.executable, "-c", SMALL.format(out=str(out), more=more)], env=environment,
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(line: str) -> dict:
    return {key: value for key, value in json.loads(line).items() if key != "cpu_seconds"}


def test_a_stopped_sweep_goes_on_with_the_same_numbers(tmp_path):
    """If this fails, a sweep that is stopped loses runs, repeats them, or mixes results that do not belong together."""
    assert "0 of 2 runs have results; 2 to go on 1 workers" in (first := sweep(tmp_path))
    assert "| `sao` |" in first and (tmp_path / "quick-lag.png").stat().st_size > 10_000
    assert list((tmp_path / "tensorboard").glob("*sao*/events*"))
    results = tmp_path / "results.jsonl"
    one, other = results.read_text().strip().splitlines()
    results.write_text("\n" + one + "\n" + other[:100])  # as a kill may leave it
    reported = sweep(tmp_path, "--report")
    assert "quick: 1 of 2 runs" in reported and "to go" not in reported, "--report runs nothing"
    assert "1 of 2 runs have results; 1 to go" in sweep(tmp_path)
    again = results.read_text().splitlines()[-1]
    assert numbers(again) == numbers(other), "the second run of a process, and the first of another"
    (tmp_path / "fixed-lag-cpu.yaml").write_text("name: other")
    with pytest.raises(AssertionError, match="another fixed-lag-cpu.yaml"):
        sweep(tmp_path)


def result(rates: list[float], lag: int = 0, failed: str | None = None, **metrics) -> dict:
    return {"job": {"lag": lag}, "evaluations": [[25 * i, rate, 0.0] for i, rate in enumerate(rates)],
            "failed": failed, "updates": 25 * (len(rates) - 1)} | metrics


def test_collapse_is_the_first_evaluation_below_half_the_start():
    """If this fails, the collapse steps of docs/stability.md are not what it defines."""
    assert sweep_report.collapse_step(result([0.24, 0.30, 0.13, 0.12])) is None
    assert sweep_report.collapse_step(result([0.24, 0.30, 0.11, 0.40])) == 50
    assert sweep_report.collapse_step(result([0.24, 0.30], failed="norm is nan")) == 25
    assert sweep_report.end(result([0.2, 0.3, 0.5])) == 0.4 and sweep_report.end(result([0.2, 0.3], failed="nan")) == 0
    every_step = {name: [] for name in sweep_report.AVERAGED} | dict(ess=[9.0, 9.0, 1.0, None, 0.5])
    line = sweep_report.compact(result([0.2], lag=2) | every_step | dict(solved=[0.0] * 5, cpu_seconds=1))
    assert (line["means"], line["updates"]) == ({"ess": 0.75}, 5), "from the version on at which the lag is in force"
