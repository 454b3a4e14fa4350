"""Advantages over action tokens (ALGORITHM.md §2). Observation tokens are not states: they are stepped over.

Tensors hold the action tokens of whole trajectories, one after the other: `values[k]` is the value of the state
*before* action token k was sampled, `lengths[i]` the number of action tokens of trajectory i.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

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


def step_gae(level: str, rewards: Tensor, values: Tensor, lengths: Tensor, turns: Tensor, alpha: float,
             last_values: Tensor | None = None) -> Tensor:
    """GAE with one action per turn, the paper's ablation of token-level GAE (SAO §4; ALGORITHM.md §5).

    The value of a turn's state is its action tokens' mean value (level "average") or its last one's ("last_token"); a
    turn's reward is the sum of its tokens' and all of them take its advantage; n in λ counts turns. turns: [actions],
    turn of each action token, not decreasing within a trajectory; the others as in `gae`. γ = 1. Returns [actions].
    """
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    step, index, tokens = torch.unique_consecutive(torch.stack([owner, turns]), dim=1, return_inverse=True,
                                                   return_counts=True)
    zero = torch.zeros(len(tokens), dtype=torch.float64, device=values.device)
    value = values.double()[tokens.cumsum(0) - 1] if level == "last_token" else (
        zero.index_add(0, index, values.double()) / tokens)
    turns_of = torch.bincount(step[0], minlength=len(lengths))
    advantage = gae(zero.index_add(0, index, rewards.double()), value, turns_of, adaptive_lambda(turns_of, alpha),
                    last_values=last_values)
    return advantage[index]


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


def whitened(parts: list[Tensor], all_reduce: Callable[[Tensor], None]) -> list[Tensor]:
    """Advantages with mean 0 and standard deviation 1 over the action tokens of the global batch.

    `parts` are this rank's micro-batches, float32 [k] each; `all_reduce` sums a float64 tensor over the ranks in place.
    """
    def total(terms: Callable[[Tensor], Tensor]) -> Tensor:
        """Over all ranks, of `terms` of each part in float64."""
        sums = sum(terms(part.double()) for part in parts)
        all_reduce(sums)
        return sums

    count, value = total(lambda part: torch.stack([part.new_tensor(len(part)), part.sum()]))
    mean = value / count
    std = (total(lambda part: (part - mean).square().sum()) / count).sqrt()
    return [((part.double() - mean) / (std + 1e-6)).float() for part in parts]


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


def preference(outcomes: Tensor) -> Tensor:
    """+1 for the better of each pair (2i, 2i + 1), −1 for the worse, 0 for both in a tie. [trajectories]."""
    first, second = outcomes.view(-1, 2).unbind(1)
    return torch.stack([(first - second).sign(), (second - first).sign()], 1).flatten()


class RunningMean:
    """Reward minus the mean of the last `per_prompt` rewards of the same prompt (ALGORITHM.md §5, `running_mean`).

    A prompt that did not occur before (in online mode none ever does) takes the last `overall` rewards of all prompts;
    the run's very first trajectory has nothing to be compared with and advantage 0. Rewards enter in the batch's order,
    which is the same on every rank, so every rank holds the same state; none is compared with itself.
    """

    def __init__(self, per_prompt: int = 8, overall: int = 128):
        self.per_prompt = per_prompt
        self.overall: deque[float] = deque(maxlen=overall)
        self.of_prompt: dict[str, deque[float]] = {}

    def advantages(self, prompt_ids: list[str], outcomes: list[float]) -> Tensor:
        """float32 [trajectories], and the outcomes become part of the history."""
        result = []
        for prompt, outcome in zip(prompt_ids, outcomes, strict=True):
            mine = self.of_prompt.setdefault(prompt, deque(maxlen=self.per_prompt))
            history = mine or self.overall
            result.append(outcome - sum(history) / len(history) if history else 0.0)
            mine.append(outcome)
            self.overall.append(outcome)
        return torch.tensor(result, dtype=torch.float32)

    def state_dict(self) -> dict:
        """The history, JSON-able."""
        return {"overall": list(self.overall), "of_prompt": {p: list(h) for p, h in self.of_prompt.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Take over a history that `state_dict` gave."""
        self.overall = deque(state["overall"], maxlen=self.overall.maxlen)
        self.of_prompt = {p: deque(history, maxlen=self.per_prompt) for p, history in state["of_prompt"].items()}


def _pad(lengths: Tensor):
    """Mask [trajectories, longest] and a function that spreads [actions] over it."""
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=lengths.device) < lengths[:, None]

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
    return mask, padded
