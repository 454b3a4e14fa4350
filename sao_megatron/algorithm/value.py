"""What the value model is trained on (ALGORITHM.md §3): squared error, or HL-Gauss classification.

Both give a value and a loss per action token from the head's outputs; the learner sums the losses and divides by the
action tokens of the whole global batch.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ValueLoss(Protocol):
    width: int
    """Outputs of the head per token."""

    def values(self, outputs: Tensor) -> Tensor:
        """[n, width] -> [n]."""

    def losses(self, outputs: Tensor, targets: Tensor, first_values: Tensor) -> Tensor:
        """Per action token, [n]. `first_values` [n]: what the critic said before this step's first update."""


@dataclass(frozen=True)
class SquaredError:
    """(V − R)². With a clip c it is the larger of that and (V₀ + clamp(V − V₀, −c, c) − R)², as in PPO: further updates
    gain nothing by moving a value more than c away from V₀, the one before this step's first update."""

    clip: float | None = None
    width: int = 1

    def values(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]

    def losses(self, outputs: Tensor, targets: Tensor, first_values: Tensor) -> Tensor:
        values = self.values(outputs)
        loss = (values - targets).square()
        if self.clip is None:
            return loss
        near = first_values + (values - first_values).clamp(-self.clip, self.clip)
        return torch.maximum(loss, (near - targets).square())


@dataclass(frozen=True)
class HLGauss:
    """Cross-entropy to a histogram of the target: each bin of [low, high] holds the mass that a Gaussian around the
    target has there, σ = sigma_ratio bin widths, renormalised to 1. A value is the mean of the bins' centres under the
    head's softmax. (Farebrother et al. 2024, "Stop Regressing".)

    Targets must lie in [low, high], and a few σ away from its ends: what the ends cut off pulls the mean inwards.
    """

    width: int
    """Number of bins."""
    low: float
    high: float
    sigma_ratio: float = 0.75

    def centres(self, device: torch.device | None = None) -> Tensor:
        """float32 [width]."""
        edges = self._edges(device)
        return ((edges[1:] + edges[:-1]) / 2).float()

    def values(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, -1) @ self.centres(outputs.device)

    def losses(self, outputs: Tensor, targets: Tensor, first_values: Tensor) -> Tensor:
        return -(self.histogram(targets) * torch.log_softmax(outputs, -1)).sum(-1)

    def histogram(self, targets: Tensor) -> Tensor:
        """Probability of each bin, float32 [n, width], computed in float64."""
        sigma = self.sigma_ratio * (self.high - self.low) / self.width
        below = torch.erf((self._edges(targets.device) - targets.double()[:, None]) / (sigma * 2**0.5))
        return (below.diff(dim=-1) / (below[:, -1:] - below[:, :1])).float()

    def _edges(self, device: torch.device | None) -> Tensor:
        return torch.linspace(self.low, self.high, self.width + 1, dtype=torch.float64, device=device)
