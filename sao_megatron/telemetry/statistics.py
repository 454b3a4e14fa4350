"""Mask statistics of one learner step: sums that every rank fills for its tokens and that are reduced once.

A Statistics is a set of fixed-size float64 sums, so that ranks without tokens (earlier pipeline stages, empty
micro-batches) add zeros, and one all-reduce of one small vector gives every rank the global numbers.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sao_megatron.algorithm.dis import Fate

LAG_EDGES = np.array([0, 1, 2, 3, 5, 9, 17])
"""Lags are counted in the buckets 0, 1, 2, 3–4, 5–8, 9–16, 17 and more."""
LOG_RATIO_EDGES = np.concatenate([[-np.inf], np.linspace(-3.0, 3.0, 121), [np.inf]])
"""Bins of log r, the same in every step and run so that histograms can be compared."""


@dataclass
class Statistics:
    fates: np.ndarray = field(default_factory=lambda: np.zeros((len(LAG_EDGES), len(Fate))))
    """Action tokens by lag bucket and fate."""
    log_ratio: np.ndarray = field(default_factory=lambda: np.zeros(len(LOG_RATIO_EDGES) - 1))
    """Action tokens by log r."""
    sums: np.ndarray = field(default_factory=lambda: np.zeros(len(SUMS)))
    """Sums over action tokens, in the order of SUMS."""

    def add(self, **values) -> None:
        """Add the sum of each array (or number) to the sum of that name."""
        for name, value in values.items():
            self.sums[SUMS.index(name)] += np.sum(value, dtype=np.float64)

    def add_tokens(self, log_ratio: np.ndarray, weight: np.ndarray, fate: np.ndarray, lag: np.ndarray,
                   entropy: np.ndarray) -> None:
        """Count one micro-batch's action tokens; all arrays [n]. lag = learner version − version at sampling."""
        bucket = np.searchsorted(LAG_EDGES, lag, side="right") - 1
        np.add.at(self.fates, (bucket, fate), 1)
        self.log_ratio += np.histogram(log_ratio, LOG_RATIO_EDGES)[0]
        kept_ratio = np.exp(log_ratio[fate == Fate.KEPT], dtype=np.float64)  # float64 holds any that occurs
        self.add(tokens=len(lag), weight=weight, weight_squared=np.square(weight, dtype=np.float64),
                 kept_ratio=kept_ratio, lag=lag, entropy=entropy, log_ratio=log_ratio, log_ratio_abs=np.abs(log_ratio))

    def to_vector(self) -> np.ndarray:
        return np.concatenate([self.fates.ravel(), self.log_ratio, self.sums])

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> Statistics:
        fates, bins = len(LAG_EDGES) * len(Fate), len(LOG_RATIO_EDGES) - 1
        return cls(vector[:fates].reshape(-1, len(Fate)), vector[fates:fates + bins], vector[fates + bins:])

    def __getitem__(self, name: str) -> float:
        return float(self.sums[SUMS.index(name)])

    def metrics(self) -> dict[str, float]:
        """Scalars of the step. Shares are of action tokens; ESS and discarded mass m as in ALGORITHM.md §7."""
        tokens = max(self["tokens"], 1.0)
        share = self.fates.sum(0) / tokens
        result = {
            "mask/dropped_low": share[Fate.DROPPED_LOW], "mask/dropped_high": share[Fate.DROPPED_HIGH],
            "mask/recovered": share[Fate.RECOVERED],
            "mask/dropped": share[Fate.DROPPED_LOW] + share[Fate.DROPPED_HIGH],
            "mask/effective_sample_size": self["weight"] ** 2 / max(tokens * self["weight_squared"], 1e-12),
            "mask/discarded_mass": 1.0 - self["kept_ratio"] / tokens,
            "ratio/log_mean": self["log_ratio"] / tokens, "ratio/log_abs_mean": self["log_ratio_abs"] / tokens,
            "lag/mean": self["lag"] / tokens, "policy/entropy": self["entropy"] / tokens,
        } if self["tokens"] else {}
        if self["value_tokens"]:
            result |= self._critic_metrics()
        return {name: float(value) for name, value in result.items()}

    def _critic_metrics(self) -> dict[str, float]:
        n = self["value_tokens"]
        variance = self["return_squared"] / n - (self["return"] / n) ** 2
        residual = self["error_squared"] / n - (self["error"] / n) ** 2
        return {"critic/loss": self["error_squared"] / n, "critic/value_mean": self["value"] / n,
                "critic/explained_variance": 1.0 - residual / variance if variance > 1e-12 else 0.0,
                "advantage/mean": self["advantage"] / n,
                "advantage/std": float(np.sqrt(max(self["advantage_squared"] / n - (self["advantage"] / n) ** 2, 0)))}


SUMS = ("tokens", "weight", "weight_squared", "kept_ratio", "lag", "entropy", "log_ratio", "log_ratio_abs",
        "value_tokens", "value", "return", "return_squared", "error", "error_squared", "advantage", "advantage_squared",
        "policy_loss")
