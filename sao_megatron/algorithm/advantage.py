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
    after_last = torch.zeros_like(lam) if last_values is None else last_values
    next_value = torch.zeros(len(lengths), dtype=torch.float64, device=values.device)
    next_advantage = torch.zeros_like(next_value)
    advantage = torch.zeros_like(value)
    is_last = torch.arange(mask.size(1), device=mask.device) == (lengths - 1)[:, None]
    for k in reversed(range(mask.size(1))):
        next_value = torch.where(is_last[:, k], after_last.double(), next_value)
        delta = reward[:, k] + gamma * next_value - value[:, k]
        next_advantage = torch.where(mask[:, k], delta + gamma * lam.double() * next_advantage, 0.0)
        advantage[:, k] = next_advantage
        next_value = value[:, k]
    return advantage[mask].float()


def returns(rewards: Tensor, lengths: Tensor, gamma: float = 1.0, last_values: Tensor | None = None) -> Tensor:
    """Reward-to-go of each action token: GAE's target at λ = 1, which needs no values. Shape [actions]."""
    return gae(rewards, torch.zeros_like(rewards), lengths, torch.ones(len(lengths), device=rewards.device), gamma,
               last_values)


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
