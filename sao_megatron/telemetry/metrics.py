"""Every metric of a learner step: name, unit, meaning. docs/metrics.md is this table (`python -m …telemetry.metrics`).

Shares are of the step's action tokens unless they say otherwise. tests/unit/test_metrics.py holds the document to the
table; tests/e2e holds the metrics of a real run to it.
"""
from __future__ import annotations

from typing import NamedTuple

from sao_megatron.config import AlarmSection
from sao_megatron.telemetry.alarms import Rule, rules
from sao_megatron.telemetry.buckets import BREAKDOWNS


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


_MASK = (
    ("dropped", "share", "the gate gave weight 0: no gradient"),
    ("dropped_low", "share", "dropped because the ratio is too low (DIS: r ≤ 1 − ε_l): the policy has moved away"),
    ("dropped_high", "share", "dropped because the ratio is too high (DIS: r ≥ 1 + ε_h)"),
    ("recovered", "share", "outside the band, kept at its edge (recovering DIS, CISPO, truncated weights)"),
    ("discarded_mass", "probability",
     "m = 1 − mean of r·1{kept}: the share of the current policy's probability that the gate discards (ALGORITHM.md "
     "§7). An estimate: negative or large where few tokens have most of the weight"),
    ("effective_sample_size", "share", "(Σw)² / (N·Σw²) of the gate's weights; 1 = all tokens count alike"),
)

METRICS = (
    *(Metric(f"mask/{name}", unit, meaning) for name, unit, meaning in _MASK),
    Metric("mask/dropped_by_trajectory", "share", "mean over trajectories of the dropped share of each"),
    Metric("ratio/log_mean", "nats", "mean of log r, r = π_θ / π_rollout"),
    Metric("ratio/log_abs_mean", "nats", "mean of |log r|: how far the policy has moved from what sampled the batch"),
    Metric("mismatch/mean", "nats", "mean |log r| of the tokens of lag 0, which the same weights sampled and trained: "
           "the numerical difference of engine and learner"),
    Metric("mismatch/p99", "nats", "99th percentile of it (upper edge of a bin; 20 bins a factor of 10)"),
    Metric("mismatch/max", "nats", "largest of it (upper edge of its bin)"),
    Metric("mismatch/slope", "", "least-squares slope of log r on log π_rollout at lag 0: T − 1 where the engine "
           "samples at temperature T times the learner's"),
    Metric("mismatch/correlation", "", "of log π_θ and log π_rollout at lag 0; 1 where they belong to the same tokens"),
    Metric("mismatch/tokens", "tokens", "action tokens of lag 0 in the batch"),
    Metric("lag/mean", "versions", "learner version − version at sampling"),
    Metric("lag/max", "versions", "the same, largest in the batch"),
    Metric("policy/entropy", "nats", "mean entropy of the policy where it chose the action tokens"),
    Metric("policy/grad_norm", "", "before clipping; mean over the mini-batches"),
    Metric("policy/lr", "", "learning rate of the last policy update"),
    Metric("policy_updated", "0 or 1", "0 in the critic-only steps"),
    Metric("critic/loss", "reward²", "mean squared error of the values before the step's first critic update"),
    Metric("critic/explained_variance", "share", "1 − Var(return − value) / Var(return), before the first update"),
    Metric("critic/value_mean", "reward", "mean value"),
    Metric("critic/grad_norm", "", "before clipping; of the last of the K updates"),
    Metric("critic/lr", "", "learning rate of the last critic update"),
    Metric("advantage/mean", "reward", "mean advantage of the critic's GAE (before whitening)"),
    Metric("advantage/std", "reward", "standard deviation of it"),
    Metric("preference/ties", "pairs", "pairs with equal rewards (online_dpo)"),
    Metric("reward/mean", "reward", "mean outcome of the batch's trajectories"),
    Metric("reward/solve_rate", "share", "of the batch's trajectories, those that the task calls solved"),
    Metric("trajectories/count", "trajectories", "size of the batch"),
    Metric("trajectories/mixed_version", "trajectories", "those sampled from more than one weight version"),
    Metric("trajectories/truncated", "trajectories", "those that a budget cut off"),
    Metric("tokens/action", "tokens", "action tokens of the batch"),
    Metric("tokens/total", "tokens", "all tokens of the batch"),
    Metric("seconds/wait", "s", "waiting for trajectories"),
    Metric("seconds/critic", "s", "critic updates and advantages"),
    Metric("seconds/recompute", "s", "the further forward pass of presets whose behaviour policy is not the rollout"),
    Metric("seconds/policy", "s", "policy forward, backward and update"),
    Metric("seconds/publish", "s", "the previous step's publication of weights"),
    Metric("publication/paused", "s", "in which the engines sampled nothing for the previous step's publication"),
    Metric("seconds/checkpoint", "s", "what saving takes of the step, not the writing beside it"),
    Metric("seconds/other", "s", "the rest of the step"),
    Metric("seconds/step", "s", "since the previous step was recorded"),
    Metric("learner/tokens_per_second", "tokens/s", "tokens/total over seconds/step"),
    Metric("engine/tokens_per_second", "tokens/s", "action tokens that reached the store, over seconds/step"),
    Metric("queue/ready", "trajectories", "finished and waiting to be trained"),
    Metric("queue/in_flight", "episodes", "being sampled"),
)
_TASK_MEANING = "task of its trajectory"


