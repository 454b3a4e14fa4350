"""The one-pass head (log-prob, gate and gradients in chunks, float32) against float64 log_softmax and autograd."""
from dataclasses import dataclass

import numpy as np
import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.objective import NegativeLogLikelihood, PolicyGradient
from sao_megatron.learner.logprob import one_pass_head

UNTIMED = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
EPS_LOW, EPS_HIGH = 0.3, 5.0
INSIDE, OUTSIDE = [-0.3, -0.1, 0.0, 0.4, 1.6], [-700.0, -3.0, -0.5, 1.9, 2.5, 700.0]  # log-ratios, off the bounds


class OneRank:
    """Stand-in for a process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def problem(seed: int, n: int, vocab: int, width: int, temperature: float, log_ratios: list[float]):
    """float32 hidden, weight, targets, advantages, rollout log-probs such that log r is one of `log_ratios`."""
    rng = np.random.default_rng(seed)
    hidden = torch.from_numpy(rng.normal(size=(n, width)).astype(np.float32))
    weight = torch.from_numpy(rng.normal(size=(vocab, width)).astype(np.float32) / width**0.5)
    targets = torch.from_numpy(rng.integers(0, vocab, n))
    advantages = torch.from_numpy(rng.normal(size=n).astype(np.float32))
    exact = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)[torch.arange(n), targets]
    rollout = (exact - torch.from_numpy(rng.choice(log_ratios, n))).float()
    return hidden, weight, targets, advantages, rollout


@dataclass(frozen=True)
class Reference:
    """The same in float64, by autograd."""

    loss: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradients: list[torch.Tensor]
    """Of hidden and weight."""
    coefficients: torch.Tensor
    largest_logit: float


def reference(hidden, weight, targets, coefficients_of, temperature=1.0, entropy_coef=0.0) -> Reference:
    """Loss −Σ sg[c]·log π − β·Σ H."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T / temperature
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs[torch.arange(len(targets)), targets]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    coefficients = torch.from_numpy(coefficients_of(chosen.detach().numpy()))
    loss = -(coefficients * chosen).sum() - entropy_coef * entropy.sum()
    loss.backward()
    return Reference(loss.detach(), chosen.detach(), entropy.detach(), [hidden.grad, weight.grad], coefficients,
                     logits.abs().max().item() if len(targets) else 0.0)


def one_pass(hidden, weight, targets, objective, temperature, chunk):
    """(HeadOutput, [d hidden, d weight]) in float32, in chunks of `chunk` tokens."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    output = one_pass_head(hidden, weight, targets, objective, OneRank(), temperature,
                           logits_bytes=chunk * len(weight) * 4)
    output.loss.backward()
    return output, [hidden.grad, weight.grad]


def assert_same_gradients(got: list[torch.Tensor], expected: list[torch.Tensor]):
    """To 1e-5 of each gradient's largest entry."""
    for mine, theirs in zip(got, expected, strict=True):
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * scale)


