"""tools/fixed_lag.py: the lag of the stability experiments is real."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sao_megatron.telemetry.inspect import data

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def assert_inspectable(run_dir: Path) -> None:
    """If this fails, `--run` leaves a folder that `sao-megatron inspect` and TensorBoard cannot show."""
    run = data.load(run_dir, (0, 99))
    assert [row.metrics["policy_updated"] for row in run.steps] == [False] * 2 + [True] * 6
    assert {"reward/mean", "experts/busiest", "lag/mean"} <= run.steps[-1].metrics.keys()
    assert len(run.starts) == 8 * 6, "a quarter of the eight places is for those that lost tokens, and none did"
    assert {"higher", "lower"} <= set(run.codes("token")[1])
    assert run.column("lag")[run.sampled].max() == 0 and list((run_dir / "tensorboard").glob("events*"))


def test_samples_are_exactly_as_old_as_the_lag(tmp_path):
    """If this fails, docs/stability.md compares presets at other lags than it says."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fixed_lag_worker.py")), str(ROOT / "configs/fixed-lag-cpu.yaml"),
         str(out)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(out.read_text())
    assert [row["version"] for row in got["rows"]] == [0, 1, 2, 3, 4, 5]
    for row in got["rows"]:
        assert row["sampled"] == [max(0, row["version"] - 2)], "a batch comes from one version, 2 before the learner's"
        assert row["then"] < 1e-5, "the recorded log-probs are those of that version's weights"
        if row["version"] > 0:
            assert row["now"] > 1e-3, "training must have moved the weights for this test to mean anything"
    assert "rollout.routing_replay: the sampler here is the learner's own model" in got["refused"]
    result, fresh = got["result"], got["fresh"]
    assert [version for version, *_ in result["evaluations"]] == [0, 3, 6]
    assert max(fresh["log_ratio_abs"]) < 1e-5 < min(result["log_ratio_abs"][1:]), "without a lag every ratio is 1"
    assert_inspectable(tmp_path / "run")
    assert len(result["solved"]) == len(result["ess"]) == 6 and result["failed"] is None


def test_the_command_reports_each_evaluation_and_writes_every_step(tmp_path):
    """If this fails, one run of the stability experiments cannot be made by hand."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/fixed_lag.py"), str(ROOT / "configs/fixed-lag-cpu.yaml"), "--lag", "1",
         "--json", str(out), "steps=25", "batch.trajectories=4", "algorithm.critic_only_steps=0", "warmup.steps=1",
         "evaluation.episodes=3"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [version for version, *_ in result["evaluations"]] == [0, 25]
    first, last = done.stdout.splitlines()
    assert first == f"version 25: solves {result['evaluations'][-1][1]:.3f}" and last.startswith("done; ")
    assert result["failed"] is None and len(result["reward"]) == len(result["ess"]) == 25
