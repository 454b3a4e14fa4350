"""Every layout gives HF's log-probs, the naive loss's gradient, and the one-process run's training."""
from __future__ import annotations

import pickle

import numpy as np
import pytest
from reference import (
    drop_all,
    fate_counts,
    hf_gradients,
    hf_logprobs,
    make_lone_trajectory,
    make_model,
    make_trajectories,
    naive_policy_loss,
    set_rollout_logprobs,
)

HL_GAUSS, CLIPPED = dict(head="hl_gauss", bins=21), dict(value_clip=1e-3)
LAYOUTS = {
    1: [dict(name="one", budget=10_000), dict(name="one, many micro-batches", budget=40),
        dict(name="one, tied", budget=200, data="tied"), dict(name="one, dropped", budget=20, data="dropped"),
        dict(name="one, lone", budget=20, data="lone"), dict(name="one, nothing kept", budget=60, data="nothing kept"),
        dict(name="one, hl_gauss", budget=80, critic=HL_GAUSS), dict(name="one, clipped", budget=80, critic=CLIPPED)],
    2: [dict(name="dp2", budget=100), dict(name="tp2", tp=2, budget=120), dict(name="ep2", ep=2, budget=150),
        dict(name="ep2, allgather", ep=2, budget=150, dispatcher="allgather"),
        dict(name="tp2 ep2 etp1", tp=2, ep=2, budget=70), dict(name="tp2 etp2", tp=2, etp=2, budget=90),
        dict(name="tp2 ep2 tied, allgather", tp=2, ep=2, budget=130, data="tied", dispatcher="allgather"),
        dict(name="pp2", pp=2, budget=80),
        dict(name="pp2, allgather", pp=2, budget=80, dispatcher="allgather"),
        dict(name="pp2 tied", pp=2, budget=60, data="tied"),
        dict(name="pp2 vpp2", pp=2, vpp=2, budget=80),
        dict(name="pp2 vpp2, one micro-batch", pp=2, vpp=2, budget=10_000),
        dict(name="pp2 vpp2 tied, recompute", pp=2, vpp=2, budget=60, data="tied", recompute="full"),
        dict(name="pp2 vpp2, allgather", pp=2, vpp=2, budget=80, dispatcher="allgather"),
        dict(name="pp2 vpp2, dropped", pp=2, vpp=2, budget=20, data="dropped"),
        dict(name="cp2", cp=2, budget=100), dict(name="cp2 ep2", cp=2, ep=2, budget=60),
        dict(name="dp2 ep2, dropped", ep=2, budget=20, data="dropped"), dict(name="dp2, lone", budget=20, data="lone"),
        dict(name="dp2, nothing kept", budget=60, data="nothing kept"),
        dict(name="cp2 ep2, dropped", cp=2, ep=2, budget=20, data="dropped"),
        dict(name="cp2 ep2, lone", cp=2, ep=2, budget=20, data="lone"),
        dict(name="tp2 ep2, lone", tp=2, ep=2, budget=20, data="lone"),
        dict(name="pp2, dropped", pp=2, budget=20, data="dropped"),
        dict(name="tp2 ep2, hl_gauss", tp=2, ep=2, budget=60, critic=HL_GAUSS),
        dict(name="tp2 ep2, recompute", tp=2, ep=2, budget=70, recompute="full"),
        dict(name="pp2 tied, recompute", pp=2, budget=60, data="tied", recompute="full"),
        dict(name="cp2, clipped", cp=2, budget=100, critic=CLIPPED)],
    4: [dict(name="pp4", pp=4, budget=80), dict(name="pp2 vpp2 tp2 ep2", pp=2, vpp=2, tp=2, ep=2, budget=75),
        dict(name="tp2 ep2 etp2", tp=2, ep=2, etp=2, budget=90), dict(name="pp2 ep2", pp=2, ep=2, budget=75),
        dict(name="cp2 tp2 ep2", cp=2, tp=2, ep=2, budget=80),
        dict(name="cp2 pp2, allgather", cp=2, pp=2, budget=90, dispatcher="allgather"),
        dict(name="cp2 dp2 ep2, lone", cp=2, ep=2, budget=20, data="lone"),
        dict(name="cp2 tp2 ep2, hl_gauss", cp=2, tp=2, ep=2, budget=60, critic=HL_GAUSS)],
}