def assert_equal(output, gradients, expected: Reference, factors: tuple[torch.Tensor, torch.Tensor], entropy_coef=0.0):
    """Values to 1e-6, gradients to 1e-5, of the largest term that enters them: what float32 can hold.

    A sum that cancels (1 − π of a token that is almost certain, advantages of both signs) has no more digits than its
    terms. `factors` are what d loss/d logits is multiplied with: weight for d hidden, hidden for d weight.
    """
    unit = 1e-6 * max(1.0, expected.largest_logit)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=unit)
    np.testing.assert_allclose(output.entropy, expected.entropy, rtol=0, atol=2 * unit)
    sizes = expected.coefficients.abs() * (1 + expected.logprobs.abs()) + entropy_coef * (1 + expected.entropy)
    np.testing.assert_allclose(output.loss.item(), expected.loss.item(), rtol=0, atol=2 * unit * sizes.sum().item())
    for mine, theirs, factor in zip(gradients, expected.gradients, factors, strict=True):
        scale = sizes.max().item() * factor.abs().max().item() if len(sizes) else 0.0
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("gate", ["dis", "dis_recover"])
@pytest.mark.parametrize("log_ratios", [INSIDE, INSIDE + OUTSIDE, OUTSIDE], ids=["kept", "mixed", "dropped"])
def test_property_one_pass_head_equals_oracle(gate, log_ratios):
    """Fails if the fused head's log-probs, loss or gradients are not those of the DIS loss at any chunk size."""
    @settings(max_examples=25, **UNTIMED)
    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 23), vocab=st.integers(2, 60), width=st.integers(1, 12),
           chunk=st.integers(1, 9), temperature=st.sampled_from([1.0, 0.7, 1.3]), anchor=st.sampled_from([0.0, 0.1]),
           entropy_coef=st.sampled_from([0.0, 0.01]))
    def check(seed, n, vocab, width, chunk, temperature, anchor, entropy_coef):
        hidden, weight, targets, advantages, rollout = problem(seed, n, vocab, width, temperature, log_ratios)
        objective = PolicyGradient(rollout, advantages, gate, EPS_LOW, EPS_HIGH, anchor, entropy_coef)

        def coefficients(logprobs):
            return oracles.coefficients(logprobs - rollout.double().numpy(), advantages.double().numpy(),
                                        EPS_LOW, EPS_HIGH, gate == "dis_recover", anchor)
        expected = reference(hidden, weight, targets, coefficients, temperature, entropy_coef)
        output, gradients = one_pass(hidden, weight, targets, objective, temperature, chunk)
        assert_equal(output, gradients, expected, (weight, hidden), entropy_coef)
    check()


@settings(max_examples=20, **UNTIMED)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 20), chunk=st.integers(1, 9))
def test_property_supervised_head_equals_oracle(seed, n, chunk):
    """Fails if the warm-up's gradient is not that of −Σ log π."""
    hidden, weight, targets, *_ = problem(seed, n, 17, 6, 1.0, [0.0])
    expected = reference(hidden, weight, targets, np.ones_like)
    output, gradients = one_pass(hidden, weight, targets, NegativeLogLikelihood(), 1.0, chunk)
    assert_equal(output, gradients, expected, (weight, hidden))


def test_oracle_all_dropped_gives_exactly_no_gradient():
    """Fails if dropped tokens move the weights (PPO's fault that DIS avoids) or extreme ratios make a NaN."""
    hidden, weight, targets, advantages, rollout = problem(1, 12, 30, 8, 1.0, [-700.0, 700.0])
    output, (hidden_grad, weight_grad) = one_pass(hidden, weight, targets, PolicyGradient(rollout, advantages), 1.0, 5)
    assert output.loss.item() == 0
    assert not hidden_grad.any() and not weight_grad.any()


def test_oracle_empty_rank_has_a_zero_loss_with_gradients():
    """Fails if a rank whose micro-batch is only padding has no gradient to reduce, or divides by its zero tokens."""
    hidden, weight, targets, advantages, rollout = problem(2, 0, 30, 8, 1.0, [0.0])
    output, (hidden_grad, weight_grad) = one_pass(hidden, weight, targets, PolicyGradient(rollout, advantages), 1.0, 5)
    assert output.loss.item() == 0 and output.logprobs.shape == (0,)
    assert hidden_grad.shape == (0, 8) and weight_grad.shape == (30, 8) and not weight_grad.any()


