"""Every preset trains, and trains the same on one rank, on TP2·EP2 and on DP2·EP2."""
from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from reference import hf_logprobs, make_model, make_trajectories

from sao_megatron.algorithm.presets import PRESETS, resolve

LAYOUTS = {1: {"one": {}}, 2: {"tp2 ep2": dict(tp=2, ep=2), "dp2 ep2": dict(ep=2)}}
ALGORITHMS = {name: dict(preset=name) for name in PRESETS} | {
    "step-level average": dict(preset="sao", advantage="average", bootstrap_truncated=True),
    "step-level last token": dict(preset="sao", advantage="last_token")}


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_worlds):
    """{layout: {algorithm: what preset_worker.train returns}}; each world started once."""
    folder = tmp_path_factory.mktemp("presets")
    model, rng = make_model(folder / "model"), np.random.default_rng(3)
    trajectories = make_trajectories(16)
    for index, trajectory in enumerate(trajectories):
        trajectory.prompt_id = f"p{index % 5}"
        with torch.no_grad():
            own = hf_logprobs(model, trajectory).numpy()
        # So near that FlashREINFORCE trusts some trajectories, and on both sides of GSPO's narrow band; a few tokens
        # beyond every gate's bound, whichever numbers this machine's torch draws for the model.
        log_ratio = rng.normal(0.0, 0.6, len(own))
        if index % 4 == 0:
            log_ratio[0] = 2.5
        trajectory.rollout_logprobs[trajectory.action_mask] = np.minimum(own - log_ratio, -1e-3)
    (folder / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))
    return run_worlds("preset_worker.py", folder, LAYOUTS, json.dumps(ALGORITHMS))


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_preset_trains_the_same_on_two_ranks(results, name, layout):
    """If this fails, the preset trains nothing, or its gate, advantage or normalisation depends on the layout."""
    one, two = results["one"][name]["metrics"], results[layout][name]["metrics"]
    assert len(one) == 2 and all(step["policy/grad_norm"] > 1e-6 for step in one)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key


@pytest.mark.parametrize("name", PRESETS)
def test_only_other_behaviour_policies_pay_a_forward_pass(results, name):
    """If this fails, a rollout preset pays for a pass that it does not need, or the cost of one is hidden."""
    paid = resolve(name).behaviour != "rollout"
    assert ("recompute" in results["one"][name]["phases"]) == paid


def test_recomputed_policy_is_the_one_before_the_update(results):
    """If this fails, PPO's ratio is not 1 in the batch's first update."""
    np.testing.assert_allclose(results["one"]["grpo"]["weights"], 1.0, rtol=1e-5)
    np.testing.assert_allclose(results["one"]["online_dpo"]["weights"], 0.1 / 2, rtol=1e-5)  # β·σ(0)


def test_gates_differ(results):
    """If this fails, presets share a gate and the comparisons between them compare nothing."""
    norms = {name: results["one"][name]["metrics"][0]["policy/grad_norm"] for name in
             ("grpo", "grpo_dis", "decoupled_ppo", "icepop", "tis", "cispo", "gspo", "ipo", "online_dpo")}
    assert len({round(norm, 9) for norm in norms.values()}) == len(norms), norms
