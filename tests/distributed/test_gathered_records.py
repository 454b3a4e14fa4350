"""Token records of every layout: the step's metrics recomputed from them by brute force, HF's log-probs in them."""
from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from reference import by_segment, hf_logprobs, make_model, make_trajectories, set_rollout_logprobs

from sao_megatron.telemetry.records import SCHEMA

VERSION = 2  # the worker's
FINEST = 10**-0.7  # loads below share a bin
LAYOUTS = {"tp2 ep2": dict(tp=2, ep=2), "cp2 ep2": dict(cp=2, ep=2), "dp2 ep2": dict(ep=2), "pp2": dict(pp=2)}


@pytest.fixture(scope="module")
def run(tmp_path_factory, run_ranks):
    """(folder, trajectories, model, what rank 0 wrote); all layouts in one world of two ranks."""
    folder = tmp_path_factory.mktemp("records")
    model, trajectories = make_model(folder / "model"), make_trajectories(11)
    set_rollout_logprobs(model, trajectories)
    (folder / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))
    run_ranks("records_worker.py", 2, str(folder), json.dumps(LAYOUTS))
    return folder, trajectories, model, json.loads((folder / "results.json").read_text())


def records(folder, layout: str, step: int) -> pa.Table:
    return pq.read_table(folder / layout / f"step-{step:06d}.parquet")


