"""Mask statistics summed over micro-batches and ranks against brute force over all tokens at once (ALGORITHM.md §7)."""
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.dis import Fate
from sao_megatron.telemetry.buckets import DECILES
from sao_megatron.telemetry.statistics import ADVANTAGE_EDGES, LOG_RATIO_EDGES, Statistics, Tokens

quick = settings(max_examples=60, deadline=None)
BUCKETS = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 10**9)]  # lags, first and last of each


TASKS = ("chess", "maths")


def tokens(seed: int, n: int, recover: bool) -> Tokens:
    """n action tokens: E[r] = 1, half of them outside the band, positions on and off the edges of the tenths."""
    rng = np.random.default_rng(seed)
    log_ratio = rng.normal(-0.5, 1.0, n).astype(np.float32)
    advantage = (rng.normal(size=n) * rng.integers(0, 2, n)).astype(np.float32)
    weight, fate = oracles.gate(log_ratio, advantage, 0.3, 5.0, recover)
    length = rng.choice([1, 5, 7, 10, 40, 5000], n)
    return Tokens(
        log_ratio=log_ratio, rollout_logprob=-rng.exponential(1.0, n).astype(np.float32),
        weight=weight.astype(np.float32), fate=fate, advantage=advantage,
        entropy=(rng.random(n) * rng.integers(0, 2, n)).astype(np.float32), lag=rng.integers(0, 30, n),
        turn=rng.integers(0, 90, n), position=rng.integers(0, length), length=length, task=rng.integers(0, 2, n),
        expert_load=rng.gamma(20, 0.05, n).astype(np.float32))


def pieces(tokens: Tokens, cuts: list[int]) -> list[Tokens]:
    columns = {name: np.split(column, sorted(cuts)) for name, column in vars(tokens).items()}
    return [Tokens(**dict(zip(columns, piece, strict=True))) for piece in zip(*columns.values(), strict=True)]


def reduced(tokens: Tokens, cuts: list[int]) -> Statistics:
    """The tokens cut into micro-batches, one rank each, reduced as the learner does: a sum of vectors."""
    vectors = [Statistics(TASKS).to_vector()]
    for piece in pieces(tokens, cuts):
        one = Statistics(TASKS)
        one.add_tokens(piece)
        vectors.append(one.to_vector())
    return Statistics(TASKS).load_vector(np.sum(vectors, axis=0))


@quick
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4),
       recover=st.booleans())
def test_property_statistics_equal_brute_force(seed, n, cuts, recover):
    """Fails if a reported share or mean depends on the layout, or is not what its name says."""
    all_tokens = tokens(seed, n, recover)
    log_ratio, weight, fate, lag = (getattr(all_tokens, name) for name in ("log_ratio", "weight", "fate", "lag"))
    got = reduced(all_tokens, [min(cut, n) for cut in cuts]).metrics()
    dropped = (fate == Fate.DROPPED_LOW) | (fate == Fate.DROPPED_HIGH)
    fresh = np.abs(log_ratio[lag == 0], dtype=float)
    if len(fresh):
        np.testing.assert_allclose(got["mismatch/mean"], fresh.mean(), rtol=1e-6)
        assert got["mismatch/tokens"] == len(fresh)
        x, d = (column[lag == 0].astype(float) for column in (all_tokens.rollout_logprob, log_ratio))
        if len(fresh) > 2:
            np.testing.assert_allclose(got["mismatch/slope"], np.polyfit(x, d, 1)[0], rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(got["mismatch/correlation"], np.corrcoef(x, x + d)[0, 1], rtol=1e-4, atol=1e-6)
        for name, exact in ("mismatch/p99", np.sort(fresh)[int(np.ceil(0.99 * len(fresh))) - 1]), ("mismatch/max",
                                                                                                  fresh.max()):
            assert exact <= got[name] <= exact * 10 ** (1 / 20) * 1.001, "the upper edge of its bin"
    expected = {
        "mask/dropped_by_trajectory": np.average(dropped, weights=1 / all_tokens.length),
        "mask/dropped_low_by_trajectory": np.average(fate == Fate.DROPPED_LOW, weights=1 / all_tokens.length),
        "mask/dropped_high_by_trajectory": np.average(fate == Fate.DROPPED_HIGH, weights=1 / all_tokens.length),
        "mask/kept": np.mean(fate == Fate.KEPT),
        "mask/dropped_low": np.mean(fate == Fate.DROPPED_LOW), "mask/dropped_high": np.mean(fate == Fate.DROPPED_HIGH),
        "mask/recovered": np.mean(fate == Fate.RECOVERED),
        "mask/dropped": np.mean(dropped),
        "mask/effective_sample_size": oracles.effective_sample_size(weight),
        "ratio/log_mean": np.mean(log_ratio, dtype=float),
        "ratio/log_abs_mean": np.mean(np.abs(log_ratio), dtype=float),
        "lag/mean": np.mean(lag), "policy/entropy": np.mean(all_tokens.entropy, dtype=float)}
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("recover", [False, True], ids=["dis", "dis_recover"])
def test_oracle_discarded_mass(recover):
    """Fails if the bias of masking, m = 1 − E[r·1{kept}], is computed from anything but the kept tokens' ratios."""
    all_tokens = tokens(1, 400, recover)
    got = reduced(all_tokens, [100]).metrics()["mask/discarded_mass"]
    np.testing.assert_allclose(got, oracles.discarded_mass(all_tokens.log_ratio, all_tokens.fate), rtol=1e-5)


def in_bucket(name: str, bucket: str, tokens: Tokens) -> np.ndarray:
    """By eye: which tokens belong into `bucket` of the breakdown `name`."""
    if name == "task":
        return tokens.task == TASKS.index(bucket)
    if name == "advantage":
        return np.sign(tokens.advantage) == {"negative": -1, "zero": 0, "positive": 1}[bucket]
    if name == "position":
        tenth = int(bucket.partition("-")[0]) // 10
        return (10 * tokens.position) // tokens.length == tenth
    values = getattr(tokens, name)
    first, _, last = bucket.rstrip("+").partition("-")
    return (values >= int(first)) & (values <= (1 << 40 if bucket.endswith("+") else int(last or first)))


@pytest.mark.parametrize("name", ["lag", "turn", "position", "length", "advantage", "task"])
def test_property_breakdowns_equal_brute_force(name):
    """Fails if a token is counted in the wrong bucket, or a bucket's share, ESS or mass is not that of its tokens."""
    @quick
    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), at=st.integers(0, 60))
    def check(seed, n, at):
        all_tokens = tokens(seed, n, True)
        got = reduced(all_tokens, [min(at, n)]).metrics()
        found = {key.partition(" ")[2] for key in got if key.startswith(f"by_{name}/")}
        covered = np.zeros(n, int)
        for bucket in found:
            where = in_bucket(name, bucket, all_tokens)
            covered += where
            fate, weight = all_tokens.fate[where], all_tokens.weight[where]
            expected = {
                "tokens": where.mean(), "dropped_low": np.mean(fate == Fate.DROPPED_LOW),
                "dropped_high": np.mean(fate == Fate.DROPPED_HIGH), "recovered": np.mean(fate == Fate.RECOVERED),
                "dropped": np.mean((fate == Fate.DROPPED_LOW) | (fate == Fate.DROPPED_HIGH)),
                "effective_sample_size": oracles.effective_sample_size(weight) if weight.any() else 0.0,
                "discarded_mass": oracles.discarded_mass(all_tokens.log_ratio[where], fate)}
            for key, value in expected.items():
                np.testing.assert_allclose(got[f"by_{name}/{key} {bucket}"], value, rtol=1e-5, atol=1e-9)
        assert (covered == 1).all(), "every token is in one bucket"
    check()


