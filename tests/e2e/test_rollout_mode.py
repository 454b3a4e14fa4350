"""`sao-megatron rollout`: engines and a controller without a learner fill a store that a replay can train on."""
from __future__ import annotations

import json
import subprocess
import sys

from real_run import BATCH, ENVIRONMENT, ROOT, START_SECONDS, query, stored

from sao_megatron.trajectory.recorded import find_store


# If one fails, trajectories cannot be recorded without a learner, or too few or too many are, or from other weights.
def test_rollout_fills_a_store(finished, start_run):
    run = start_run("filled", f"model={{path: {finished.folder.export_path}, dtype: float32}}", "steps=2",
                    "algorithm.critic_only_steps=1", f"batch.trajectories={BATCH}", "evaluation.episodes=0",
                    "rollout.controllers=2", verb="rollout")
    assert run.wait(START_SECONDS) == 0, f"{run.out}\n{run.err}"
    run.children()
    assert run.survivors() == []
    path = run.folder.store_path
    assert query(path, "SELECT state, COUNT(*), MIN(min_version), MAX(max_version) FROM trajectories "
                 "GROUP BY state") == [("ready", 3 * BATCH, 0, 0)]
    assert len(stored(find_store(run.folder.path, 3 * BATCH))) == 3 * BATCH
    assert {file.name for file in run.folder.log_dir.iterdir()} == {"engine-0.log", "controller.log"}


# If this fails, a checkpoint cannot be evaluated by itself, or with other weights or fewer episodes.
def test_evaluate_a_checkpoint(finished, tmp_path):
    command = [sys.executable, "-m", "sao_megatron.cli", "evaluate", str(finished.folder.export_path), "guess_number",
               "levers", "evaluation.episodes=15", "evaluation.samples=2", f"runs_dir={tmp_path}", "name=checked"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "pass@2" in done.stdout and "levers" in done.stdout
    found = json.loads((tmp_path / "checked" / "summary.json").read_text())["evaluations"]
    assert {(one["set"], one["episodes"]) for one in found} == {("guess_number", 30), ("levers", 30)}
    assert all(one["first_version"] == one["last_version"] == 0 for one in found)
    assert query(tmp_path / "checked" / "trajectories.sqlite", "SELECT COUNT(*) FROM trajectories") == [(0,)]
