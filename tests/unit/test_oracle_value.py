"""Losses of the value model against float64 NumPy: values, losses, and gradients by finite differences."""
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.value import HLGauss, SquaredError

quick = settings(max_examples=60, deadline=None)
numbers = st.floats(-2, 2, width=32)
heads = st.builds(HLGauss, width=st.integers(2, 60), low=st.just(-1.5), high=st.sampled_from([0.5, 1.5]),
                  sigma_ratio=st.sampled_from([0.3, 0.75, 2.0]))


def near(got, want):
    assert got.numpy() == pytest.approx(np.array(want), rel=2e-5, abs=2e-6)


@quick
@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=8), st.sampled_from([None, 0.05, 0.5]))
def test_property_squared_error(rows, clip):
    """Fails if the critic regresses to something else than the returns, or clipping lets values run away."""
    values, targets, first = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3).unbind(1)
    head = SquaredError(clip)
    near(head.values(values[:, None]), values)
    near(head.losses(values[:, None], targets, first), [oracles.clipped_squared_error(*row, clip) for row in rows])


def test_clipping_stops_the_gradient():
    """Fails if a value that has moved by more than the clip towards its target is still pushed on."""
    outputs = torch.tensor([[0.5], [0.1], [-0.5]], requires_grad=True)
    SquaredError(clip=0.2).losses(outputs, torch.ones(3), torch.zeros(3)).sum().backward()
    assert outputs.grad[:, 0].tolist() == pytest.approx([0.0, -1.8, -3.0])  # at the clip, inside, moved away


@quick
@given(heads, st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_property_hl_gauss(head, seed, n):
    """Fails if the histogram, the value read from it or the loss is not HL-Gauss's."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, head.width)).astype(np.float32)
    targets = rng.uniform(head.low, head.high, n).astype(np.float32)
    args = head.low, head.high
    near(head.histogram(torch.from_numpy(targets)).flatten(),
         np.array([oracles.hl_gauss_target(float(t), head.width, *args, head.sigma_ratio) for t in targets]).flatten())
    near(head.values(torch.from_numpy(logits)), [oracles.hl_gauss_value(row, *args) for row in logits])
    wanted = [oracles.hl_gauss_loss(row, float(t), *args, head.sigma_ratio)
              for row, t in zip(logits, targets, strict=True)]
    near(head.losses(torch.from_numpy(logits), torch.from_numpy(targets), torch.zeros(n)), wanted)


@quick
@given(heads, st.integers(0, 2**32 - 1))
def test_property_hl_gauss_gradient(head, seed):
    """Fails if the critic's gradient is not the cross-entropy's, here by central differences in float64."""
    rng = np.random.default_rng(seed)
    logits, target = rng.normal(size=head.width), float(rng.uniform(head.low, head.high))
    outputs = torch.from_numpy(logits)[None].requires_grad_()
    head.losses(outputs, torch.tensor([target]), torch.zeros(1)).sum().backward()
    step, numeric = 1e-5, []
    for i in range(head.width):
        shift = np.eye(head.width)[i] * step
        numeric.append((oracles.hl_gauss_loss(logits + shift, np.float32(target), head.low, head.high, head.sigma_ratio)
                        - oracles.hl_gauss_loss(logits - shift, np.float32(target), head.low, head.high,
                                                head.sigma_ratio)) / (2 * step))
    assert outputs.grad[0].numpy() == pytest.approx(np.array(numeric), abs=2e-6)


@pytest.mark.parametrize("target", [-1.0, -0.2, 0.0, 1.0])
def test_the_best_hl_gauss_value_is_the_target(target):
    """Fails if a perfect critic's value is biased, and with it every advantage (default bins and range)."""
    head = HLGauss(101, -1.5, 1.5)
    best = head.histogram(torch.tensor([target])).log()
    assert float(head.values(best)) == pytest.approx(target, abs=1e-3)
