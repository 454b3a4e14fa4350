"""Mask statistics of one learner step: sums that every rank fills for its tokens and that are reduced once.

A Statistics is a set of fixed-size float64 sums, so that ranks without tokens (earlier pipeline stages, empty
micro-batches) add zeros, and one all-reduce of one small vector gives every rank the global numbers.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sao_megatron.algorithm.dis import Fate
from sao_megatron.telemetry.buckets import BREAKDOWNS, DECILES, deciles

LOG_RATIO_EDGES = np.concatenate([[-np.inf], np.linspace(-3.0, 3.0, 121), [np.inf]])
"""Bins of log r, the same in every step and run so that histograms can be compared."""
ADVANTAGE_EDGES = np.concatenate([[-np.inf], np.linspace(-3.0, 3.0, 25), [np.inf]])
_COARSE = np.array([0, *range(1, 122, 4), 122])
COARSE_LOG_RATIO_EDGES = LOG_RATIO_EDGES[_COARSE]
_COARSE_BIN = np.searchsorted(_COARSE, np.arange(len(LOG_RATIO_EDGES) - 1), side="right") - 1
"""Of each bin of log r."""
MISMATCH_EDGES = np.concatenate([[0.0], np.logspace(-8, 2, 201), [np.inf]])
"""Bins of |log r| at lag 0, where engine and learner hold the same weights: 20 a factor of 10."""

FIELDS = ("tokens", "dropped_low", "dropped_high", "recovered", "weight", "weight_squared", "kept_ratio")
"""What is summed in every bucket."""
SUMS = ("trajectories", "dropped_low_by_trajectory", "dropped_high_by_trajectory", "lag", "entropy", "log_ratio",
        "log_ratio_abs", "mismatch", "fresh_logprob", "fresh_logprob_squared", "fresh_ratio", "fresh_ratio_squared",
        "fresh_product", "value_tokens", "value", "return", "return_squared", "error", "error_squared", "advantage",
        "advantage_squared", "policy_loss")


@dataclass(frozen=True)
class Tokens:
    """Action tokens of one micro-batch, as this rank holds them; arrays [n] each."""

    log_ratio: np.ndarray
    """log π_θ − log π_rollout."""
    rollout_logprob: np.ndarray
    weight: np.ndarray
    """The gate's."""
    fate: np.ndarray
    entropy: np.ndarray
    advantage: np.ndarray
    lag: np.ndarray
    """Learner version − version at sampling."""
    turn: np.ndarray
    position: np.ndarray
    """Action tokens before it in its trajectory."""
    length: np.ndarray
    """Action tokens of its trajectory."""
    task: np.ndarray
    """Index into the Statistics' tasks."""
    expert_load: np.ndarray | None = None
    """Of the experts that it was predicted by (learner/expert_load.py); None where a model has none."""

    def buckets(self, name: str) -> np.ndarray:
        """Its bucket in the breakdown `name`."""
        if name == "task":
            return self.task
        values = self.position / self.length if name == "position" else getattr(self, name)
        return BREAKDOWNS[name].of(values)