def test_oracle_loss_divided_by_all_actions_is_the_documents_loss():
    """Fails if loss/N is not L(θ) of §1 with N counting dropped tokens, or its gradient not the oracle's by hand."""
    hidden, weight, targets, advantages, rollout = problem(3, 14, 21, 5, 1.0, INSIDE + OUTSIDE)
    logits = (hidden.double() @ weight.double().T).numpy()
    logprobs = oracles.log_softmax(logits)[range(14), targets]
    c = oracles.coefficients(logprobs - rollout.double().numpy(), advantages.double().numpy(), EPS_LOW, EPS_HIGH)
    output, gradients = one_pass(hidden, weight, targets, PolicyGradient(rollout, advantages), 1.0, 4)
    np.testing.assert_allclose(output.loss.item() / 14, oracles.policy_loss(logits, targets.numpy(), c), rtol=1e-5)
    by_logits = torch.from_numpy(oracles.policy_loss_gradient(logits, targets.numpy(), c))
    for mine, theirs in zip(gradients, (by_logits @ weight.double(), by_logits.T @ hidden.double()), strict=True):
        np.testing.assert_allclose(mine / 14, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def weight_with_main_grad(values: torch.Tensor) -> torch.nn.Parameter:
    """A weight as Megatron's DDP makes it: a float32 gradient beside it, and a hook that leaves no other."""
    weight = torch.nn.Parameter(values.clone())
    weight.main_grad = torch.zeros(values.shape)
    weight.grad_added_to_main_grad = False

    def drop(weight):
        assert weight.grad_added_to_main_grad
        weight.grad = None
    weight.register_post_accumulate_grad_hook(drop)
    return weight


def into_main_grad(hidden, weight, targets, objective, chunk: int):
    return one_pass_head(hidden, weight, targets, objective, OneRank(), into_main_grad=True,
                         logits_bytes=chunk * len(weight) * 4).loss


def test_main_grad_sums_micro_batches_whatever_the_order_of_their_backwards():
    """Fails if a pipeline with several micro-batches in flight loses or doubles a head gradient."""
    hidden, values, targets, advantages, rollout = problem(4, 30, 40, 8, 1.0, INSIDE + OUTSIDE)
    weight, halves = weight_with_main_grad(values), [slice(0, 11), slice(11, 30)]
    hiddens = [hidden[rows].clone().requires_grad_() for rows in halves]
    losses = [into_main_grad(mine, weight, targets[rows], PolicyGradient(rollout[rows], advantages[rows]), 4)
              for mine, rows in zip(hiddens, halves, strict=True)]
    for loss in reversed(losses):
        loss.backward()
    _, expected = one_pass(hidden, values, targets, PolicyGradient(rollout, advantages), 1.0, 30)
    assert weight.grad_added_to_main_grad and torch.equal(weight, values)
    assert_same_gradients([torch.cat([mine.grad for mine in hiddens]), weight.main_grad], expected)


def test_no_gradient_goes_into_main_grad_without_a_backward():
    """Fails if scoring (a pass without gradient) changes the next update, or costs three products instead of one."""
    hidden, values, targets, *_ = problem(5, 12, 30, 8, 1.0, [0.0])
    weight = weight_with_main_grad(values)
    with torch.no_grad():
        loss = into_main_grad(hidden, weight, targets, NegativeLogLikelihood(), 5)
    assert not loss.requires_grad and not weight.main_grad.any()


def test_a_loss_scaled_after_the_forward_is_refused():
    """Fails if loss scaling would scale every gradient but the head's, silently."""
    hidden, values, targets, *_ = problem(6, 12, 30, 8, 1.0, [0.0])
    loss = into_main_grad(hidden.requires_grad_(), weight_with_main_grad(values), targets, NegativeLogLikelihood(), 5)
    with pytest.raises(RuntimeError, match="the loss was scaled"):
        (2 * loss).backward()


def test_a_frozen_weight_gets_no_gradient():
    """Fails if the head computes or adds the gradient of a weight that is not trained."""
    hidden, weight, targets, *_ = problem(7, 12, 30, 8, 1.0, [0.0])
    hidden.requires_grad_()
    one_pass_head(hidden, weight, targets, NegativeLogLikelihood(), OneRank()).loss.backward()
    assert hidden.grad.any() and weight.grad is None


def test_bfloat16_weights_accumulate_in_float32():
    """Fails if the head's gradient is summed over chunks in bfloat16, which loses most of a long batch."""
    hidden, values, targets, *_ = problem(8, 512, 50, 16, 1.0, [0.0])
    hidden, values = hidden.bfloat16(), values.bfloat16()
    expected = reference(hidden, values, targets, np.ones_like).gradients
    hidden, weight = hidden.requires_grad_(), weight_with_main_grad(values)
    into_main_grad(hidden, weight, targets, NegativeLogLikelihood(), 2).backward()
    errors = [float((mine.double() - theirs).norm() / theirs.norm())
              for mine, theirs in zip([hidden.grad, weight.main_grad], expected, strict=True)]
    assert max(errors) < 4e-3, errors
