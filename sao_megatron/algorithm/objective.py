"""What the policy is trained on: a coefficient per action token, known from that token's own log-prob.

The loss is −Σ sg[c_t]·log π_θ(x_t), so its gradient is Σ c_t times the gradient of each token's negative log-prob. An
Objective maps a chunk of log-probs to coefficients; the learner's head turns them into loss and gradients at once and
divides by N, the action tokens of the whole global batch.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sao_megatron.algorithm.dis import GATES, Gated


class Objective(Protocol):
    entropy_coef: float
    """Weight of the entropy bonus."""

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        """c_t for the action tokens [start, start + len(logprobs)) of the micro-batch; called once per chunk."""


class NegativeLogLikelihood:
    """c = 1: supervised learning of the action tokens."""

    entropy_coef = 0.0

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        return torch.ones_like(logprobs)


@dataclass
class PolicyGradient:
    """c_t = f(r_t)·Â_t, minus the anchor's τ·log r_t; r_t = exp(log π_θ − log π_rollout) (ALGORITHM.md §1, §8).

    There is no old policy: log π_θ is the training forward's own. Keeps what it saw of every token for diagnostics.
    """

    rollout_logprobs: Tensor
    """float32 [n]: log π_rollout of the micro-batch's action tokens."""
    advantages: Tensor
    """float32 [n]."""
    gate: str = "dis"
    eps_low: float = 0.3
    eps_high: float = 5.0
    anchor: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self):
        self._seen: list[tuple[Tensor, Gated]] = []

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        chunk = slice(start, start + len(logprobs))
        log_ratio = logprobs - self.rollout_logprobs[chunk]
        advantage = self.advantages[chunk]
        gated = GATES[self.gate](log_ratio, advantage, self.eps_low, self.eps_high)
        self._seen.append((log_ratio, gated))
        coefficient = gated.weight * advantage
        return coefficient - self.anchor * log_ratio if self.anchor else coefficient

    def diagnostics(self) -> TokenDiagnostics:
        """What happened to each token, after the forward pass."""
        ratios, gated = zip(*self._seen, strict=True) if self._seen else ((), ())
        empty = self.advantages[:0]
        return TokenDiagnostics(torch.cat([empty, *ratios]), torch.cat([empty, *(g.weight for g in gated)]),
                                torch.cat([empty.to(torch.int8), *(g.fate for g in gated)]))


@dataclass(frozen=True)
class TokenDiagnostics:
    """Per action token of a micro-batch, [n] each."""

    log_ratio: Tensor
    weight: Tensor
    """f(r)."""
    fate: Tensor
    """dis.Fate, int8."""

    @property
    def ratio(self) -> Tensor:
        """r; may overflow to inf where the log-ratio is extreme (for display only)."""
        return self.log_ratio.exp()
