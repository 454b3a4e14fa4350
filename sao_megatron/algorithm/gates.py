"""The gates of ALGORITHM.md §5: what each system makes of a token's probability ratio.

Every loss here has the form −Σ sg[c_t]·log π_θ(x_t) with c_t = w_t·Â_t, and a gate gives w_t. For PPO's clip this is
its exact gradient: where min(r·Â, clip(r)·Â) is the unclipped branch, d(r·Â) = r·Â·d log π_θ, so w = r; elsewhere the
loss is constant in θ and w = 0 (a tie at the bound is unclipped). Three policies occur:

- π_θ, the one being trained, by the training forward;
- the *behaviour* policy, the ratio's denominator: the rollout, the policy recomputed before the first update of the
  batch (what PPO calls old and AReaL proximal), or the frozen reference of DPO;
- the *rollout*, as the engine reported it; behaviour/rollout is the *mismatch* (1 where both are the rollout).

Bounds are compared as logarithms in float32. Constants not in ALGORITHM.md are the sources' own; GATES holds them.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sao_megatron.algorithm.dis import Fate, Gated, dis, dis_recover, unmasked

LARGEST_LOG_RATIO = 20.0
"""Unclipped ratios are exponentiated up to here, as in verl's PPO loss, so that none overflows; DIS needs no limit."""


@dataclass(frozen=True)
class Tokens:
    """What a gate sees; float32 [n] each, n action tokens of whole trajectories (or any chunk, for a token's gate)."""

    logprobs: Tensor
    """log π_θ."""
    behaviour: Tensor
    """Log-probs under the behaviour policy."""
    rollout: Tensor
    advantage: Tensor
    lengths: Tensor | None = None
    """int64 [m]: action tokens of each trajectory; gates that judge whole trajectories need it."""

    @property
    def log_ratio(self) -> Tensor:
        """log r."""
        return self.logprobs - self.behaviour

    @property
    def log_mismatch(self) -> Tensor:
        return self.behaviour - self.rollout


def ppo_clip(tokens: Tokens, eps_low: float, eps_high: float, dual_clip: float | None = None) -> Gated:
    """PPO (Schulman et al. 2017); ε_high > ε_low is DAPO's clip-higher (Yu et al. 2025).

    `dual_clip` c > 1 also drops r > c where Â < 0 (Ye et al. 2020, who use 3).
    """
    return _clip(tokens.log_ratio, tokens.advantage, eps_low, eps_high, dual_clip)


def truncated_ppo(tokens: Tokens, eps_low: float, eps_high: float, mismatch_high: float,
                  dual_clip: float | None = None) -> Gated:
    """min(mismatch, cap) × PPO clip: TIS (Yao et al. 2025, cap 2) and decoupled PPO (Hilton et al. 2022, AReaL, cap 5).

    The two differ in the cap and in why they weigh: TIS corrects the engine's numerics, decoupled PPO staleness.
    AReaL's code drops a token above the cap; ALGORITHM.md caps it.
    """
    clipped = ppo_clip(tokens, eps_low, eps_high, dual_clip)
    limit = math.log(mismatch_high)
    truncated = (tokens.log_mismatch > limit) & (clipped.fate == Fate.KEPT)
    return Gated(clipped.weight * tokens.log_mismatch.clamp(max=limit).exp(),
                 clipped.fate.masked_fill(truncated, Fate.RECOVERED))


def icepop(tokens: Tokens, eps_low: float, eps_high: float, mismatch_low: float, mismatch_high: float,
           dual_clip: float | None = None) -> Gated:
    """M(mismatch) × PPO clip; M(k) = k inside [mismatch_low, mismatch_high], bounds included, else 0.

    IcePop (Ant Ling team 2025, Ring-1T report): the mask keeps the mismatch as a weight where it passes.
    """
    clipped = ppo_clip(tokens, eps_low, eps_high, dual_clip)
    mismatch = _dropping(tokens.log_mismatch, tokens.log_mismatch < math.log(mismatch_low),
                         tokens.log_mismatch > math.log(mismatch_high))
    return Gated(clipped.weight * mismatch.weight, torch.where(mismatch.fate == Fate.KEPT, clipped.fate, mismatch.fate))


def cispo(tokens: Tokens, eps_low: float, eps_high: float) -> Gated:
    """sg[clip(r, 1 − ε_l, 1 + ε_h)], no token dropped (MiniMax-M1 2025).

    M1 leaves the lower side open (ε_l = 1) and publishes no ε_h; the upper bound 5 is ScaleRL's (Khatri et al. 2025).
    """
    low, high = _log(1.0 - eps_low), math.log(1.0 + eps_high)
    at_edge = (tokens.log_ratio < low) | (tokens.log_ratio > high)
    return Gated(tokens.log_ratio.clamp(low, high).exp(), at_edge.to(torch.int8) * int(Fate.RECOVERED))


def gspo(tokens: Tokens, eps_low: float, eps_high: float) -> Gated:
    """PPO clip on the trajectory's ratio s = exp(mean log r) (Zheng et al. 2025; ε 3e-4 and 4e-4).

    ∇s = s·(1/n)·Σ∇log π_θ: every token weighs s, and the 1/n is the mean per trajectory.
    """
    return _clip(_trajectory_mean(tokens.log_ratio, tokens.lengths), tokens.advantage, eps_low, eps_high)


def ipo(tokens: Tokens, eps_low: float, eps_high: float) -> Gated:
    """r where −ε_l ≤ π_θ − π_rollout ≤ ε_h, else 0, whatever the advantage's sign (prime-rl, both 0.2).

    prime-rl adds τ·(log r)² with τ = 1e-3, which is `anchor` = 2e-3 here and off by default.
    """
    difference = tokens.logprobs.exp() - tokens.rollout.exp()
    return _dropping(tokens.log_ratio, difference < -eps_low, difference > eps_high)


