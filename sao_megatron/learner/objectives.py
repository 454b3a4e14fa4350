"""From a preset and a batch to advantages and objectives: what the choices of ALGORITHM.md §5 mean for each token.

Everything that is global about a batch (group statistics, baselines, N, the number of trajectories) comes from the list
of trajectories, which every rank holds, so nothing here communicates.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sao_megatron.algorithm import advantage as adv
from sao_megatron.algorithm.gates import GATES
from sao_megatron.algorithm.objective import PolicyGradient
from sao_megatron.algorithm.presets import Preset
from sao_megatron.config import AlgorithmSection
from sao_megatron.learner.passes import DeviceBatch
from sao_megatron.trajectory.types import Trajectory


class MiniBatch(NamedTuple):
    """One policy update: whole groups of the leased batch, with a normalisation N of their own."""

    trajectories: list[Trajectory]
    """On all ranks together, the same list on every rank."""
    batches: list[DeviceBatch]
    """This rank's micro-batches of them."""


def trajectory_advantages(preset: Preset, trajectories: list[Trajectory], history: adv.RunningMean) -> Tensor:
    """One advantage per trajectory of the leased batch, float32 [trajectories]; `history` advances by the batch."""
    outcomes = torch.tensor([t.reward for t in trajectories])
    if preset.advantage == "group":
        groups = {name: i for i, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
        return adv.group_advantage(outcomes, torch.tensor([groups[t.group_id] for t in trajectories]))
    if preset.advantage == "running_mean":
        return history.advantages([t.prompt_id for t in trajectories], [t.reward for t in trajectories])
    if preset.advantage == "preference":
        return adv.preference(outcomes)
    return outcomes - outcomes.mean()  # batch_mean


def spread_advantages(batches: list[DeviceBatch], trajectories: list[Trajectory], advantages: Tensor) -> None:
    """Give every action token its trajectory's advantage."""
    of = {t.id: advantage for t, advantage in zip(trajectories, advantages, strict=True)}
    for batch in batches:
        mine = torch.tensor([of[t.id] for t in batch.source.trajectories], device=batch.lengths.device)
        batch.results["advantages"] = adv.spread(mine, batch.lengths)[batch.held]


def objectives(preset: Preset, section: AlgorithmSection, mini: MiniBatch) -> list[PolicyGradient]:
    """One objective per micro-batch. Earlier pipeline stages hold no values: theirs are never asked."""
    tokens = sum(t.num_actions for t in mini.trajectories)
    positive = sum(t.num_actions for t in mini.trajectories if t.reward > 0)
    result = []
    for batch in mini.batches:
        result.append(PolicyGradient(
            batch.rollout_logprobs, batch.results.get("advantages", batch.rewards[batch.held]), preset.gate,
            preset.eps_low, preset.eps_high, section.anchor, section.entropy_coef, preset.constants,
            behaviour_logprobs=batch.results.get("behaviour_logprobs"), lengths=batch.lengths,
            scale=_scale(GATES[preset.gate].mean_over, batch, tokens, len(mini.trajectories)),
            bonus=_positive_nll(batch, preset.positive_nll * tokens / positive)
            if preset.positive_nll and positive else None))
    return result


def _scale(mean_over: str, batch: DeviceBatch, tokens: int, trajectories: int) -> Tensor | None:
    """Megatron divides every loss by N, the mini-batch's action tokens: the factor that makes it another mean."""
    if mean_over == "token":
        return None
    if mean_over == "trajectory":  # (1/M) Σ_i (1/n_i) Σ_t
        return adv.spread(tokens / (trajectories * batch.lengths), batch.lengths)[batch.held]
    # the sum over a pair, tied pairs counted
    return torch.full_like(batch.rewards[batch.held], tokens / (trajectories / 2))


def _positive_nll(batch: DeviceBatch, weight: float) -> Tensor:
    """VAPO (Yue et al. 2025): μ times the mean NLL over the action tokens of trajectories with a positive reward."""
    positive = torch.tensor([t.reward > 0 for t in batch.source.trajectories], device=batch.lengths.device)
    return adv.spread(positive.float() * weight, batch.lengths)[batch.held]