def known(name: str) -> bool:
    """Is `name` a metric of the table, or one of its breakdowns?"""
    if name in {metric.name for metric in METRICS}:
        return True
    folder, _, rest = name.partition("/")
    field, _, bucket = rest.partition(" ")
    breakdown = folder.removeprefix("by_")
    if not folder.startswith("by_") or field not in {"tokens", *(name for name, *_ in _MASK)}:
        return False
    return breakdown == "task" or (breakdown in BREAKDOWNS and bucket in BREAKDOWNS[breakdown].names)


def markdown() -> str:
    """docs/metrics.md."""
    rows = ["| name | unit | meaning |", "|---|---|---|",
            *(f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS)]
    meanings = {name: buckets.meaning for name, buckets in BREAKDOWNS.items()} | {"task": _TASK_MEANING}
    buckets = {name: ", ".join(b.names) for name, b in BREAKDOWNS.items()} | {"task": "the tasks' names"}
    broken = ["| breakdown | a token's bucket | buckets |", "|---|---|---|",
              *(f"| `by_{name}/…` | {meaning} | {buckets[name]} |" for name, meaning in meanings.items())]
    alarms = ["| alarm | rings | cause, and what to try |", "|---|---|---|", *map(_alarm, rules(AlarmSection()))]
    return "\n".join((_INTRODUCTION, *rows, "", _BREAKDOWNS, *broken, "", _CLOSING, "", _ALARMS, *alarms))


def _alarm(rule: Rule) -> str:
    side = "above" if rule.clear <= rule.limit else "below"
    return (f"| `{rule.name}` | {side} {rule.limit:g} for {rule.patience} step{'s' * (rule.patience > 1)}; over "
            f"{'below' if side == 'above' else 'above'} {rule.clear:g} | {rule.cause} |")


_INTRODUCTION = """# Metrics

Every learner step writes these to TensorBoard and to the run's store; the axis is the learner step (critic-only steps
included). This page is made by `python -m sao_megatron.telemetry.metrics > docs/metrics.md`; a test holds it to the
code. Shares are of the step's action tokens unless they say otherwise. All of it is summed where the tokens are, on
the ranks, and reduced once a step.
"""
_BREAKDOWNS = """## Broken down

`mask/…` but for `dropped_by_trajectory`, and the share of the step's action tokens (`tokens`), for the tokens of one
bucket: `by_lag/dropped_low 3-4` is the share of the tokens of lag 3 and 4 that were dropped because their ratio is too
low. A bucket without tokens has no value in that step.
"""
_ALARMS = """## Alarms

Rules over these metrics (`telemetry/alarms.py`) with the limits of the config section `alarms`. One that rings is a
line in the learner's log and a text in TensorBoard; `alarms.on_alarm` says whether the run goes on (`warn`), waits
until the file `PAUSED` in its folder is deleted (`pause`) or ends (`stop`). Rules about the engine need 30 tokens of
lag 0 in a step. `gradient_norm` is in units of its median of the last 50 steps, `entropy_…` of its mean in the first
ten updates, `reward_drop` of the best mean of twenty steps (at least 0.1).
"""
_CLOSING = """Histograms: `lag/tokens` and `ratio/log` (log r, 120 fixed bins from −3 to 3 and two open ones), the same
bins in every step and run. Images, redrawn every 50 steps: `heat/…`, the dropped share by bucket and step, and
`heat/advantage_ratio`, the step's action tokens by advantage and log r. The custom-scalars page is the place to start:
reward, dropped share by side, effective sample size, discarded mass, lag."""

if __name__ == "__main__":
    print(markdown())
