"""The exported HF checkpoint: Transformers loads it, it is the learner's model, and it is what the engine served.

Each side scores the run's own trajectories in a process of its own: what the learner puts in place of a GPU for
Megatron-Core changes functions that Transformers uses too.
"""
from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_run import ENVIRONMENT, START_SECONDS, STEPS, stored

from sao_megatron.engine.process import free_port
from sao_megatron.trajectory.types import Trajectory

HERE = Path(__file__).parent
COUNT = 200
"""Newest trajectories that are scored."""


@pytest.fixture(scope="module")
def trajectories(finished) -> list[Trajectory]:
    return stored(finished.folder.store_path)[-COUNT:]


@pytest.fixture(scope="module")
def scores(finished, trajectories, tmp_path_factory):
    """scores(script): log-probs of the action tokens of each trajectory, by a script that loads the checkpoint."""
    folder = tmp_path_factory.mktemp("scores")
    (folder / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))

    def run(script: str) -> list[np.ndarray]:
        answer = folder / f"{script}.pkl"
        rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(finished.folder.path), str(folder / "trajectories.pkl"),
             str(answer)], env=ENVIRONMENT | rank, text=True, timeout=START_SECONDS, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-6000:]
        return pickle.loads(answer.read_bytes())
    return run


@pytest.fixture(scope="module")
def transformers_scores(scores) -> list[np.ndarray]:
    return scores("transformers_scores.py")


# If this fails, whoever loads the checkpoint with Transformers gets another model than the one that was trained.
def test_transformers_gives_the_learners_logprobs(scores, transformers_scores):
    learner = scores("learner_scores.py")
    assert max(np.abs(a - b).max() for a, b in zip(learner, transformers_scores, strict=True)) < 1e-5
    assert np.std(np.concatenate(learner)) > 0.1  # a model without preferences would agree with anything


# If this fails, the engine sampled from other weights than those that were exported. The last update's learning rate
# is 0 (see FINISHED), so the tokens of the version before it were sampled from the exported weights.
def test_engine_served_the_exported_weights(trajectories, transformers_scores):
    last = STEPS - 1
    differences, older = [], []
    for trajectory, exported in zip(trajectories, transformers_scores, strict=True):
        difference = np.abs(trajectory.rollout_logprobs[trajectory.action_mask] - exported)
        differences.append(difference[trajectory.action_versions >= last])
        older.append(difference[trajectory.action_versions < last])
    differences, older = np.concatenate(differences), np.concatenate(older)
    assert len(differences) > 0
    assert differences.max() < 1e-4
    assert older.max() > 1e-3  # earlier weights do differ, so the comparison can tell


# If this fails, the checkpoint's tokenizer writes the ids differently from the task that trained it.
def test_tokenizer_is_the_tasks(finished):
    code = ("import sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]); "
            "print(t.encode('<bos> 5 <eot> higher'), t.decode([10, 2, 4]), t.eos_token_id)")
    done = subprocess.run([sys.executable, "-c", code, str(finished.folder.path / "hf")], env=ENVIRONMENT, text=True,
                          timeout=START_SECONDS, capture_output=True)
    assert done.stdout == "[1, 10, 2, 3] 5 <eot> lower 2\n", done.stderr
