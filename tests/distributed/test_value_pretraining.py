"""`sao-megatron pretrain-value` with real ranks, and a learner of another layout that starts from what it wrote."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from reference import make_model

from sao_megatron import cli, config
from sao_megatron.errors import UserError
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, TrajectoryBuilder
from sao_megatron.weights import hf, value_head

HEADS = {"mse": [], "hl_gauss": ["critic.head=hl_gauss", "critic.bins=31"]}


def record(path: Path, count: int) -> None:
    """A store whose rewards follow from the first prompt token, so that a value model can know them; one has failed."""
    rng = np.random.default_rng(0)
    with Store(path) as store:
        for seq in range(count + 1):
            good = bool(rng.integers(0, 2))
            builder = TrajectoryBuilder([3 if good else 4, *rng.integers(8, 64, 3).tolist()], f"p{seq}", "made up")
            builder.add_action(rng.integers(8, 64, 4).tolist(), [-4.0] * 4, [0] * 4)
            builder.add_reward(float(good))
            store.append(builder.build(Status.ERROR if seq == count else Status.COMPLETED), seq)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Model, recipe and recorded trajectories."""
    folder = tmp_path_factory.mktemp("value")
    make_model(folder / "model")
    make_model(folder / "other", layers=1)
    record(folder / "trajectories.sqlite", 48)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(
        name="t", runs_dir=str(folder), model=dict(path=str(folder / "model"), dtype="float32"),
        parallel=dict(ranks=2, tp=2, ep=2), task=dict(name="guess_number"), batch=dict(trajectories=16),
        critic_optimizer=dict(lr=5e-3, warmup_steps=2), algorithm=dict(critic_only_steps=0))))
    return folder


def pretrain(folder: Path, output: str, *more: str) -> int:
    return cli.main(["pretrain-value", str(folder / "recipe.yaml"), *more, "--trajectories", str(folder),
                     "--steps", "30", "--output", str(folder / output)])


@pytest.fixture(scope="module", params=HEADS)
def head(folder, request) -> str:
    """A kind of head, with a critic pre-trained on two ranks in the folder of that name."""
    assert pretrain(folder, request.param, *HEADS[request.param]) == 0
    return request.param


def test_pretraining_teaches_the_returns(folder, head):
    """If this fails, a pre-trained critic knows no more than a fresh one."""
    steps = [json.loads(line) for line in (folder / head / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 30
    before, after = steps[0]["critic/explained_variance"], steps[-1]["critic/explained_variance"]
    assert before < 0.3 and after > 0.8


def test_a_run_starts_from_the_pretrained_critic(folder, run_ranks, head):
    """If this fails, a run (here of another layout) starts from something else than what pre-training learnt."""
    out = run_ranks("value_worker.py", 1, str(folder / "recipe.yaml"), str(folder / "trajectories.sqlite"),
                    "parallel.ranks=1", "parallel.tp=1", "parallel.ep=1", f"critic.path={folder / head / 'critic'}",
                    *HEADS[head])
    metrics = json.loads(out.partition("METRICS ")[2].splitlines()[0])
    assert metrics["critic/explained_variance"] > 0.8


@pytest.mark.parametrize(("override", "expected"), [
    ("critic.bins=7", "has the head"), ("critic.path=model", "has no value_head.json"),
    ("model.path=other", r"was made for another model than this one \(num_hidden_layers is 2 and 1")])
def test_a_critic_of_another_kind_is_refused(folder, head, override, expected, monkeypatch):
    """If one fails, a run starts from a head or a model that means something else, and its values are noise."""
    monkeypatch.chdir(folder)
    other = {"mse": "hl_gauss", "hl_gauss": "mse"}[head]
    kind = other if "bins" in override else head
    recipe = config.load("recipe.yaml", [*HEADS[kind], f"critic.path={head}/critic", override])
    with pytest.raises(UserError, match=expected):
        value_head.check(recipe, hf.read_config(recipe.model.path))


@pytest.mark.parametrize(("more", "expected"), [
    (["batch.trajectories=64"], "holds 48 finished trajectories, 64 are needed"),
    (["parallel={ranks: 3, tp: 3}"], "parallel.tp=3 does not divide"),
    (["critic={head: hl_gauss, value_clip: 0.2}"], "value_clip limits a squared error"),
    (["critic={head: hl_gauss, value_min: 2.0}"], "value_min=2 must be less than value_max=1.5"),
])
def test_refused_before_anything_starts(folder, more, expected, capsys):
    """If one fails, a mistake is found only inside a rank, or leaves a folder behind that blocks the next try."""
    assert pretrain(folder, "refused", *more) == 2
    assert expected in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_a_return_outside_the_histogram_names_its_trajectory(folder, capsys):
    """If this fails, a reward that HL-Gauss cannot represent is cut to the edge of its range without a word."""
    assert pretrain(folder, "narrow", "critic={head: hl_gauss, value_min: -0.5, value_max: 0.9}",
                    "parallel={ranks: 1}") == 1
    error = capsys.readouterr().err
    assert "its return 1 lies outside critic.value_min=-0.5 … critic.value_max=0.9: widen the range" in error