def flash_reinforce(tokens: Tokens, eps_low: float, eps_high: float, trust: float) -> Gated:
    """r, in trajectories whose mean binary KL(rollout ‖ π_θ) of the sampled tokens is at most `trust`, else 0.

    FlashREINFORCE (Hu et al. 2026; δ = 3e-3, probabilities held inside [1e-6, 1 − 1e-6] for the test). There is no
    band: eps_low and eps_high are unused. Tokens of a rejected trajectory count as dropped low or high by their own r.
    """
    p, q = (x.double().exp().clamp(1e-6, 1 - 1e-6) for x in (tokens.rollout, tokens.logprobs))
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    rejected = _trajectory_mean(divergence, tokens.lengths) > trust
    return _dropping(tokens.log_ratio, rejected & (tokens.log_ratio < 0), rejected & (tokens.log_ratio >= 0))


def dpo(tokens: Tokens, eps_low: float, eps_high: float, beta: float) -> Gated:
    """β·σ(−β·h), h = Σ log r of the chosen − Σ log r of the rejected; behaviour is the reference policy.

    The gradient of −log σ(β·h) (Rafailov et al. 2023), online as in Noukhovitch et al. 2024 (β = 0.1). Trajectories 2i
    and 2i + 1 are a pair; the advantage is +1 for the chosen, −1 for the rejected, 0 for both in a tie. There is no
    band: eps_low and eps_high are unused.
    """
    margin = _trajectory_sum(tokens.advantage * tokens.log_ratio, tokens.lengths).view(-1, 2).sum(-1)
    weight = beta * torch.sigmoid(-beta * margin)
    per_token = torch.repeat_interleave(weight.repeat_interleave(2), tokens.lengths).float()
    return Gated(per_token, torch.zeros_like(per_token, dtype=torch.int8))


def _clip(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float,
          dual_clip: float | None = None) -> Gated:
    low = (advantage < 0) & (log_ratio < math.log(1.0 - eps_low))
    high = (advantage > 0) & (log_ratio > math.log(1.0 + eps_high))
    if dual_clip is not None:
        high |= (advantage < 0) & (log_ratio > math.log(dual_clip))
    return _dropping(log_ratio, low, high)


def _dropping(log_weight: Tensor, low: Tensor, high: Tensor) -> Gated:
    """exp(log_weight) but for the tokens marked low or high, which are dropped."""
    fate = low.to(torch.int8) * int(Fate.DROPPED_LOW) + high.to(torch.int8) * int(Fate.DROPPED_HIGH)
    return Gated(log_weight.clamp(max=LARGEST_LOG_RATIO).exp() * (fate == Fate.KEPT), fate)


def _trajectory_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """[n] -> float64 [trajectories]."""
    index = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return torch.zeros(len(lengths), dtype=torch.float64, device=values.device).index_add_(0, index, values.double())


def _trajectory_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """[n] -> float32 [n]: each token gets its trajectory's mean."""
    return torch.repeat_interleave(_trajectory_sum(values, lengths) / lengths, lengths).float()


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _of_ratio(gate: Callable) -> Callable[..., Gated]:
    """A gate of dis.py as one over Tokens."""
    return lambda tokens, eps_low, eps_high: gate(tokens.log_ratio, tokens.advantage, eps_low, eps_high)


@dataclass(frozen=True)
class Gate:
    weigh: Callable[..., Gated]
    """(Tokens, eps_low, eps_high, **further constants) -> Gated."""
    behaviours: tuple[str, ...]
    """The behaviour policies that its ratio has a meaning for."""
    constants: dict[str, float | None]
    """Every constant it uses, with the source's value."""
    mean_over: str = "token"
    """The loss is the mean over action tokens, over trajectories of their means, or over pairs of their sums (pair)."""
    whole_trajectories: bool = False
    """A weight needs all tokens of a trajectory (of a pair): the head runs in two passes."""


_PPO = dict(eps_low=0.2, eps_high=0.2, dual_clip=None)
_DIS = dict(eps_low=0.3, eps_high=5.0)
GATES = {
    "dis": Gate(_of_ratio(dis), ("rollout",), _DIS),
    "dis_recover": Gate(_of_ratio(dis_recover), ("rollout",), _DIS),
    "none": Gate(_of_ratio(unmasked), ("rollout",), _DIS),
    "ppo_clip": Gate(ppo_clip, ("recomputed",), _PPO),
    "decoupled_ppo": Gate(truncated_ppo, ("recomputed",), _PPO | dict(mismatch_high=5.0)),
    "icepop": Gate(icepop, ("recomputed",), _PPO | dict(mismatch_low=0.5, mismatch_high=5.0)),
    "tis": Gate(truncated_ppo, ("recomputed",), _PPO | dict(mismatch_high=2.0)),
    "cispo": Gate(cispo, ("rollout", "recomputed"), dict(eps_low=1.0, eps_high=4.0)),
    "gspo": Gate(gspo, ("rollout", "recomputed"), dict(eps_low=3e-4, eps_high=4e-4), "trajectory", True),
    "ipo": Gate(ipo, ("rollout",), dict(eps_low=0.2, eps_high=0.2)),
    "flash_reinforce": Gate(flash_reinforce, ("rollout",), dict(trust=3e-3), "trajectory", True),
    "dpo": Gate(dpo, ("reference",), dict(beta=0.1), "pair", True),
}
