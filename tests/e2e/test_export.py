"""The exported HF checkpoint: Transformers loads it, it is the learner's model, and it is what the engine served.

Each side scores the run's own trajectories in a process of its own: what the learner puts in place of a GPU for
Megatron-Core changes functions that Transformers uses too.
"""
from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_run import ENVIRONMENT, START_SECONDS, STEPS, query, stored

from sao_megatron.engine.process import free_port
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def trajectories(finished) -> list[Trajectory]:
    return stored(finished.folder.store_path)


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


# If this fails, the checkpoint holds other weights than the learner had at its end. The last update has learning rate 0
# (see FINISHED), so the log-ratios that it recorded were computed with the weights that were exported.
def test_exported_weights_are_the_last(finished, trajectories, transformers_scores):
    with Store(finished.folder.store_path) as store:
        *_, before, last = store.steps()
    assert last.metrics["policy/lr"] == 0.0 < before.metrics["policy/lr"]
    exported = dict(zip((t.id for t in trajectories), transformers_scores, strict=True))

    def log_ratio(step: int) -> float:
        """Mean |log π − log π_rollout| over the action tokens of a step, π being the checkpoint."""
        return np.mean(np.abs(np.concatenate([exported[t.id] - t.rollout_logprobs[t.action_mask]
                                              for t in trained_in(finished, trajectories, step)])))

    assert log_ratio(last.step) == pytest.approx(last.metrics["ratio/log_abs_mean"], abs=1e-5)
    # Weights of one update earlier give other numbers: the comparison can tell.
    assert abs(log_ratio(before.step) - before.metrics["ratio/log_abs_mean"]) > 1e-4


def trained_in(finished, trajectories: list[Trajectory], step: int) -> list[Trajectory]:
    ids = {name for name, in query(finished.folder.store_path, "SELECT id FROM trajectories WHERE step = ?", step)}
    return [trajectory for trajectory in trajectories if trajectory.id in ids]


# If this fails, the last weights were exported but never reached the engine, or the run does not check that they do.
def test_engine_served_the_last_weights(finished):
    log = (finished.folder.log_dir / "learner-0.log").read_text()
    verified = dict(re.findall(r"version (\d+) verified: engines' log-probs differ by (\S+) nats a token", log))
    assert list(verified) == [str(version) for version in range(STEPS + 1)]
    assert max(map(float, verified.values())) < 1e-4


# If this fails, the checkpoint's tokenizer writes the ids differently from the task that trained it.
def test_tokenizer_is_the_tasks(finished):
    code = ("import sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]); "
            "print(t.encode('<bos> 5 <eot> higher'), t.decode([10, 2, 4]), t.eos_token_id)")
    done = subprocess.run([sys.executable, "-c", code, str(finished.folder.path / "hf")], env=ENVIRONMENT, text=True,
                          timeout=START_SECONDS, capture_output=True)
    assert done.stdout == "[1, 10, 2, 3] 5 <eot> lower 2\n", done.stderr