@pytest.mark.parametrize("name", DECILES)
def test_deciles_hold_a_tenth_of_the_tokens_each(name):
    """Fails if "the tokens about which the policy is most uncertain", or with the busiest experts, are not that."""
    rng = np.random.default_rng(0)
    n = 5000
    values = np.sort({"entropy": rng.exponential(0.3, n), "expert_load": rng.gamma(20, 0.05, n)}[name])
    columns = vars(tokens(0, n, False)) | {name: values.astype(np.float32), "fate": (np.arange(n) >= 4500).astype(int)}
    got = reduced(Tokens(**columns), [1234]).metrics()
    for decile in range(10):
        assert abs(got[f"by_{name}/tokens {10 * decile}-{10 * (decile + 1)}%"] - 0.1) < 0.06
    assert got[f"by_{name}/dropped_low 90-100%"] > 0.8 and got[f"by_{name}/dropped_low 0-10%"] == 0


def test_a_model_without_experts_has_no_expert_load():
    """Fails if a dense model's step ends in an error, or invents deciles."""
    columns = vars(tokens(0, 50, False)) | dict(expert_load=None)
    one = Statistics(TASKS)
    one.add_tokens(Tokens(**columns))
    assert "by_entropy/tokens 90-100%" in one.metrics() and not [n for n in one.metrics() if "expert_load" in n]


@quick
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), cut=st.integers(0, 60))
def test_property_histograms_equal_brute_force(seed, n, cut):
    """Fails if a token falls into the wrong lag bucket or log-ratio bin, or into none."""
    all_tokens = tokens(seed, n, True)
    log_ratio, fate, lag = all_tokens.log_ratio, all_tokens.fate, all_tokens.lag
    log_ratio[:2] = [700, -700][:n]
    got = reduced(all_tokens, [min(cut, n)])
    counts = [[sum(1 for a, f in zip(lag, fate, strict=True) if first <= a <= last and f == kind) for kind in Fate]
              for first, last in BUCKETS]
    assert got.fates.tolist() == counts
    bins = [sum(1 for x in log_ratio if low <= x < high)
            for low, high in zip(LOG_RATIO_EDGES[:-1], LOG_RATIO_EDGES[1:], strict=True)]
    assert got.log_ratio.tolist() == bins and sum(bins) == n
    assert got.joint.sum() == n
    for row, (low, high) in zip(got.joint, zip(ADVANTAGE_EDGES[:-1], ADVANTAGE_EDGES[1:], strict=True), strict=True):
        assert row.sum() == sum(low <= a < high for a in all_tokens.advantage)


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
    got = Statistics().load_vector(sums).metrics()
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
    zero = np.zeros(5, int)
    all_tokens = Tokens(log_ratio, np.zeros(5), weight, fate, np.zeros(5), np.ones(5), zero, zero, zero, zero + 1, zero,
                        np.ones(5))
    got = reduced(all_tokens, []).metrics()
    assert (got["mask/dropped"], got["mask/discarded_mass"], got["mask/effective_sample_size"]) == (1, 1, 0)
    equal = Statistics()
    equal.add(value_tokens=4, value=0.0, error=4.0, error_squared=4.0, advantage=0.0, advantage_squared=0.0,
              **{"return": 4.0, "return_squared": 4.0})
    assert np.isnan(oracles.explained_variance([0, 0, 0, 0], [1, 1, 1, 1]))
    assert equal.metrics()["critic/explained_variance"] == 0
