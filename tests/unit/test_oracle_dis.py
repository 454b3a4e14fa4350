"""DIS, recovering DIS and the policy-gradient objective against the NumPy oracles."""
import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.dis import Fate, dis, dis_recover, unmasked
from sao_megatron.algorithm.objective import NegativeLogLikelihood, PolicyGradient

quick = settings(max_examples=60, deadline=None)
BANDS = st.sampled_from([(0.3, 5.0), (0.8, 3.0), (0.05, 0.05), (0.5, 1.0)])


@st.composite
def gated_tokens(draw, max_tokens=30):
    """(log_ratio float32 [n], advantage float32 [n], eps_low, eps_high): inside, far outside, on the bounds, and ±inf:
    a token that one of the two policies cannot emit lies outside the band, where it must leave no NaN."""
    eps_low, eps_high = draw(BANDS)
    low, high = oracles.band(eps_low, eps_high)
    edges = [np.nextafter(bound, np.float32(side)) for bound in (low, high) for side in (-np.inf, np.inf)]
    special = st.sampled_from([float(x) for x in (low, high, *edges, 0.0, 700.0, -700.0, 88.8, -104.0, 3e38, -3e38,
                                               math.inf, -math.inf)])
    log_ratio = special | st.floats(-4, 4, width=32)
    advantage = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-8, 8, width=32)
    tokens = draw(st.lists(st.tuples(log_ratio, advantage), max_size=max_tokens))
    pairs = np.array(tokens, np.float32).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy(), eps_low, eps_high


@pytest.mark.parametrize("gate, recover", [(dis, False), (dis_recover, True)])
def test_property_gate_equals_oracle(gate, recover):
    """Fails if a token is dropped, kept or recovered against §1 or §8, or an extreme ratio yields NaN or inf."""
    @quick
    @given(gated_tokens())
    def check(case):
        log_ratio, advantage, eps_low, eps_high = case
        weights, fates = oracles.gate(*case, recover)
        gated = gate(torch.from_numpy(log_ratio), torch.from_numpy(advantage), eps_low, eps_high)
        np.testing.assert_array_equal(gated.fate.numpy(), fates)
        np.testing.assert_allclose(gated.weight.numpy(), weights, rtol=1e-6, atol=0)
        assert torch.isfinite(gated.weight).all() and torch.isfinite(gated.weight * torch.from_numpy(advantage)).all()
    check()


@pytest.mark.parametrize("eps_low, eps_high", [(0.3, 5.0), (0.8, 3.0)])
def test_oracle_bounds_are_strict(eps_low, eps_high):
    """Fails if a ratio exactly on a bound is kept, or its nearest float32 neighbour inside is dropped."""
    low, high = oracles.band(eps_low, eps_high)
    inside_low, inside_high = np.nextafter(low, np.float32(0)), np.nextafter(high, np.float32(0))
    gated = dis(torch.tensor([low, inside_low, inside_high, high]), torch.ones(4), eps_low, eps_high)
    assert gated.fate.tolist() == [Fate.DROPPED_LOW, Fate.KEPT, Fate.KEPT, Fate.DROPPED_HIGH]
    np.testing.assert_allclose(gated.weight, [0, 1 - eps_low, 1 + eps_high, 0], rtol=1e-6)


def test_oracle_fates_have_the_documented_numbers():
    """Fails if stored fates of token records change meaning."""
    assert (Fate.KEPT, Fate.DROPPED_LOW, Fate.DROPPED_HIGH, Fate.RECOVERED) == (
        oracles.KEPT, oracles.DROPPED_LOW, oracles.DROPPED_HIGH, oracles.RECOVERED)


@quick
@given(gated_tokens())
def test_property_dis_ignores_the_advantage(case):
    """Fails if plain DIS looks at the sign of the advantage, which only recovering DIS may do."""
    log_ratio, advantage, *eps = case
    one, other = (dis(torch.from_numpy(log_ratio), torch.from_numpy(a), *eps) for a in (advantage, -advantage))
    assert torch.equal(one.weight, other.weight) and torch.equal(one.fate, other.fate)


@quick
@given(gated_tokens())
def test_property_recovery_only_adds_to_dis(case):
    """Fails if recovering DIS changes a token inside the band, or keeps one whose update leads further out."""
    log_ratio, advantage, *eps = torch.from_numpy(case[0]), torch.from_numpy(case[1]), *case[2:]
    plain, recovering = dis(log_ratio, advantage, *eps), dis_recover(log_ratio, advantage, *eps)
    recovered = recovering.fate == Fate.RECOVERED
    assert torch.equal(plain.weight[~recovered], recovering.weight[~recovered])
    assert (plain.fate[recovered] != Fate.KEPT).all()
    assert (log_ratio[recovered].sign() == -advantage[recovered].sign()).all(), "a recovered update must reduce |log r|"


