"""Into which bucket an action token falls, for each of the ways in which mask statistics are broken down.

Edges are fixed, so that steps and runs can be compared, and so that ranks can add their counts. The exceptions are
entropy and expert load: their deciles are those of the step's own tokens, made after the reduction from fine fixed
bins.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Buckets:
    edges: np.ndarray
    """Lower edges, ascending; the last bucket is open."""
    names: tuple[str, ...]
    meaning: str

    def of(self, values: np.ndarray) -> np.ndarray:
        """Bucket of each value, clipped into the first and the last."""
        return np.clip(np.searchsorted(self.edges, values, side="right") - 1, 0, len(self.edges) - 1)


def _integers(*edges: int, meaning: str) -> Buckets:
    names = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in zip(edges, edges[1:], strict=False)]
    return Buckets(np.array(edges), (*names, f"{edges[-1]}+"), meaning)


_TENTHS = tuple(f"{10 * i}-{10 * (i + 1)}%" for i in range(10))
LAG = _integers(0, 1, 2, 3, 5, 9, 17, meaning="learner version − version at sampling")
BREAKDOWNS = {
    "lag": LAG,
    "turn": _integers(0, 1, 2, 3, 4, 8, 16, 32, 64, meaning="turn of the episode, from 0"),
    "position": Buckets(np.arange(10) / 10, _TENTHS, "action tokens before it, as a share of its trajectory's"),
    "length": _integers(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, meaning="action tokens of its trajectory"),
    "advantage": Buckets(np.array([-np.inf, 0.0, np.nextafter(np.float32(0), np.float32(1))]),
                         ("negative", "zero", "positive"), "sign of its advantage"),
    "expert_load": Buckets(np.concatenate([[-np.inf], np.logspace(-0.7, 1.3, 401)]), _TENTHS,
                           "decile of how busy its experts were: the tokens that an expert got in units of its layer's "
                           "mean, averaged over the layers and the k experts of the token before it, whose output "
                           "predicts it"),
    "entropy": Buckets(np.concatenate([[-np.inf], np.logspace(-6, 1.5, 151)]), _TENTHS,
                       "decile of the policy's entropy among the step's action tokens"),
}
"""The edges of what is in DECILES are fine bins: of entropy 20 a factor of 10 (nats), of load 200."""
DECILES = ("expert_load", "entropy")
"""Breakdowns whose names are those of the deciles."""


def deciles(counts: np.ndarray) -> np.ndarray:
    """[bins] tokens in fine bins -> [bins]: the decile (0 to 9) of each bin's middle token."""
    total = counts.sum()
    middle = np.cumsum(counts) - counts / 2
    return np.minimum((10 * middle / max(total, 1)).astype(int), 9)
