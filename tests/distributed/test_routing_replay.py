"""Recorded routing in the learner: every layout gives HF's log-probs and gradients under the same forced routing."""
from __future__ import annotations

import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from family_models import make
from reference import (
    hf_gradients,
    hf_logprobs,
    make_model,
    make_trajectories,
    naive_policy_loss,
    set_rollout_logprobs,
)

from sao_megatron.trajectory.routing import Routing

LAYERS, EXPERTS, TOP_K = 4, 8, 2
LAYOUTS = {
    1: [dict(name="one", budget=10_000), dict(name="one, recompute", budget=40, recompute="full")],
    2: [dict(name="tp2 ep2", tp=2, ep=2, budget=70), dict(name="cp2 ep2", cp=2, ep=2, budget=60),
        dict(name="dp2 ep2", ep=2, budget=60), dict(name="pp2", pp=2, budget=60),
        dict(name="pp2, recompute", pp=2, budget=60, recompute="full"),
        dict(name="pp2 vpp2", pp=2, vpp=2, budget=60),
        dict(name="pp2 vpp2, recompute", pp=2, vpp=2, budget=40, recompute="full")],
    4: [dict(name="cp2 tp2 ep2", cp=2, tp=2, ep=2, budget=80),
        dict(name="pp2 tp2 ep2, allgather", pp=2, tp=2, ep=2, budget=70, dispatcher="allgather")],
}
NAMES = [layout["name"] for layouts in LAYOUTS.values() for layout in layouts]


def record_at_random(trajectories: list, seed: int = 5) -> None:
    """Experts that no router would choose, for about 70 % of the tokens; none at all in one trajectory."""
    rng = np.random.default_rng(seed)
    for trajectory in trajectories[1:]:
        rows = len(trajectory)
        experts = rng.random((rows, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        trajectory.routing = Routing(experts.reshape(rows, -1).astype(np.uint8), rng.random(rows) < 0.7)


@contextmanager
def forced(model, trajectory):
    """HF's model with this trajectory's recorded routing."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    for index, gate in enumerate(gates if trajectory.routing else []):
        experts = torch.from_numpy(trajectory.routing.experts[:, index * TOP_K:(index + 1) * TOP_K].astype(np.int64))
        gate.forward = forced_gate(gate, experts, torch.from_numpy(trajectory.routing.recorded)[:, None])
    yield
    for gate in gates if trajectory.routing else []:
        del gate.forward


def forced_gate(gate, experts, recorded):
    """Takes the trajectory's segments in order, and then again from the first."""
    start = 0

    def forward(hidden):
        nonlocal start
        logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.t()
        rows = slice(start, start + len(logits))
        start = rows.stop % len(experts)
        probabilities = logits.softmax(-1)
        chosen = torch.where(recorded[rows], experts[rows], probabilities.topk(TOP_K).indices)
        weights = probabilities.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen
    return forward


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_worlds):
    folder = tmp_path_factory.mktemp("replay")
    model, trajectories = make_model(folder / "model", layers=LAYERS), make_trajectories(9)
    record_at_random(trajectories)
    rng = np.random.default_rng(2)
    advantages = {t.id: rng.normal(size=t.num_actions) for t in trajectories}
    count, logprobs = sum(t.num_actions for t in trajectories), []
    for number, t in enumerate(trajectories):
        with forced(model, t):
            set_rollout_logprobs(model, [t], seed=number)
            logprobs.append(hf_logprobs(model, t).detach().numpy())
            (naive_policy_loss(model, [t], [advantages[t.id]]) * t.num_actions / count).backward()
    make("deepseek_v3", folder)
    np.savez(folder / "gradients.npz", **hf_gradients(model))
    (folder / "data.pkl").write_bytes(pickle.dumps(
        dict(trajectories=trajectories, advantages=advantages, logprobs=logprobs)))
    # One rank first: two ranks read what it writes for them.
    one, more = {1: LAYOUTS[1]}, {ranks: LAYOUTS[ranks] for ranks in (2, 4)}
    return run_worlds("replay_worker.py", folder, one) | run_worlds("replay_worker.py", folder, more)


# If one fails, a layout sends tokens to other experts than were recorded for them. (DeepSeek's is held to one rank.)
@pytest.mark.parametrize("name", [*NAMES, "pp2, deepseek_v3", "pp2 vpp2, deepseek_v3"])
def test_logprobs_equal_hf_with_the_same_routing(results, name):
    assert results[name]["logprob"] < 1e-5


# If one fails, gradients do not flow through the replayed router, or a layer is computed again with another routing.
@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_hf_with_the_same_routing(results, name):
    worst = max(results[name]["gradient"].items(), key=lambda item: item[1])
    assert worst[1] < 1e-5, worst


# If one fails, ranks are sent routing that is not theirs, which is most of a batch's bytes, or miss some that is.
@pytest.mark.parametrize("name", NAMES)
def test_every_choice_goes_to_one_rank(results, name):
    assert results[name]["held"] == results[name]["recorded"]


ONE_PROCESS = [f"one process, {model}" for model in ("model", "deepseek_v3")]
"""The second has a dense layer, a router with groups, sigmoids and a correction bias, and shared experts."""


# If one fails, replay changes more than the choice of experts, or tokens without a record are not routed freely.
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_own_routing_changes_nothing(results, name):
    assert results[name]["own"] == results[name]["not recorded"] == 0.0


# If one fails, recorded routing is ignored.
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_other_routing_changes_logprobs(results, name):
    assert results[name]["other"] > 1e-2


# If this fails, a record that is none makes a dispatcher lose count of its tokens, or the wrong one is named.
def test_impossible_records_are_refused(results):
    one = results["one process, model"]
    for name in ("equal", "large"):
        assert f"trajectory {one['id']}: the engine recorded experts" in one["refusals"][name]
        assert "expected 2 different ones of 8" in one["refusals"][name]
    assert "7 routed experts a token, this model 4 layers times 2" in one["refusals"]["narrow"]
