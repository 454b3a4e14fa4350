"""The gates of ALGORITHM.md §5 against plain float64: derivatives of whole losses, and every token at the bounds."""
import numpy as np
import oracles_gates as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.gates import GATES, Tokens
from sao_megatron.algorithm.objective import PolicyGradient

quick = settings(max_examples=60, deadline=None)
LOSSES = {"ppo_clip": plain.token_ppo_loss, "decoupled_ppo": plain.token_ppo_loss, "icepop": plain.token_ppo_loss,
          "tis": plain.token_ppo_loss, "gspo": plain.gspo_loss, "dpo": plain.dpo_loss}


def tokens_of(logprobs, behaviour, rollout, advantages, lengths=None) -> Tokens:
    arrays = (torch.tensor(np.asarray(x, np.float32)) for x in (logprobs, behaviour, rollout, advantages))
    return Tokens(*arrays, None if lengths is None else torch.tensor(lengths))


def weigh(gate: str, tokens: Tokens, **changes):
    constants = dict(eps_low=None, eps_high=None) | GATES[gate].constants | changes
    return GATES[gate].weigh(tokens, **constants)


def log_ratios(*bounds: float):
    """Ordinary ones, extreme ones, 0, and each bound with its two float32 neighbours."""
    logs = [np.float32(plain.f32log(bound)) for bound in bounds if bound > 0]
    near = [float(np.nextafter(x, np.float32(side))) for x in logs for side in (-np.inf, np.inf)]
    return st.sampled_from([*map(float, logs), *near, 0.0, 700.0, -700.0, 25.0]) | st.floats(-4, 4, width=32)


ADVANTAGES = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-8, 8, width=32)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("gate", LOSSES)
def test_oracle_coefficients_are_the_derivative_of_the_loss(gate, dual_clip):
    """Fails if a preset's gradient is not that of the loss which its authors wrote down, mean and signs included."""
    rng = np.random.default_rng(5)
    lengths, constants = np.array([3, 1, 4, 2, 5, 2]), GATES[gate].constants
    if "dual_clip" in constants:
        constants = constants | dict(dual_clip=dual_clip)
    n, wide = lengths.sum(), 2e-3 if gate == "gspo" else 1.0
    logprobs, rollout = -rng.random(n) * 3, -rng.random(n) * 3
    behaviour = logprobs - wide * rng.normal(size=n)  # inside and outside of every band
    per_trajectory = np.array([1.0, -1.0, -1.0, 1.0, 0.0, 0.0]) if gate == "dpo" else rng.normal(size=6)
    advantages = np.repeat(per_trajectory, lengths)
    gradient = plain.derivative(lambda x: LOSSES[gate](gate, x, behaviour, rollout, advantages, lengths, constants),
                                logprobs)
    scale = {"token": np.ones(n), "trajectory": np.repeat(n / (6 * lengths), lengths),
             "pair": np.full(n, n / 3)}[GATES[gate].mean_over]
    as_tensor = {name: torch.tensor(array).float() for name, array in dict(
        rollout_logprobs=rollout, advantages=advantages, behaviour_logprobs=behaviour, scale=scale).items()}
    further = {name: value for name, value in constants.items() if name not in ("eps_low", "eps_high")}
    objective = PolicyGradient(**as_tensor, gate=gate, eps_low=constants.get("eps_low"),
                               eps_high=constants.get("eps_high"), constants=further, lengths=torch.tensor(lengths))
    got = objective.coefficients(torch.tensor(logprobs).float(), 0).numpy() / n  # the head divides by N
    np.testing.assert_allclose(got, -gradient, rtol=1e-3, atol=1e-5)
    assert np.any(got != 0)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("gate", ["ppo_clip", "decoupled_ppo", "icepop", "tis"])
def test_property_ppo_gates_equal_oracle(gate, dual_clip):
    """Fails if a PPO gate clips a token that the minimum leaves unclipped, or an extreme ratio makes NaN or inf."""
    constants = GATES[gate].constants | dict(dual_clip=dual_clip)
    token = {"ppo_clip": lambda x, _, a: plain.ppo_token(x, a, **constants),
             "icepop": lambda x, m, a: plain.icepop_token(x, m, a, **constants)}.get(
                 gate, lambda x, m, a: plain.truncated_token(x, m, a, **constants))

    @quick
    @given(st.lists(st.tuples(log_ratios(0.8, 1.2, 3.0), log_ratios(0.5, 2.0, 5.0), ADVANTAGES), min_size=1))
    def check(cases):
        log_ratio, mismatch, advantage = np.array(cases, np.float32).T
        tokens = tokens_of(log_ratio, np.zeros(len(cases)), -mismatch, advantage)
        got = weigh(gate, tokens, dual_clip=dual_clip)
        weights, fates = zip(*(token(*map(float, case)) for case in zip(log_ratio, mismatch, advantage, strict=True)),
                             strict=True)
        assert got.fate.tolist() == list(fates)
        np.testing.assert_allclose(got.weight, weights, rtol=1e-5, atol=1e-35)
        assert torch.isfinite(got.weight * tokens.advantage).all()
    check()