def actions(folder, layout: str) -> dict[str, np.ndarray]:
    """Columns of the update's action tokens, float64 where they are numbers."""
    table = records(folder, layout, 1)
    table = table.filter(pc.equal(table["kind"], "action"))
    return {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_recomputed_from_the_records(run, layout):
    """If this fails, records or statistics lose, repeat or mix up tokens on this layout."""
    folder, _, _, results = run
    token, got = actions(folder, layout), results["metrics"][layout]
    fate, n = token["fate"], len(token["fate"])
    ratio, weight, value, target, advantage = (
        token[name].astype(float) for name in ("ratio", "weight", "value", "return", "advantage"))
    expected = {
        "mask/dropped_low": np.sum(fate == "dropped_low") / n, "mask/dropped_high": np.sum(fate == "dropped_high") / n,
        "mask/recovered": np.sum(fate == "recovered") / n, "mask/kept": np.sum(fate == "kept") / n,
        "mask/dropped_low_by_trajectory": np.mean([
            np.mean(fate[token["trajectory"] == id] == "dropped_low") for id in set(token["trajectory"])]),
        "mask/effective_sample_size": weight.sum()**2 / (n * (weight**2).sum()),
        "mask/discarded_mass": 1 - ratio[fate == "kept"].sum() / n,
        "ratio/log_mean": token["log_ratio"].mean(dtype=float),
        "ratio/log_abs_mean": np.abs(token["log_ratio"]).mean(dtype=float),
        "lag/mean": token["lag"].mean(), "policy/entropy": token["entropy"].mean(dtype=float),
        "critic/value_mean": value.mean(),
        "critic/explained_variance": 1 - np.var(target - value) / np.var(target),
        "advantage/mean": advantage.mean(), "advantage/std": advantage.std()}
    assert 0 < expected["mask/dropped_low"] and 0 < expected["mask/dropped_high"] and 0 < expected["mask/recovered"]
    for name, number in expected.items():
        assert got[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


def in_bucket(name: str, bucket: str, token: dict[str, np.ndarray]) -> np.ndarray:
    """Which of the action tokens belong into `bucket` of the breakdown `name`."""
    _, starts, owner, length = np.unique(token["trajectory"], return_index=True, return_inverse=True,
                                         return_counts=True)
    if name == "task":
        return token["task"] == bucket
    if name == "advantage":
        return np.sign(token["advantage"]) == {"negative": -1, "zero": 0, "positive": 1}[bucket]
    if name == "position":
        before = np.arange(len(owner)) - starts[owner]  # a trajectory's rows are together and in order
        return 10 * before // length[owner] == int(bucket.partition("-")[0]) // 10
    values = length[owner] if name == "length" else token[name]
    first, _, last = bucket.rstrip("+").partition("-")
    return (values >= int(first)) & (values <= (2**31 if bucket.endswith("+") else int(last or first)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lag", "turn", "position", "length", "advantage", "task"])
def test_breakdowns_recomputed_from_the_records(run, layout, name):
    """If this fails, what is said of old tokens, late turns or long trajectories is of others on this layout."""
    folder, _, _, results = run
    token, got = actions(folder, layout), results["metrics"][layout]
    buckets = [key.partition(" ")[2] for key in got if key.startswith(f"by_{name}/tokens ")]
    assert len(buckets) >= (1 if name == "task" else 2) and sum(got[f"by_{name}/tokens {b}"] for b in buckets) == (
        pytest.approx(1))
    for bucket in buckets:
        mine = in_bucket(name, bucket, token)
        fate, weight, ratio = (token[column][mine] for column in ("fate", "weight", "ratio"))
        weight = weight.astype(float)
        expected = {
            "tokens": mine.mean(), "dropped_low": np.mean(fate == "dropped_low"),
            "dropped_high": np.mean(fate == "dropped_high"), "recovered": np.mean(fate == "recovered"),
            "effective_sample_size": weight.sum()**2 / (mine.sum() * (weight**2).sum()) if weight.any() else 0.0,
            "discarded_mass": 1 - ratio[fate == "kept"].astype(float).sum() / mine.sum()}
        for field, number in expected.items():
            assert got[f"by_{name}/{field} {bucket}"] == pytest.approx(number, rel=1e-5, abs=1e-6), (field, bucket)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_load_is_that_of_transformers(run, layout):
    """If this fails, slices, chunks, stages or padding change how busy an expert is said to be, or a token has another
    token's experts."""
    folder, trajectories, model, results = run
    k, chosen = model.config.num_experts_per_tok, []
    for t in trajectories:
        of_segments = []
        for tokens, _ in by_segment(t):
            with torch.no_grad():
                logits = model(input_ids=tokens[None], output_router_logits=True)
            of_segments.append(np.stack([layer.topk(k).indices.numpy() for layer in logits.router_logits], 1))
        chosen.append(np.concatenate(of_segments))  # [T, layers, k]
    counts = [np.bincount(layer.ravel(), minlength=model.config.num_experts)
              for layer in np.concatenate(chosen).swapaxes(0, 1)]
    load = np.stack([count / count.mean() for count in counts])
    token = actions(folder, layout)
    for t, mine in zip(trajectories, chosen, strict=True):
        before = mine[np.flatnonzero(t.action_mask) - 1]
        expected = np.mean([load[layer][before[:, layer]].mean(-1) for layer in range(len(load))], 0)
        np.testing.assert_allclose(token["expert_load"][token["trajectory"] == t.id].astype(float), expected, rtol=1e-5)
    assert results["metrics"][layout]["experts/busiest"] == pytest.approx(load.max(), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deciles_of_expert_load_recomputed_from_the_records(run, layout):
    """If this fails, "the tokens with the busiest experts" are others on this layout."""
    folder, _, _, results = run
    token, got = actions(folder, layout), results["metrics"][layout]
    load = np.clip(token["expert_load"].astype(float), FINEST, None)
    fine = np.floor(np.log10(load / FINEST) * 200)  # 200 bins a factor of 10
    below = np.array([(np.sum(fine < bin) + np.sum(fine == bin) / 2) / len(fine) for bin in fine])
    decile = np.minimum((10 * below).astype(int), 9)
    for number in set(decile):
        mine, bucket = decile == number, f"{10 * number}-{10 * (number + 1)}%"
        low, high = (np.mean(token["fate"][mine] == fate) for fate in ("dropped_low", "dropped_high"))
        assert got[f"by_expert_load/tokens {bucket}"] == pytest.approx(mine.mean())
        assert got[f"by_expert_load/dropped_low {bucket}"] == pytest.approx(low)
        assert got[f"by_expert_load/dropped_high {bucket}"] == pytest.approx(high)
    assert len(set(decile)) >= 8, "else nothing was told apart"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_hold_the_trajectories(run, layout):
    """If this fails, a token's numbers stand beside another token."""
    folder, trajectories, model, _ = run
    table = records(folder, layout, 1)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    rows = table.to_pylist()
    for t in trajectories:
        mine = [row for row in rows if row["trajectory"] == t.id]
        assert [row["token_id"] for row in mine] == t.tokens.tolist()
        assert [row["position"] for row in mine] == list(range(len(t)))
        assert [row["kind"] == "action" for row in mine] == t.action_mask.tolist()
        assert [row["turn"] for row in mine] == t.turns.tolist()
        assert {(row["prompt"], row["task"], row["status"], row["chosen"]) for row in mine} == {
            (t.prompt_id, t.task, str(t.status), "sample")}
        acted = [row for row in mine if row["kind"] == "action"]
        own, rollout = hf_logprobs(model, t).detach().numpy(), t.rollout_logprobs[t.action_mask]
        np.testing.assert_allclose([row["policy_logprob"] for row in acted], own, atol=1e-5)
        np.testing.assert_allclose([row["log_ratio"] for row in acted], own - rollout, atol=1e-5)
        assert [row["rollout_logprob"] for row in acted] == rollout.tolist()
        assert [row["lag"] for row in acted] == (VERSION - t.action_versions).tolist()
        assert [row["reward"] for row in mine] == t.rewards.tolist()
        assert all(row["fate"] is row["version"] is row["value"] is None for row in mine if row["kind"] != "action")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_critic_only_step(run, layout):
    """If this fails, a step without a policy update has no records, or invents fates."""
    columns = records(run[0], layout, 0)
    assert columns["fate"].null_count == columns["policy_logprob"].null_count == len(columns)
    assert columns["value"].null_count == columns["version"].null_count < len(columns)


def test_few_are_the_same_on_every_layout(run):
    """If this fails, which trajectories are recorded depends on the layout, or the worst is not among them."""
    folder, _, _, results = run
    few = [[tuple(one) for one in chosen] for chosen in results["few"].values()]
    assert all(one == few[0] for one in few) and len(few[0]) == 4
    token = actions(folder, "tp2 ep2")
    dropped = np.char.startswith(token["fate"].astype(str), "dropped")
    share = {id: dropped[token["trajectory"] == id].mean() for id in set(token["trajectory"])}
    sample = {id for id, how in few[0] if how == "sample"}
    (worst,) = [id for id, how in few[0] if how == "worst"]
    assert share[worst] == max(value for id, value in share.items() if id not in sample)
