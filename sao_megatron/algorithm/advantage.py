"""Advantages over action tokens (ALGORITHM.md §2). Observation tokens are not states: they are stepped over.

Tensors hold the action tokens of whole trajectories, one after the other: `values[k]` is the value of the state
*before* action token k was sampled, `lengths[i]` the number of action tokens of trajectory i.
"""
from __future__ import annotations

import torch
from torch import Tensor


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1/(α·n), clamped to [0, 1]; n = action tokens of the trajectory. Shape [trajectories]."""
    return (1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0)


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, lam: Tensor, gamma: float = 1.0,
        last_values: Tensor | None = None) -> Tensor:
    """Generalised advantage estimation along each trajectory's action tokens.

    δ_k = ρ_k + γ·V_{k+1} − V_k,  Â_k = δ_k + γ·λ·Â_{k+1}

    rewards, values: [actions]; lengths, lam: [trajectories]; last_values: V after the last action, [trajectories],
    zero by default (a terminal end). Returns [actions] in float32, computed in float64.
    """
    mask, padded = _pad(lengths)
    reward, value = padded(rewards.double()), padded(values.double())
    next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
    if last_values is not None:
        next_value.scatter_(1, (lengths - 1)[:, None], last_values.double()[:, None])
    delta = (reward + gamma * next_value - value) * mask
    return _discounted_sum(delta, gamma * lam.double())[mask].float()


def returns(rewards: Tensor, lengths: Tensor, gamma: float = 1.0, last_values: Tensor | None = None) -> Tensor:
    """Reward-to-go of each action token: GAE's target at λ = 1, which needs no values. Shape [actions]."""
    return gae(rewards, torch.zeros_like(rewards), lengths, torch.ones(len(lengths), device=rewards.device), gamma,
               last_values)


def _discounted_sum(x: Tensor, factor: Tensor, block: int = 64) -> Tensor:
    """y_k = x_k + c·y_{k+1} along the last dimension; x: [m, n], factor c in [0, 1]: [m].

    Block by block from the end: inside a block one product with the powers of c, between blocks the first y of the
    one after. A loop over single tokens would take seconds for a trajectory of 100 k tokens.
    """
    power = torch.arange(block, device=x.device)
    ahead = power[None, :] - power[:, None]  # how many steps later column j is than row i
    powers = torch.where(ahead >= 0, factor[:, None, None] ** ahead.clamp_min(0), 0.0)  # [m, block, block]
    carry, result = torch.zeros(len(x), dtype=x.dtype, device=x.device), torch.empty_like(x)
    for start in reversed(range(0, x.size(1), block)):
        part = x[:, start:start + block]
        size = part.size(1)
        y = torch.einsum("mij,mj->mi", powers[:, :size, :size], part)
        y += carry[:, None] * factor[:, None] ** (size - power[:size])
        result[:, start:start + block], carry = y, y[:, 0]
    return result


def spread(per_trajectory: Tensor, lengths: Tensor) -> Tensor:
    """Give every action token its trajectory's number: [trajectories] -> [actions]."""
    return torch.repeat_interleave(per_trajectory, lengths)


def group_advantage(outcomes: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """(R − mean)/(std + eps) within each group; population std, computed in float64 so that equal outcomes give 0.

    outcomes, groups (integer ids): [trajectories]. Returns float32 [trajectories].
    """
    outcomes = outcomes.double()
    _, index, count = torch.unique(groups, return_inverse=True, return_counts=True)
    zero = torch.zeros(len(count), dtype=torch.float64)
    mean = zero.index_add(0, index, outcomes) / count
    variance = zero.index_add(0, index, (outcomes - mean[index]) ** 2) / count
    return ((outcomes - mean[index]) / (variance.sqrt()[index] + eps)).float()


def _pad(lengths: Tensor):
    """Mask [trajectories, longest] and a function that spreads [actions] over it."""
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=lengths.device) < lengths[:, None]

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
    return mask, padded