class Statistics:
    """`tasks` names the tasks of the step's trajectories, the same on every rank."""

    def __init__(self, tasks: tuple[str, ...] = ()):
        self.tasks = tasks
        sizes = {name: len(buckets.edges) for name, buckets in BREAKDOWNS.items()} | {"task": len(tasks)}
        ends = np.cumsum(list(sizes.values()))
        self._table = np.zeros((ends[-1], len(FIELDS)))
        self._starts = dict(zip(sizes, (ends - list(sizes.values())).tolist(), strict=True))
        """First row of each breakdown."""
        self.breakdowns = dict(zip(sizes, np.split(self._table, ends[:-1]), strict=True))
        """FIELDS by bucket: parts of one table."""
        self.log_ratio = np.zeros(len(LOG_RATIO_EDGES) - 1)
        """Action tokens by log r."""
        self.joint = np.zeros((len(ADVANTAGE_EDGES) - 1, len(COARSE_LOG_RATIO_EDGES) - 1))
        """Action tokens by advantage and log r."""
        self.mismatch = np.zeros(len(MISMATCH_EDGES) - 1)
        """Action tokens of lag 0 by |log r|."""
        self.sums = np.zeros(len(SUMS))

    def _parts(self) -> list[np.ndarray]:
        return [self._table, self.log_ratio, self.joint, self.mismatch, self.sums]

    def to_vector(self) -> np.ndarray:
        return np.concatenate([part.ravel() for part in self._parts()])

    def load_vector(self, vector: np.ndarray) -> Statistics:
        """Take the sums of `vector`, which a Statistics of the same tasks wrote."""
        start = 0
        for part in self._parts():
            part[...] = vector[start:start + part.size].reshape(part.shape)
            start += part.size
        return self

    def add(self, **values) -> None:
        """Add the sum of each array (or number) to the sum of that name."""
        for name, value in values.items():
            self.sums[SUMS.index(name)] += np.sum(value, dtype=np.float64)

    def __getitem__(self, name: str) -> float:
        return float(self.sums[SUMS.index(name)])

    def add_tokens(self, tokens: Tokens) -> None:
        """Count one micro-batch's action tokens."""
        self._add_breakdowns(tokens)
        log_ratio = _bins(tokens.log_ratio, LOG_RATIO_EDGES)
        joint = _bins(tokens.advantage, ADVANTAGE_EDGES) * self.joint.shape[1] + _COARSE_BIN[log_ratio]
        self.log_ratio += np.bincount(log_ratio, minlength=self.log_ratio.size)
        self.joint += np.bincount(joint, minlength=self.joint.size).reshape(self.joint.shape)
        self._add_fresh(*(x[tokens.lag == 0].astype(np.float64) for x in (tokens.log_ratio, tokens.rollout_logprob)))
        share = 1 / tokens.length
        self.add(trajectories=share, dropped_low_by_trajectory=share[tokens.fate == Fate.DROPPED_LOW],
                 dropped_high_by_trajectory=share[tokens.fate == Fate.DROPPED_HIGH], lag=tokens.lag,
                 entropy=tokens.entropy, log_ratio=tokens.log_ratio, log_ratio_abs=np.abs(tokens.log_ratio))

    def _add_breakdowns(self, tokens: Tokens) -> None:
        """All breakdowns at once: with few tokens, a call of NumPy costs more than its work."""
        names = [name for name in self.breakdowns if name != "expert_load" or tokens.expert_load is not None]
        rows = np.concatenate([tokens.buckets(name) + self._starts[name] for name in names])
        fates = np.bincount(rows * len(Fate) + np.tile(tokens.fate, len(names)), minlength=len(self._table) * len(Fate))
        fates = fates.reshape(-1, len(Fate))
        kept = np.where(tokens.fate == Fate.KEPT, tokens.log_ratio, -np.inf).astype(np.float64)
        weight = tokens.weight.astype(np.float64)
        sums = (weight, weight**2, np.exp(kept))  # float64 holds any ratio that occurs
        self._table += np.column_stack([fates.sum(1), fates[:, Fate.DROPPED_LOW:], *(
            np.bincount(rows, np.tile(field, len(names)), minlength=len(self._table)) for field in sums)])

    def _add_fresh(self, log_ratio: np.ndarray, rollout_logprob: np.ndarray) -> None:
        """Count the tokens of lag 0; float64, since the fit subtracts sums that are nearly alike."""
        self.mismatch += np.bincount(_bins(np.abs(log_ratio), MISMATCH_EDGES), minlength=self.mismatch.size)
        self.add(mismatch=np.abs(log_ratio), fresh_logprob=rollout_logprob, fresh_logprob_squared=rollout_logprob**2,
                 fresh_ratio=log_ratio, fresh_ratio_squared=log_ratio**2, fresh_product=log_ratio * rollout_logprob)

    @property
    def fates(self) -> np.ndarray:
        """[lag buckets, Fate]: action tokens."""
        tokens, low, high, recovered = self.breakdowns["lag"][:, :4].T
        return np.stack([tokens - low - high - recovered, low, high, recovered], axis=1)

    def metrics(self) -> dict[str, float]:
        """Scalars of the step (telemetry/metrics.py says what each means)."""
        total = self.breakdowns["lag"].sum(0)
        result = {}
        if tokens := total[0]:
            result = {f"mask/{name}": value for name, value in _shares(total).items()} | {
                "mask/kept": 1.0 - total[1:4].sum() / tokens,
                **{f"mask/{name}_by_trajectory": share for name, share in self._by_trajectory().items()},
                "ratio/log_mean": self["log_ratio"] / tokens, "ratio/log_abs_mean": self["log_ratio_abs"] / tokens,
                "lag/mean": self["lag"] / tokens, "policy/entropy": self["entropy"] / tokens,
            } | self._mismatch_metrics() | self._breakdown_metrics(tokens)
        if self["value_tokens"]:
            result |= self._critic_metrics()
        return {name: float(value) for name, value in result.items()}

    def _by_trajectory(self) -> dict[str, float]:
        """Means over the trajectories of their shares."""
        low, high = (self[f"{name}_by_trajectory"] / self["trajectories"] for name in ("dropped_low", "dropped_high"))
        return {"dropped": low + high, "dropped_low": low, "dropped_high": high}

    def _mismatch_metrics(self) -> dict[str, float]:
        """Of the tokens of lag 0; the 99th percentile and the largest as upper edges of their bins."""
        if not (fresh := self.mismatch.sum()):
            return {}
        upper = MISMATCH_EDGES[1:]
        return self._fit(fresh) | {"mismatch/tokens": fresh, "mismatch/mean": self["mismatch"] / fresh,
                "mismatch/p99": upper[np.searchsorted(np.cumsum(self.mismatch), 0.99 * fresh)],
                "mismatch/max": upper[np.flatnonzero(self.mismatch)[-1]]}

    def _fit(self, n: float) -> dict[str, float]:
        """Of the tokens of lag 0: how log r goes with log π_rollout, and log π_θ with log π_rollout."""
        x, d = self["fresh_logprob"] / n, self["fresh_ratio"] / n
        variance = self["fresh_logprob_squared"] / n - x**2
        covariance = self["fresh_product"] / n - x * d
        variance_ratio = self["fresh_ratio_squared"] / n - d**2
        learner = variance + 2 * covariance + variance_ratio  # of log π_θ = log π_rollout + log r
        if min(variance, learner) < 1e-9:  # all tokens alike
            return {}
        return {"mismatch/slope": covariance / variance,
                "mismatch/correlation": (variance + covariance) / (variance * learner) ** 0.5}

    def _breakdown_metrics(self, tokens: float) -> dict[str, float]:
        tables = {name: _in_deciles(table) if name in DECILES else table for name, table in self.breakdowns.items()}
        places = [(name, bucket) for name in tables
                  for bucket in (self.tasks if name == "task" else BREAKDOWNS[name].names)]
        rows = np.concatenate(list(tables.values()))
        held = np.flatnonzero(rows[:, 0])
        columns = _shares(rows[held].T) | {"tokens": rows[held, 0] / tokens}
        return {f"by_{places[row][0]}/{key} {places[row][1]}": value for key, values in columns.items()
                for row, value in zip(held, values.tolist(), strict=True)}

    def _critic_metrics(self) -> dict[str, float]:
        n = self["value_tokens"]
        variance = self["return_squared"] / n - (self["return"] / n) ** 2
        residual = self["error_squared"] / n - (self["error"] / n) ** 2
        return {"critic/loss": self["error_squared"] / n, "critic/value_mean": self["value"] / n,
                "critic/explained_variance": 1.0 - residual / variance if variance > 1e-12 else 0.0,
                "advantage/mean": self["advantage"] / n,
                "advantage/std": float(np.sqrt(max(self["advantage_squared"] / n - (self["advantage"] / n) ** 2, 0)))}


def _shares(fields: np.ndarray) -> dict[str, np.ndarray]:
    """What FIELDS ([7] or [7, buckets]) of some tokens say: shares of them, ESS and discarded mass m as in
    ALGORITHM.md §7."""
    tokens, low, high, recovered, weight, weight_squared, kept_ratio = fields
    return {"dropped": (low + high) / tokens, "dropped_low": low / tokens, "dropped_high": high / tokens,
            "recovered": recovered / tokens, "discarded_mass": 1.0 - kept_ratio / tokens,
            "effective_sample_size": weight**2 / np.maximum(tokens * weight_squared, 1e-12)}


def _bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The bin of each value; the first edge is the least possible value, and the last bin is open."""
    return np.searchsorted(edges[1:-1], values, side="right")


def _in_deciles(table: np.ndarray) -> np.ndarray:
    """[fine bins, FIELDS] -> [10, FIELDS]."""
    result = np.zeros((10, table.shape[1]))
    np.add.at(result, deciles(table[:, 0]), table)
    return result