@quick
@given(gated_tokens())
def test_property_unmasked_weighs_every_token_one(case):
    """Fails if the uncorrected baseline drops or reweights a token, or no longer reports what DIS would drop."""
    log_ratio, advantage, *eps = case
    gated = unmasked(torch.from_numpy(log_ratio), torch.from_numpy(advantage), *eps)
    assert gated.weight.tolist() == [1.0] * len(log_ratio)
    np.testing.assert_array_equal(gated.fate, oracles.gate(*case)[1])


@pytest.mark.parametrize("gate", ["dis", "dis_recover"])
def test_property_objective_in_chunks_equals_oracle(gate):
    """Fails if chunking shifts tokens against their rollout log-probs, or gate or anchor give a wrong coefficient."""
    @quick
    @given(gated_tokens(), st.sampled_from([0.0, 0.1, 2.0]), st.integers(1, 7))
    def check(case, anchor, chunk):
        log_ratio, advantage, eps_low, eps_high = case
        log_ratio = np.clip(log_ratio, -700, 700)
        objective = PolicyGradient(torch.from_numpy(-log_ratio), torch.from_numpy(advantage), gate=gate,
                                   eps_low=eps_low, eps_high=eps_high, anchor=anchor)
        logprobs = torch.zeros(len(log_ratio))  # log r = 0 − (−log r), exact in float32
        parts = [objective.coefficients(logprobs[at:at + chunk], at) for at in range(0, len(log_ratio), chunk)]
        recover = gate == "dis_recover"
        expected = oracles.coefficients(log_ratio, advantage, eps_low, eps_high, recover, anchor)
        got = torch.cat(parts).numpy() if parts else np.zeros(0)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-5)
        weights, fates = oracles.gate(log_ratio, advantage, eps_low, eps_high, recover)
        report = objective.diagnostics()
        np.testing.assert_array_equal(report.log_ratio, log_ratio)
        np.testing.assert_array_equal(report.fate, fates)
        np.testing.assert_allclose(report.weight, weights, rtol=1e-6)
        near = np.abs(log_ratio) < 80  # beyond that exp leaves float32
        np.testing.assert_allclose(report.ratio.numpy()[near], np.exp(log_ratio[near].astype(float)), rtol=1e-6)
    check()


def test_oracle_anchor_pulls_towards_the_rollout_policy():
    """Fails if the anchor pushes away from the sampling policy or skips tokens that the gate drops."""
    log_ratio = torch.tensor([2.5, -2.5])  # both outside the band, so nothing but the anchor acts
    objective = PolicyGradient(-log_ratio, torch.ones(2), anchor=0.1)
    np.testing.assert_allclose(objective.coefficients(torch.zeros(2), 0), [-0.25, 0.25], rtol=1e-6)


def test_oracle_negative_log_likelihood_weighs_every_token_one():
    """Fails if the supervised warm-up optimises anything but −Σ log π."""
    assert NegativeLogLikelihood().coefficients(torch.tensor([-1.0, -50.0, 0.0]), 5).tolist() == [1.0, 1.0, 1.0]


def test_oracle_stop_gradient_sign():
    """Fails if the oracle's own loss gradient is not the derivative of its loss with the coefficients held fixed."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 7)), rng.integers(0, 7, 5)
    logprobs = oracles.log_softmax(logits)[range(5), targets]
    log_ratio = np.array([0.2, -0.3, 3.0, -3.0, 0.0])
    c = oracles.coefficients(log_ratio, rng.normal(size=5), 0.3, 5.0, anchor=0.1)
    step, numeric = 1e-6, np.zeros_like(logits)
    for at in np.ndindex(logits.shape):
        there, back = logits.copy(), logits.copy()
        there[at] += step
        back[at] -= step
        numeric[at] = (oracles.policy_loss(there, targets, c) - oracles.policy_loss(back, targets, c)) / (2 * step)
    np.testing.assert_allclose(oracles.policy_loss_gradient(logits, targets, c), numeric, atol=1e-8)
    assert math.isclose(oracles.policy_loss(logits, targets, c), -(c * logprobs).sum() / 5)
