"""Mask statistics summed over micro-batches and ranks against brute force over all tokens at once (ALGORITHM.md §7)."""
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.dis import Fate
from sao_megatron.telemetry.statistics import LOG_RATIO_EDGES, Statistics

quick = settings(max_examples=60, deadline=None)
BUCKETS = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 10**9)]  # lags, first and last of each


def tokens(seed: int, n: int, recover: bool):
    """log_ratio, weight, fate, lag, entropy of n action tokens: E[r] = 1, half of them outside the band."""
    rng = np.random.default_rng(seed)
    log_ratio = rng.normal(-0.5, 1.0, n).astype(np.float32)
    weight, fate = oracles.gate(log_ratio, rng.normal(size=n), 0.3, 5.0, recover)
    return log_ratio, weight.astype(np.float32), fate, rng.integers(0, 30, n), rng.random(n).astype(np.float32)


def reduced(columns, cuts: list[int]) -> Statistics:
    """The tokens cut into micro-batches, one rank each, reduced as the learner does: a sum of vectors."""
    pieces = zip(*(np.split(column, sorted(cuts)) for column in columns), strict=True)
    vectors = []
    for piece in pieces:
        one = Statistics()
        one.add_tokens(*piece)
        vectors.append(one.to_vector())
    return Statistics.from_vector(np.sum([Statistics().to_vector(), *vectors], axis=0))


@quick
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4),
       recover=st.booleans())
def test_property_statistics_equal_brute_force(seed, n, cuts, recover):
    """Fails if a reported share or mean depends on the layout, or is not what its name says."""
    columns = log_ratio, weight, fate, lag, entropy = tokens(seed, n, recover)
    got = reduced(columns, [min(cut, n) for cut in cuts]).metrics()
    expected = {
        "mask/dropped_low": np.mean(fate == Fate.DROPPED_LOW), "mask/dropped_high": np.mean(fate == Fate.DROPPED_HIGH),
        "mask/recovered": np.mean(fate == Fate.RECOVERED),
        "mask/dropped": np.mean((fate == Fate.DROPPED_LOW) | (fate == Fate.DROPPED_HIGH)),
        "mask/effective_sample_size": oracles.effective_sample_size(weight),
        "ratio/log_mean": np.mean(log_ratio, dtype=float),
        "ratio/log_abs_mean": np.mean(np.abs(log_ratio), dtype=float),
        "lag/mean": np.mean(lag), "policy/entropy": np.mean(entropy, dtype=float)}
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("recover", [False, True], ids=["dis", "dis_recover"])
def test_oracle_discarded_mass(recover):
    """Fails if the bias of masking, m = 1 − E[r·1{kept}], is computed from anything but the kept tokens' ratios."""
    columns = log_ratio, _, fate, *_ = tokens(1, 400, recover)
    got = reduced(columns, [100]).metrics()["mask/discarded_mass"]
    np.testing.assert_allclose(got, oracles.discarded_mass(log_ratio, fate), rtol=1e-5)


@quick
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), cut=st.integers(0, 60))
def test_property_histograms_equal_brute_force(seed, n, cut):
    """Fails if a token falls into the wrong lag bucket or log-ratio bin, or into none."""
    columns = log_ratio, _, fate, lag, _ = tokens(seed, n, True)
    log_ratio[:2] = [700, -700][:n]
    got = reduced(columns, [min(cut, n)])
    counts = [[sum(1 for a, f in zip(lag, fate, strict=True) if first <= a <= last and f == kind) for kind in Fate]
              for first, last in BUCKETS]
    assert got.fates.tolist() == counts
    bins = [sum(1 for x in log_ratio if low <= x < high)
            for low, high in zip(LOG_RATIO_EDGES[:-1], LOG_RATIO_EDGES[1:], strict=True)]
    assert got.log_ratio.tolist() == bins and sum(bins) == n


@quick
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 60), cut=st.integers(0, 60))
def test_property_critic_metrics_equal_brute_force(seed, n, cut):
    """Fails if the critic's explained variance or loss is not that of all action tokens together."""
    rng = np.random.default_rng(seed)
    value, target, advantage = rng.normal(size=(3, n))
    target += 0.5 * value
    sums = np.zeros_like(Statistics().to_vector())
    for v, t, a in zip(*(np.split(x, [min(cut, n)]) for x in (value, target, advantage)), strict=True):
        one = Statistics()
        one.add(value_tokens=len(v), value=v, error=t - v, error_squared=(t - v)**2, advantage=a,
                advantage_squared=a**2, **{"return": t, "return_squared": t**2})
        sums += one.to_vector()
    got = Statistics.from_vector(sums).metrics()
    expected = {
        "critic/loss": np.mean((target - value)**2), "critic/value_mean": value.mean(),
        "critic/explained_variance": oracles.explained_variance(value, target),
        "advantage/mean": advantage.mean(), "advantage/std": advantage.std()}
    assert got.keys() == expected.keys(), "no policy tokens were added, so no mask metrics either"
    for name, number in expected.items():
        np.testing.assert_allclose(got[name], number, rtol=1e-6, atol=1e-9, err_msg=name)


def test_oracle_statistics_without_tokens_or_variance():
    """Fails if a rank without tokens, a step with every token dropped or equal returns divide by zero."""
    assert Statistics().metrics() == {}
    log_ratio = np.full(5, -9.0, np.float32)
    weight, fate = oracles.gate(log_ratio, np.ones(5), 0.3, 5.0)
    got = reduced((log_ratio, weight, fate, np.zeros(5, int), np.zeros(5)), []).metrics()
    assert (got["mask/dropped"], got["mask/discarded_mass"], got["mask/effective_sample_size"]) == (1, 1, 0)
    equal = Statistics()
    equal.add(value_tokens=4, value=0.0, error=4.0, error_squared=4.0, advantage=0.0, advantage_squared=0.0,
              **{"return": 4.0, "return_squared": 4.0})
    assert np.isnan(oracles.explained_variance([0, 0, 0, 0], [1, 1, 1, 1]))
    assert equal.metrics()["critic/explained_variance"] == 0