def make_sets(folder) -> tuple[dict, dict]:
    """Trajectories with HF's log-probs by name, and the naive loss's gradients as name/parameter."""
    models = {tied: make_model(folder / ("tied" if tied else "untied"), tied, layers=4) for tied in (False, True)}
    usual, dropped, nothing = make_trajectories(13), make_trajectories(7, seed=3), make_trajectories(4, seed=4)
    lone = make_lone_trajectory()
    for trajectories in (usual, dropped, lone):
        set_rollout_logprobs(models[False], trajectories)
    drop_all(models[False], [*dropped[1:], *nothing])  # whole micro-batches and ranks without a kept token
    sets, gradients, rng = {}, {}, np.random.default_rng(2)
    for name, trajectories in {"untied": usual, "tied": usual, "dropped": dropped, "lone": lone,
                               "nothing kept": nothing}.items():
        model, advantages = models[name == "tied"], {t.id: rng.normal(size=t.num_actions) for t in trajectories}
        model.zero_grad()
        naive_policy_loss(model, trajectories, list(advantages.values())).backward()
        gradients |= {f"{name}/{parameter}": g.copy() for parameter, g in hf_gradients(model).items()}
        sets[name] = dict(trajectories=trajectories, advantages=advantages,
                          logprobs=[hf_logprobs(model, t).detach().numpy() for t in trajectories])
    return sets, gradients


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_worlds):
    """All layouts on 1, 2 and 4 ranks, each world started once."""
    folder = tmp_path_factory.mktemp("layouts")
    sets, gradients = make_sets(folder)
    np.savez(folder / "gradients.npz", **gradients)
    (folder / "data.pkl").write_bytes(pickle.dumps(sets))
    usual = sets["untied"]
    found = {"fates": fate_counts(usual["logprobs"], usual["trajectories"]),
             "actions": sum(t.num_actions for t in usual["trajectories"])}
    return found | run_worlds("layout_worker.py", folder, LAYOUTS)


PROBLEM = {layout["name"]: (layout.get("data", "untied"), str(layout.get("critic")))
           for layouts in LAYOUTS.values() for layout in layouts}
NAMES = list(PROBLEM)
ONE_PROCESS = {PROBLEM[layout["name"]]: layout["name"] for layout in reversed(LAYOUTS[1])}


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_scores_the_probes_of_verification(results, name):
    """Fails if a layout cannot verify a publication, or scores other tokens than the engines are asked about."""
    alike = [other for other in NAMES if (PROBLEM[other][0] == "tied") == (PROBLEM[name][0] == "tied")]
    np.testing.assert_allclose(results[name]["probes"], results[alike[0]]["probes"], atol=1e-5)


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


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONE_PROCESS.values()])
def test_training_equals_one_process(results, name):
    """If this fails, optimizer, critic, advantages or statistics depend on the layout."""
    one, other = results[ONE_PROCESS[PROBLEM[name]]], results[name]
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


def test_nothing_kept_moves_nothing(results):
    """If this fails, a step whose every token was dropped changes the policy or poisons it with NaN."""
    first, *_, last = results["one, nothing kept"]["metrics"]
    assert first["mask/dropped"] == last["mask/dropped"] == 1.0
    assert last["policy/grad_norm"] == 0.0


def test_equal_returns_have_nothing_to_explain(results):
    """If this fails, the explained variance of a batch with one outcome is a huge number made of rounding."""
    assert all(step["critic/explained_variance"] == 0.0 for step in results["one, lone"]["metrics"])


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_computed_again_only_where_asked(results, name):
    """If this fails, `parallel.recompute` saves no memory, or every layout pays for it."""
    again = 2 if "recompute" in name else 1
    assert results[name]["passes"] == again * results[name]["micro_batches"]


@pytest.mark.parametrize("name", [name for name in NAMES if "recompute" not in name])  # which computes forwards twice
def test_the_memory_estimate_knows_the_schedule(results, name):
    """If this fails, `submit` reckons with fewer activations than a pipeline keeps."""
    for rank, (waited, reckoned) in enumerate(results[name]["in_flight"]):
        assert waited == reckoned, rank


def test_packing_differs_between_layouts(results):
    """If this fails, the layouts are all tested with the same packing."""
    assert len({results[name]["micro_batches"] for name in NAMES}) > 3
