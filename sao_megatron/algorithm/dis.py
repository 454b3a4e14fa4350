"""DIS, direct double-sided importance sampling (ALGORITHM.md §1), and its recovering variant (§8).

All tensors are per action token, float32, of one shape [n]. No function here needs logits: a token's weight depends
on its own log-prob only, which is what lets the learner's head compute loss and gradient in one pass.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Fate(IntEnum):
    """What the gate did with a token."""

    KEPT = 0
    DROPPED_LOW = 1
    """Ratio below the gate's bound (for DIS: at or below 1 − ε_l)."""
    DROPPED_HIGH = 2
    """Ratio above the gate's bound (for DIS: at or above 1 + ε_h)."""
    RECOVERED = 3
    """Outside the bounds but kept at their edge (recovering DIS, CISPO, truncated importance weights)."""


@dataclass(frozen=True)
class Gated:
    weight: Tensor
    """f(r), float32 [n]; 0 where dropped."""
    fate: Tensor
    """Fate, int8 [n]."""


def dis(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Gated:
    """f(r) = r where 1 − ε_l < r < 1 + ε_h, else 0; both bounds strict, compared as logarithms.

    Only accepted log-ratios are exponentiated, so that an extreme one can never make inf·0. `advantage` is ignored:
    DIS masks both signs alike.
    """
    fate = _fate(log_ratio, eps_low, eps_high)
    kept = fate == Fate.KEPT
    return Gated(torch.where(kept, log_ratio, 0.0).exp() * kept, fate)


def dis_recover(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Gated:
    """DIS that keeps, at the band's edge, tokens whose update brings the ratio back (§8; ours, not the paper's).

    f = 1 − ε_l if r ≤ 1 − ε_l and Â > 0; f = 1 if r ≥ 1 + ε_h and Â < 0; otherwise as DIS.
    """
    plain = dis(log_ratio, advantage, eps_low, eps_high)
    low = (plain.fate == Fate.DROPPED_LOW) & (advantage > 0)
    high = (plain.fate == Fate.DROPPED_HIGH) & (advantage < 0)
    weight = torch.where(low, 1.0 - eps_low, torch.where(high, 1.0, plain.weight))
    return Gated(weight, torch.where(low | high, int(Fate.RECOVERED), plain.fate).to(torch.int8))


def unmasked(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Gated:
    """No correction at all: weight 1 everywhere (plain policy gradient). The fate still says what DIS would drop."""
    return Gated(torch.ones_like(log_ratio), _fate(log_ratio, eps_low, eps_high))


def _fate(log_ratio: Tensor, eps_low: float, eps_high: float) -> Tensor:
    fate = torch.zeros_like(log_ratio, dtype=torch.int8)
    fate[log_ratio <= math.log(1.0 - eps_low)] = Fate.DROPPED_LOW
    fate[log_ratio >= math.log(1.0 + eps_high)] = Fate.DROPPED_HIGH
    return fate
