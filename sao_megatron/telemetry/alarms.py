"""Alarms: rules over a step's metrics that say in one sentence what is wrong, the likely cause and what to try.

A rule is raised after `patience` steps in a row beyond its limit, and cleared only when the value is back behind
`clear`, so that a value that wavers around the limit does not ring at every step. A metric that a step lacks (no token
of lag 0, no critic) neither raises nor clears. Rules about a change compare with the run's own past.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

FEWEST_FRESH = 30
"""Tokens of lag 0 that the rules about engine and learner need."""
MEMORY = 50
"""Steps that `relative` rules look back."""


@dataclass(frozen=True)
class Rule:
    name: str
    value: Callable[[dict[str, float], History], float | None]
    limit: float
    """Raised beyond it: above if `clear` lies below it, else below."""
    clear: float
    patience: int
    cause: str

    def beyond(self, value: float) -> bool:
        return value > self.limit if self.clear <= self.limit else value < self.limit

    def back(self, value: float) -> bool:
        return value < self.clear if self.clear <= self.limit else value > self.clear


class History:
    """What the relative rules remember of earlier steps."""

    def __init__(self):
        self._recent: dict[str, deque[float]] = {}
        self.first: dict[str, float] = {}
        """Mean of the first ten values."""
        self.best: dict[str, float] = {}
        """Largest mean of twenty values in a row."""

    def recent(self, name: str) -> deque[float]:
        return self._recent.setdefault(name, deque(maxlen=MEMORY))

    def add(self, metrics: dict[str, float]) -> None:
        for name in ("policy/grad_norm", "policy/entropy", "reward/mean"):
            if name not in metrics:
                continue
            values = self.recent(name)
            values.append(metrics[name])
            if len(values) == 10:
                self.first.setdefault(name, fmean(values))
            if len(values) >= 20:
                self.best[name] = max(self.best.get(name, float("-inf")), fmean(list(values)[-20:]))


def _metric(name: str) -> Callable[[dict[str, float], History], float | None]:
    return lambda metrics, _: metrics.get(name)


def _of_fresh(name: str) -> Callable[[dict[str, float], History], float | None]:
    return lambda metrics, _: metrics.get(name) if metrics.get("mismatch/tokens", 0) >= FEWEST_FRESH else None


def _grad_norm_jump(metrics: dict[str, float], history: History) -> float | None:
    past = history.recent("policy/grad_norm")
    if len(past) < 10 or "policy/grad_norm" not in metrics:
        return None
    return metrics["policy/grad_norm"] / max(median(past), 1e-9)


def _entropy_change(metrics: dict[str, float], history: History) -> float | None:
    """Entropy as a share of what it was at the start."""
    first = history.first.get("policy/entropy")
    return metrics["policy/entropy"] / max(first, 1e-9) if first and "policy/entropy" in metrics else None


def _entropy_collapse(metrics: dict[str, float], history: History) -> float | None:
    """The same, unless the reward is near its best: a task that is solved is played without doubt."""
    past = history.recent("reward/mean")
    if len(past) >= 20 and fmean(list(past)[-20:]) > 0.9 * history.best["reward/mean"] > 0:
        return None
    return _entropy_change(metrics, history)


def _reward_drop(metrics: dict[str, float], history: History) -> float | None:
    """How much of the best twenty-step mean the last twenty steps have lost, in units of max(|best|, 0.1)."""
    past = history.recent("reward/mean")
    if len(past) < 20:
        return None
    best = history.best["reward/mean"]
    return (best - fmean(list(past)[-20:])) / max(abs(best), 0.1)


def _beyond_bound(max_lag: int) -> Callable[[dict[str, float], History], float | None]:
    """Versions by which the batch is older, on average, than pacing aims at: only overtaken trajectories can be."""
    return lambda metrics, _: metrics["lag/mean"] - max_lag if "lag/mean" in metrics else None


def rules(section, max_lag: int) -> tuple[Rule, ...]:
    """The rules with the limits of config section `alarms`; `max_lag` is rollout.max_lag."""
    shuffled, tempered = "mismatch/correlation", "mismatch/slope"
    return (
        Rule("logprobs_misplaced", _of_fresh(shuffled), 0.5, 0.8, 1,
             "at lag 0 the rollout's log-probs hardly follow the learner's: they belong to other tokens (shuffled, "
             "shifted by one) or to another model. Stop, and look at one trajectory with `sao-megatron inspect`"),
        Rule("temperature_differs", lambda m, h: abs(v) if (v := _of_fresh(tempered)(m, h)) is not None
             and m[shuffled] >= 0.8 else None, section.mismatch_slope, section.mismatch_slope / 2, 2,
             "at lag 0 the difference of learner and engine grows in proportion to the log-prob: the engine samples at "
             "another temperature than algorithm.temperature. Compare the two"),
        Rule("engine_mismatch", _of_fresh("mismatch/mean"), section.mismatch, section.mismatch / 2, 2,
             "at lag 0 engine and learner give the same tokens different log-probs. From the first step on: dropout is "
             "not 0, or a kernel, a dtype or a weight differs; later: the engine's weights are older than their "
             "version says, or a tensor was not published. Run with publication.verify_every=1"),
        Rule("mask_share", _metric("mask/dropped"), section.mask_share, section.mask_share / 2, 5,
             "the gate drops much of the batch: the samples are too old for this learning rate. Lower rollout.max_lag "
             "or the learning rate; see which lags are dropped under by_lag/"),
        Rule("effective_sample_size", _metric("mask/effective_sample_size"), section.effective_sample_size,
             min(1.0, 1.2 * section.effective_sample_size), 5,
             "few tokens carry most of the update. Lower rollout.max_lag or the learning rate, or enlarge the batch"),
        Rule("discarded_mass", _metric("mask/discarded_mass"), section.discarded_mass, section.discarded_mass / 2, 5,
             "the gate discards much of what the current policy would do, so the update is biased towards what the old "
             "one did. Lower rollout.max_lag or the learning rate"),
        Rule("lag_beyond_bound", _beyond_bound(max_lag), section.lag_beyond_bound, section.lag_beyond_bound / 2, 10,
             "the batches are older on average than rollout.max_lag allows in order of admission: long episodes are "
             "overtaken by later ones. Set rollout.max_token_lag, or lower rollout.max_lag or rollout.max_tokens"),
        Rule("gradient_norm", _grad_norm_jump, section.gradient_norm, section.gradient_norm / 2, 1,
             "the policy's gradient norm jumped against its median of the last 50 steps. Look at this step's worst "
             "trajectories; if it repeats, lower the learning rate or clip_grad"),
        Rule("entropy_collapse", _entropy_collapse, section.entropy_collapse, 2 * section.entropy_collapse, 5,
             "the policy has become nearly deterministic although the reward is not at its best, so nothing new is "
             "tried. Lower the learning rate or give algorithm.entropy_coef a value"),
        Rule("entropy_growth", _entropy_change, section.entropy_growth, 0.7 * section.entropy_growth, 5,
             "the policy is drifting towards uniform. Lower the learning rate or algorithm.entropy_coef; see whether "
             "the format of the actions is still kept"),
        Rule("reward_drop", _reward_drop, section.reward_drop, section.reward_drop / 2, 1,
             "the mean reward of twenty steps has fallen far below the best so far: a collapse has begun. Go back to a "
             "checkpoint before it, with a lower learning rate or lag"),
        Rule("explained_variance", _metric("critic/explained_variance"), section.explained_variance,
             section.explained_variance / 2, 20,
             "the critic predicts worse than a constant would. Raise critic_optimizer.lr or critic_only_steps, or "
             "start from a critic made by `sao-megatron pretrain-value`"),
    )


class Alarms:
    """Feed it every step's metrics; `raised` holds the names of the rules that are raised now."""

    def __init__(self, section, max_lag: int):
        """`section` is the config's `alarms`, `max_lag` its rollout.max_lag."""
        self.rules, self.history = rules(section, max_lag), History()
        self.raised: set[str] = set()
        self._beyond = dict.fromkeys((rule.name for rule in self.rules), 0)

    def check(self, metrics: dict[str, float]) -> list[str]:
        """The sentences of the rules that this step raises."""
        sentences = []
        for rule in self.rules:
            value = rule.value(metrics, self.history)
            if value is None:
                continue
            self._beyond[rule.name] = self._beyond[rule.name] + 1 if rule.beyond(value) else 0
            if rule.name in self.raised and rule.back(value):
                self.raised.discard(rule.name)
            elif rule.name not in self.raised and self._beyond[rule.name] >= rule.patience:
                self.raised.add(rule.name)
                sentences.append(f"{rule.name} = {value:.3g} (limit {rule.limit:g}): {rule.cause}")
        self.history.add(metrics)
        return sentences