@quick
@given(st.lists(log_ratios(0.5, 5.0), min_size=1, max_size=9), st.sampled_from([(1.0, 4.0), (0.5, 4.0)]))
def test_property_cispo_equals_oracle(cases, band):
    """Fails if CISPO drops a token, or weighs one beyond its bounds."""
    log_ratio = np.array(cases, np.float32)
    tokens = tokens_of(log_ratio, 0 * log_ratio, 0 * log_ratio, log_ratio)
    got = weigh("cispo", tokens, eps_low=band[0], eps_high=band[1])
    weights, fates = zip(*(plain.cispo_token(float(x), *band) for x in log_ratio), strict=True)
    assert got.fate.tolist() == list(fates)
    np.testing.assert_allclose(got.weight, weights, rtol=1e-5, atol=1e-35)


@quick
@given(st.lists(st.tuples(*[st.sampled_from([0.0, -1e-3, -700.0]) | st.floats(-6, 0, width=32)] * 2), min_size=1,
                max_size=9))
def test_property_ipo_equals_oracle(cases):
    """Fails if IPO masks on ratios instead of probabilities, or looks at the advantage."""
    logprobs, rollout = np.array(cases, np.float32).T
    tokens = tokens_of(logprobs, rollout, rollout, np.ones(len(cases)))
    got = weigh("ipo", tokens)
    for t, (weight, fate) in enumerate(plain.ipo_token(p, r, 0.2, 0.2) for p, r in cases):
        difference = abs(abs(np.exp(float(logprobs[t])) - np.exp(float(rollout[t]))) - 0.2)
        if difference > 1e-6:  # float32 exponentials of two libraries differ in the last bit
            assert got.fate[t] == fate
            np.testing.assert_allclose(got.weight[t], weight, rtol=1e-5, atol=1e-35)


def test_oracle_ipo_bound_is_kept():
    """Fails if a token exactly at the bound is masked: prime-rl masks what is above it."""
    probabilities = np.array([0.75, 0.25], np.float32)
    got = weigh("ipo", tokens_of(np.log(probabilities), np.log(probabilities[::-1]), np.log(probabilities[::-1]),
                                 [1, 1]), eps_low=0.5 + 1e-6, eps_high=0.5 + 1e-6)
    assert got.fate.tolist() == [0, 0]
    got = weigh("ipo", tokens_of(np.log(probabilities), np.log(probabilities[::-1]), np.log(probabilities[::-1]),
                                 [1, 1]), eps_low=0.5 - 1e-6, eps_high=0.5 - 1e-6)
    assert got.fate.tolist() == [2, 1]


@st.composite
def trajectories(draw, pairs: bool = False):
    """(lengths, logprobs, behaviour float32 [n], one advantage of −1, 0, 1 per trajectory), some extreme."""
    count = 2 * draw(st.integers(1, 3)) if pairs else draw(st.integers(1, 5))
    lengths = [draw(st.integers(1, 5)) for _ in range(count)]
    value = st.sampled_from([0.0, -700.0]) | st.floats(-3, 0, width=32)
    logprobs, behaviour = (np.array([draw(value) for _ in range(sum(lengths))], np.float32) for _ in range(2))
    if draw(st.booleans()):
        behaviour = logprobs + np.float32(1e-2) * behaviour  # near: some trajectories pass a trust test
    return lengths, logprobs, behaviour, [draw(st.sampled_from([-1.0, 0.0, 1.0])) for _ in range(count)]


@quick
@given(trajectories())
def test_property_flash_reinforce_equals_oracle(case):
    """Fails if the trust test mixes trajectories, takes the KL the wrong way round, or admits part of one."""
    lengths, logprobs, rollout, advantages = case
    got = weigh("flash_reinforce", tokens_of(logprobs, rollout, rollout, np.repeat(advantages, lengths), lengths))
    cuts = np.cumsum(lengths)[:-1]
    for weight, p, mu in zip(*(np.split(x, cuts) for x in (got.weight.numpy(), logprobs, rollout)), strict=True):
        divergence = plain.binary_kl(mu, p)
        if abs(divergence - 3e-3) < 1e-7:
            continue
        expected = np.exp(np.minimum((p - mu).astype(float), 20.0)) * (divergence <= 3e-3)
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-35)


@quick
@given(trajectories())
def test_property_gspo_equals_oracle(case):
    """Fails if a trajectory's ratio is not the geometric mean of its own tokens', or part of one is clipped."""
    lengths, logprobs, behaviour, advantages = case
    got = weigh("gspo", tokens_of(logprobs, behaviour, behaviour, np.repeat(advantages, lengths), lengths))
    cuts = np.cumsum(lengths)[:-1]
    expected = [plain.ppo_token(float(np.float32(x.astype(float).mean())), a, 3e-4, 4e-4)
                for x, a in zip(np.split(logprobs - behaviour, cuts), advantages, strict=True)]
    np.testing.assert_allclose(got.weight, np.repeat([w for w, _ in expected], lengths), rtol=1e-5, atol=1e-35)
    assert got.fate.tolist() == np.repeat([f for _, f in expected], lengths).tolist()


@quick
@given(trajectories(pairs=True))
def test_property_dpo_weights_are_finite_and_shared_by_the_pair(case):
    """Fails if extreme log-ratios overflow, or a pair's two members are weighed unlike each other."""
    lengths, logprobs, reference, signs = case
    signs = np.array(signs).reshape(-1, 2)
    signs[:, 1] = -signs[:, 0]
    got = weigh("dpo", tokens_of(logprobs, reference, reference, np.repeat(signs.ravel(), lengths), lengths))
    for pair in np.split(got.weight.numpy(), np.cumsum(np.reshape(lengths, (-1, 2)).sum(1))[:-1]):
        assert np.isfinite(pair).all() and np.ptp(pair) == 0 and 0 <= pair[0] <= 0.1
