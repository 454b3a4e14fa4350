"""Weights travel from two TP·EP ranks of a real Megatron learner to a real SGLang engine."""
from __future__ import annotations

import asyncio
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import World
from served import VOCAB, hf_logprobs

from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder

HERE = Path(__file__).parent
SETTINGS = {"name": "t", "task": {"name": "none"}, "steps": 3, "parallel": {"ranks": 2, "tp": 2, "ep": 2},
            "policy_optimizer": {"lr": 0.02}, "publication": {"bucket_mib": 0.02, "timeout": 60, "tolerance": 1e-4}}


async def sample(client, count: int, length: int = 12) -> list[Trajectory]:
    """`count` one-turn trajectories from the engine, rewarded at random so that training moves the weights."""
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, VOCAB, 5).tolist() for _ in range(count)]
    answers = await asyncio.gather(*(client.generate(
        prompt, max_new_tokens=length, temperature=1.0, stop_token_ids=[]) for prompt in prompts))
    result = []
    for prompt, answer in zip(prompts, answers, strict=True):
        builder = TrajectoryBuilder(prompt, "p", "t")
        builder.add_action(answer.tokens, answer.logprobs, answer.versions)
        builder.add_reward(float(rng.integers(0, 2)))
        result.append(builder.build())
    return result


def rollout_logprobs(trajectories: list[Trajectory]) -> np.ndarray:
    return np.concatenate([t.rollout_logprobs[t.action_mask] for t in trajectories])


async def read(path: Path, learner: World):
    """What the learner wrote to `path`."""
    deadline = time.monotonic() + 180
    while not path.exists():
        assert learner.runs, learner.output()[-4000:]
        assert time.monotonic() < deadline, f"the learner did not write {path.name} within 180 s"
        await asyncio.sleep(0.02)
    return pickle.loads(path.read_bytes())


@pytest.fixture
def learner(tmp_path):
    """Two real ranks, waiting for start.pkl in tmp_path."""
    with World(HERE / "publish_worker.py", 2, (str(tmp_path),), tmp_path / "learner.log") as world:
        yield world


async def test_publication_from_two_ranks(engine, tmp_path, learner):
    """If this fails, engines sample from other weights than the learner trains, or record the wrong version."""
    old_version, new_version = engine.version, engine.version + 1
    model_dir = tmp_path / "model"
    engine.model.save_pretrained(model_dir)
    async with engine.client() as client:
        trajectories = await sample(client, 16)
        config = SETTINGS | {"model": {"path": str(model_dir), "dtype": "float32"}}
        (tmp_path / "start.pkl").write_bytes(pickle.dumps(dict(
            config=config, trajectories=trajectories, url=engine.url, version=old_version)))
        before = await read(tmp_path / "trained.pkl", learner)
        assert np.abs(np.concatenate(before) - rollout_logprobs(trajectories)).max() < 1e-4

        in_flight = asyncio.create_task(client.generate(
            [3, 4, 5], max_new_tokens=600, temperature=1.0, stop_token_ids=[], rid="in-flight"))
        await asyncio.sleep(0.5)
        (tmp_path / "publish.pkl").write_bytes(pickle.dumps(True))
        assert await read(tmp_path / "published.pkl", learner) < 1e-4
        crossing = await in_flight
        later = await sample(client, 8)
        assert {v for t in later for v in t.action_versions} == {new_version}
        (tmp_path / "score.pkl").write_bytes(pickle.dumps(later))
        after = await read(tmp_path / "after.pkl", learner)
        assert np.abs(np.concatenate(after) - rollout_logprobs(later)).max() < 1e-4
        learner.wait(60)

    from transformers import AutoModelForCausalLM
    new_model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float().eval()
    tokens = [3, 4, 5, *crossing.tokens]
    old, new = (np.array(hf_logprobs(m, tokens)[2:]) for m in (engine.model, new_model))
    engine.model, engine.version = new_model, new_version
    assert np.abs(old - new).max() > 0.05, "training must have moved the weights for this test to mean anything"
    versions, got = np.array(crossing.versions), np.array(crossing.logprobs)
    assert set(versions) == {old_version, new_version} and (np.diff(versions) >= 0).all()
    assert np.abs(got - old)[versions == old_version].max() < 1e-4
    assert np.abs(got - new)[versions == new_version].max() < 1e-4
