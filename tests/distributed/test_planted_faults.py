"""Alarms over the real trainer: faults that have cost people nights, planted one at a time."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rung(tmp_path_factory) -> dict[str, list[str]]:
    out = tmp_path_factory.mktemp("alarms") / "out.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fault_worker.py")), str(ROOT / "configs/fixed-lag-cpu.yaml"),
         str(out)], env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_a_healthy_run_of_300_steps_raises_none(rung):
    """If this fails, people learn to ignore alarms."""
    assert (rung["healthy"], rung["healthy at lag 0"]) == ([], [])


@pytest.mark.parametrize("fault, alarm", [("temperature", "temperature_differs"), ("shuffled", "logprobs_misplaced")])
def test_a_planted_fault_raises_its_alarm_first(rung, fault, alarm):
    """If this fails, a night is spent on a run that could not learn."""
    assert rung[fault][:1] == [alarm], rung[fault]


@pytest.mark.parametrize("fault", ["dropout", "stale_engine", "renamed_expert"])
def test_an_engine_with_another_model_is_noticed(rung, fault):
    """If this fails, a night is spent on samples of other weights. With some random weights the difference grows with
    the log-prob, as another temperature's would: then that alarm rings too."""
    assert "engine_mismatch" in rung[fault], rung[fault]
    assert rung[fault][0] in ("engine_mismatch", "temperature_differs"), rung[fault]


def test_a_learning_rate_30_times_too_high_is_noticed(rung):
    """If this fails, a collapse is seen only in the reward, when it is over."""
    assert set(rung["learning rate"]) & {"mask_share", "effective_sample_size", "entropy_collapse", "gradient_norm",
                                         "discarded_mass"}, rung["learning rate"]
