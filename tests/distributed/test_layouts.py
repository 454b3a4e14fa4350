"""Every layout gives HF's log-probs, the naive loss's gradient, and the one-process run's training."""
from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from reference import (
    fate_counts,
    hf_gradients,
    hf_logprobs,
    make_model,
    make_trajectories,
    naive_policy_loss,
    set_rollout_logprobs,
)

LAYOUTS = {
    1: [dict(name="one", budget=10_000), dict(name="one, many micro-batches", budget=40),
        dict(name="one, tied", budget=200, tied=True)],
    2: [dict(name="dp2", budget=100), dict(name="tp2", tp=2, budget=120), dict(name="ep2", ep=2, budget=150),
        dict(name="ep2, allgather", ep=2, budget=150, dispatcher="allgather"),
        dict(name="tp2 ep2 etp1", tp=2, ep=2, budget=70), dict(name="tp2 etp2", tp=2, etp=2, budget=90),
        dict(name="tp2 ep2 tied, allgather", tp=2, ep=2, budget=130, tied=True, dispatcher="allgather"),
        dict(name="pp2", pp=2, budget=80),
        dict(name="pp2, allgather", pp=2, budget=80, dispatcher="allgather"),
        dict(name="pp2 tied", pp=2, budget=60, tied=True)],
    4: [dict(name="tp2 ep2 etp2", tp=2, ep=2, etp=2, budget=90), dict(name="pp2 ep2", pp=2, ep=2, budget=75)],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    """All layouts on 1, 2 and 4 ranks, each world started once."""
    folder = tmp_path_factory.mktemp("layouts")
    trajectories = make_trajectories(13)
    rng = np.random.default_rng(2)
    data, gradients = dict(trajectories=trajectories), {}
    data["advantages"] = {t.id: rng.normal(size=t.num_actions) for t in trajectories}
    for tied in (False, True):
        prefix = "tied/" if tied else "untied/"
        model = make_model(folder / prefix[:-1], tied)
        if not tied:
            set_rollout_logprobs(model, trajectories)
        naive_policy_loss(model, trajectories, list(data["advantages"].values())).backward()
        gradients |= {prefix + name: g for name, g in hf_gradients(model).items()}
        data[prefix + "logprobs"] = [hf_logprobs(model, t).detach().numpy() for t in trajectories]
    np.savez(folder / "gradients.npz", **gradients)
    (folder / "data.pkl").write_bytes(pickle.dumps(data))
    found = {"fates": fate_counts(data["untied/logprobs"], trajectories),
             "actions": sum(t.num_actions for t in trajectories)}
    for ranks, layouts in LAYOUTS.items():
        run_ranks("layout_worker.py", ranks, str(folder), json.dumps(layouts))
        found |= json.loads((folder / f"results-{ranks}.json").read_text())
    return found


NAMES = [layout["name"] for layouts in LAYOUTS.values() for layout in layouts]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_hf(results, name):
    """If this fails, the ratio r is wrong from the first step and DIS masks at random."""
    assert results[name]["logprob"] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_the_naive_loss(results, name):
    """If this fails, the layout or the packing changes what is learned."""
    assert results[name]["names_match"]
    worst = max(results[name]["gradient"].items(), key=lambda item: item[1])
    assert worst[1] < 1e-5, worst


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_on_the_mask(results, name):
    """If this fails, tensor parallel ranks apply different masks and the weights drift apart."""
    assert results[name]["same_mask"]


@pytest.mark.parametrize("name", [name for name in NAMES if "tied" not in name])
def test_training_equals_one_process(results, name):
    """If this fails, optimizer, critic, advantages or statistics depend on the layout."""
    one, other = results["one"], results[name]
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
    for key, value in one["weights"].items():
        assert other["weights"][key] == pytest.approx(value, rel=1e-4), key


def test_mask_counts_equal_numpy(results):
    """If this fails, the reported mask rate is not the one of ALGORITHM.md §1."""
    low, high = results["fates"]
    metrics = results["one"]["metrics"][0]
    assert metrics["mask/dropped_low"] * results["actions"] == pytest.approx(low)
    assert metrics["mask/dropped_high"] * results["actions"] == pytest.approx(high)
    assert low > 0 and high > 0


def test_packing_differs_between_layouts(results):
    """If this fails, the layouts are all tested with the same packing."""
    assert len({results[name]["micro_batches"] for name in NAMES}) > 3
