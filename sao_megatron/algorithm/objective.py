"""What the policy is trained on: a coefficient per action token.

The loss is −Σ sg[c_t]·log π_θ(x_t), so its gradient is Σ c_t times the gradient of each token's negative log-prob. An
Objective maps log-probs to coefficients; the learner's head turns them into loss and gradients and divides by N, the
action tokens of the whole global (mini-)batch. Where a token's coefficient depends on its own log-prob only, the head
needs one pass over chunks; where it depends on its whole trajectory (`needs_sequences`), two.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sao_megatron.algorithm.dis import Gated
from sao_megatron.algorithm.gates import GATES, Tokens


class Objective(Protocol):
    entropy_coef: float
    """Weight of the entropy bonus."""
    needs_sequences: bool
    """`coefficients` must see all action tokens of the micro-batch at once."""

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        """c_t for the action tokens [start, start + len(logprobs)) of the micro-batch; called once per chunk."""


class NegativeLogLikelihood:
    """c = 1: supervised learning of the action tokens."""

    entropy_coef = 0.0
    needs_sequences = False

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        return torch.ones_like(logprobs)


@dataclass
class PolicyGradient:
    """c_t = scale_t·w_t·Â_t, minus the anchor's τ·log r_t, plus the bonus; w_t is the gate's (gates.py).

    With DIS: c_t = f(r_t)·Â_t, r_t = exp(log π_θ − log π_rollout) (ALGORITHM.md §1, §8); there is no old policy,
    log π_θ is the training forward's own. Keeps what it saw of every token for diagnostics. Tensors are float32 [n],
    n the micro-batch's action tokens.
    """

    rollout_logprobs: Tensor
    """log π_rollout."""
    advantages: Tensor
    gate: str = "dis"
    eps_low: float = 0.3
    eps_high: float = 5.0
    anchor: float = 0.0
    entropy_coef: float = 0.0
    constants: dict[str, float | None] = field(default_factory=dict)
    """The gate's further constants."""
    behaviour_logprobs: Tensor | None = None
    """The ratio's denominator; the rollout's log-probs where None."""
    lengths: Tensor | None = None
    """int64 [trajectories]: action tokens of each; needed where the gate judges whole trajectories."""
    scale: Tensor | None = None
    """Weight of each token's gated term, where the loss is not a mean over tokens."""
    bonus: Tensor | None = None
    """Added to each token's coefficient: VAPO's negative log-likelihood of positive examples."""

    def __post_init__(self):
        self._seen: list[tuple[Tensor, Gated]] = []

    @property
    def needs_sequences(self) -> bool:
        return GATES[self.gate].whole_trajectories

    def coefficients(self, logprobs: Tensor, start: int) -> Tensor:
        chunk = slice(start, start + len(logprobs))
        rollout, advantage = self.rollout_logprobs[chunk], self.advantages[chunk]
        behaviour = rollout if self.behaviour_logprobs is None else self.behaviour_logprobs[chunk]
        tokens = Tokens(logprobs, behaviour, rollout, advantage, self.lengths)
        gated = GATES[self.gate].weigh(tokens, self.eps_low, self.eps_high, **self.constants)
        log_ratio = logprobs - rollout
        self._seen.append((log_ratio, gated))
        coefficient = gated.weight * advantage
        if self.scale is not None:
            coefficient = coefficient * self.scale[chunk]
        if self.anchor:
            coefficient = coefficient - self.anchor * log_ratio
        return coefficient if self.bonus is None else coefficient + self.bonus[chunk]

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
    """log π_θ − log π_rollout, whatever the gate's own denominator is."""
    weight: Tensor
    """w, the gate's; f(r) of DIS."""
    fate: Tensor
    """dis.Fate, int8."""

    @property
    def ratio(self) -> Tensor:
        """r; may overflow to inf where the log-ratio is extreme (for display only)."""
        return self.log_ratio.exp()
