"""`sao-megatron rollout`: engines and a controller without a learner fill a store that a replay can train on."""
from __future__ import annotations

from real_run import BATCH, START_SECONDS, query, stored

from sao_megatron.trajectory.recorded import find_store


# If this fails, trajectories cannot be recorded without a learner, or too few or too many are, or from other weights.
def test_rollout_fills_a_store(finished, start_run):
    run = start_run("filled", f"model={{path: {finished.folder.export_path}, dtype: float32}}", "steps=2",
                    "algorithm.critic_only_steps=1", f"batch.trajectories={BATCH}", "evaluation.episodes=0",
                    verb="rollout")
    assert run.wait(START_SECONDS) == 0, f"{run.out}\n{run.err}"
    run.children()
    assert run.survivors() == []
    path = run.folder.store_path
    assert query(path, "SELECT state, COUNT(*), MIN(min_version), MAX(max_version) FROM trajectories "
                 "GROUP BY state") == [("ready", 3 * BATCH, 0, 0)]
    assert len(stored(find_store(run.folder.path, 3 * BATCH))) == 3 * BATCH
    assert {file.name for file in run.folder.log_dir.iterdir()} == {"engine-0.log", "controller.log"}
