"""`sao-megatron rollout`: engines and a controller without a learner fill a store that a replay can train on."""
from __future__ import annotations

import json
from pathlib import Path

from real_run import BATCH, START_SECONDS, query, stored
from safetensors.torch import load_file, save_file

from sao_megatron.trajectory.recorded import find_store


def untied(source: Path, target: Path) -> Path:
    """The same model with a head of its own: SGLang does not tie a Qwen3-MoE's when it loads it by itself."""
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    target.mkdir()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    return target


# If this fails, trajectories cannot be recorded without a learner, or too few or too many are, or from other weights.
def test_rollout_fills_a_store(finished, start_run, tmp_path):
    model = untied(finished.folder.export_path, tmp_path / "model")
    run = start_run("filled", f"model={{path: {model}, dtype: float32}}", "steps=2",
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
