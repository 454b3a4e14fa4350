"""Every metric of a learner step: name, unit, meaning. docs/metrics.md is this table (`python -m …telemetry.metrics`).

Shares are of the step's action tokens unless they say otherwise. tests/unit/test_metrics.py holds the document to the
table; tests/e2e holds the metrics of a real run to it.
"""
from __future__ import annotations

import re
from typing import NamedTuple

from sao_megatron.config import AlarmSection
from sao_megatron.telemetry.alarms import Rule, rules
from sao_megatron.telemetry.buckets import BREAKDOWNS
from sao_megatron.telemetry.machine import GPU_FIELDS


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
    Metric("mask/kept", "share", "neither dropped nor recovered"),
    Metric("mask/dropped_by_trajectory", "share", "mean over trajectories of the dropped share of each: long ones "
           "count no more than short ones"),
    Metric("mask/dropped_low_by_trajectory", "share", "the same of those dropped low"),
    Metric("mask/dropped_high_by_trajectory", "share", "the same of those dropped high"),
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
    Metric("routing/replayed", "share", "action tokens predicted with the experts that the engine had chosen "
           "(rollout.routing_replay)"),
    Metric("lag/mean", "versions", "learner version − version at sampling"),
    Metric("lag/max", "versions", "the same, largest in the batch"),
    Metric("pacing/max_lag", "versions", "lag that pacing admitted: rollout.max_lag, or less (alarms.on_alarm=slow)"),
    Metric("policy/entropy", "nats", "mean entropy of the policy where it chose the action tokens"),
    Metric("policy/grad_norm", "", "before clipping; mean over the mini-batches"),
    Metric("policy/lr", "", "learning rate of the last policy update"),
    Metric("experts/busiest", "layer's mean", "tokens of the busiest expert of any layer in the last policy update, in "
           "units of the mean of its layer's experts; 1 = all equally busy"),
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
    Metric("trajectories/segments", "sequences", "of all trajectories: more than those where contexts were rewritten"),
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
    Metric("learner/flops_per_second", "FLOP/s", "of a learner rank: what the model needs for the step (below), over "
           "seconds/step"),
    Metric("learner/mfu", "share", "the same over the GPU's peak; only on a GPU that telemetry/flops.py knows"),
    Metric("learner/bubble", "share", "of an ideal 1F1B pipeline of equal micro-batches: i / (m + i), i = (p − 1) / v, "
           "for p stages of v chunks and m micro-batches of a policy update"),
    Metric("engine/flops_per_second", "FLOP/s", "of one GPU of an engine (of an engine's rank on a CPU): a forward of "
           "every token of what reached the store, each once, over seconds/step; contexts are taken to be the batch's"),
    Metric("engine/mfu", "share", "the same over the learner's GPU's peak"),
    Metric("queue/ready", "trajectories", "finished and waiting to be trained"),
    Metric("queue/in_flight", "episodes", "being sampled"),
    Metric("machine/memory", "GB", "in use on the machine of rank 0"),
    Metric("machine/memory_share", "share", "of that machine's memory that is not available"),
    Metric("machine/cores", "cores", "of that machine that were busy, mean since the step before"),
    Metric("machine/process_memory", "GB", "resident memory of rank 0"),
)
NUMBERED = (
    *(Metric(f"gpu/{name} …", unit, meaning) for name, (unit, meaning) in GPU_FIELDS.items()),
    Metric("sglang/running …", "requests", "that the engine decodes"),
    Metric("sglang/waiting …", "requests", "that wait in it"),
    Metric("sglang/tokens_per_second …", "tokens/s", "that it samples"),
    Metric("sglang/cache_used …", "share", "of its KV cache"),
    Metric("sglang/cache_hits …", "share", "of prompt tokens that its prefix cache held"),
)
"""One for each GPU or engine: … is rank-0, engine-0.1 or the engine's index."""
ELSEWHERE = (
    Metric("alarm/…", "1", "in TensorBoard, at each step that raised the alarm of this name (below)"),
    Metric("evaluation/solve_rate", "share", "of an evaluation's episodes, the mean over its sets by their weights"),
    Metric("evaluation/<set>/solve_rate", "share", "of the set's episodes"),
    Metric("evaluation/<set>/reward", "reward", "mean of its episodes"),
    Metric("evaluation/<set>/pass@k", "share", "of the set's prompts, those of which one of k episodes is solved, "
           "for k = 1, 2, 4 … samples (an unbiased estimate)"),
    Metric("evaluation/<set>/avg@k", "share", "of the k samples of a prompt, those that are solved, mean over prompts"),
    Metric("evaluation/<set>/errors", "episodes", "of which the environment failed"),
    Metric("evaluation/<set>/first_version", "version", "of the oldest weights that sampled a token of it"),
    Metric("evaluation/<set>/last_version", "version", "of the newest"),
)
"""Scalars of TensorBoard beside a step's metrics. … is an alarm's name, k a number."""
_TASK_MEANING = "task of its trajectory"


def known(name: str) -> bool:
    """Is `name` a metric of the tables, or one of the breakdowns?"""
    if name in {metric.name for metric in METRICS} or f"{name.rpartition(' ')[0]} …" in {m.name for m in NUMBERED}:
        return True
    if any(re.fullmatch(re.escape(m.name).replace("…", r"\w+").replace("<set>", "[^/]+").replace("@k", r"@\d+"), name)
           for m in ELSEWHERE):
        return True
    folder, _, rest = name.partition("/")
    field, _, bucket = rest.partition(" ")
    breakdown = folder.removeprefix("by_")
    if not folder.startswith("by_") or field not in {"tokens", *(name for name, *_ in _MASK)}:
        return False
    return breakdown == "task" or (breakdown in BREAKDOWNS and bucket in BREAKDOWNS[breakdown].names)


def markdown() -> str:
    """docs/metrics.md."""
    rows, numbered, elsewhere = (
        ["| name | unit | meaning |", "|---|---|---|", *(f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in table)]
        for table in (METRICS, NUMBERED, ELSEWHERE))
    meanings = {name: buckets.meaning for name, buckets in BREAKDOWNS.items()} | {"task": _TASK_MEANING}
    buckets = {name: ", ".join(b.names) for name, b in BREAKDOWNS.items()} | {"task": "the tasks' names"}
    broken = ["| breakdown | a token's bucket | buckets |", "|---|---|---|",
              *(f"| `by_{name}/…` | {meaning} | {buckets[name]} |" for name, meaning in meanings.items())]
    alarms = ["| alarm | rings | cause, and what to try |", "|---|---|---|",
              *map(_alarm, rules(AlarmSection(), max_lag=0))]
    return "\n".join((_INTRODUCTION, *rows, "", _BREAKDOWNS, *broken, "", _CLOSING, "",
                      _ELSEWHERE, *elsewhere, "", _MACHINES, *numbered, "", _FLOPS, "", _ALARMS, *alarms))


def _alarm(rule: Rule) -> str:
    side = "above" if rule.clear <= rule.limit else "below"
    return (f"| `{rule.name}` | {side} {rule.limit:g} for {rule.patience} step{'s' * (rule.patience > 1)}; over "
            f"{'below' if side == 'above' else 'above'} {rule.clear:g} | {rule.cause} |")


_INTRODUCTION = """# Metrics

Every learner step writes these to TensorBoard and to the run's store; the axis is the learner step (critic-only steps
included). `writers.jsonl=true` also writes them to metrics.jsonl in the run's folder, one line a step, and
`writers.wandb=<project>` to Weights & Biases (`pip install wandb`; `writers.wandb_mode=offline` for later).

This page is made by `python -m sao_megatron.telemetry.metrics > docs/metrics.md`; a test holds it to the code. Shares
are of the step's action tokens unless they say otherwise. All of it is summed where the tokens are, on the ranks, and
reduced once a step; files are written in a thread beside the learner.
"""
_BREAKDOWNS = """## Broken down

`mask/…` but for `kept` and `…_by_trajectory`, and the share of the step's action tokens (`tokens`), for the tokens of
one bucket: `by_lag/dropped_low 3-4` is the share of the tokens of lag 3 and 4 that were dropped because their ratio is
too low. A bucket without tokens has no value in that step.
"""
_ALARMS = """## Alarms

Rules over these metrics (`telemetry/alarms.py`) with the limits of the config section `alarms`. One that rings is a
line in the terminal and in the learner's log, and a text and a mark (`alarm/…`) in TensorBoard; `alarms.on_alarm` says
whether the run goes on (`warn`), goes on with fresher samples (`slow`), waits until the file `PAUSED` in its folder is
deleted (`pause`) or ends (`stop`). A run that is resumed remembers what its steps so far did to the alarms.

`slow`: while `mask_share`, `effective_sample_size`, `discarded_mass` or `lag_beyond_bound` is raised, pacing admits one
version of lag less than before, and again one less after each 2·(rollout.max_lag + 1) steps in which it is still
raised, down to 0; when none is raised any more it goes up again in the same steps. `pacing/max_lag` shows it. Engines
may wait for the learner meanwhile: that is the price. Other alarms only warn, since fresher samples do not cure them.

Rules about the engine need 30 tokens of lag 0 in a step. `gradient_norm` is in units of its median of the last 50
steps, `entropy_…` of its mean in the first ten updates, `reward_drop` of the best mean of twenty steps (at least 0.1),
`lag_beyond_bound` in versions of mean lag above rollout.max_lag.
"""
_ELSEWHERE = """## Alarms and evaluations

Only in TensorBoard; `sao-megatron summary` has the evaluations too.
"""
_MACHINES = """## Machines

`gpu/… rank-3` is the GPU of learner rank 3, `gpu/… engine-2.0` the first GPU of engine 2, wherever it runs; both need
`nvidia-ml-py`. `sglang/… 2` is what engine 2 says of itself in its /metrics. Engines are looked at every 2 s, and their
GPUs read every 5 s, over which what is a mean here is taken of an engine's.
"""
_FLOPS = """### FLOPs and MFU

Of one token, a forward takes (`telemetry/flops.py`; h hidden size, L layers, H heads, d head size, V vocabulary):

- attention's projections, 2·L·h·d·(2H + 2·key/value heads), with latents theirs; scores and sums, 4·L·H·d for each pair
  of a query and a key before it;
- MLP: 6·h·width in a dense layer; in one with E experts 2·h·E for the router and 6·h·expert width·(k + shared experts);
- the head, 2·h·V, only where an action token is predicted.

A step takes three forwards (one forward, one backward) of the policy, of the critic (without head) for each of its K
updates, and one of the policy where its behaviour policy is recomputed. Padding, norms and what is computed twice do
not count. `tests/unit/test_flops.py` holds the numbers of a forward to those that PyTorch counts in Transformers'
models. Peaks are NVIDIA's for dense bfloat16."""
_CLOSING = """Histograms: `lag/tokens` and `ratio/log` (log r, 120 fixed bins from −3 to 3 and two open ones), the same
bins in every step and run. Images: `heat/…`, the dropped share by bucket and step, `heat/seconds`, the seconds of a
step by phase, and `heat/advantage_ratio`, the last step's action tokens by advantage and log r. They are drawn every
ten steps, or less often where that would take more than 1 % of the time, and at the end. The custom-scalars page is the
place to start: reward, dropped share by side, effective sample size, discarded mass, lag.

The text `worst`, every 50 steps, has the token strings that were dropped most since the last one, and the trajectories
that lost most tokens, each token with its fate. Its links lead to the page of the trajectory's step that
`sao-megatron inspect runs/<name> --serve` shows to browsers on the same machine, or, with `tokens.page`, to the address
under which you serve a page of `inspect --html`."""

if __name__ == "__main__":
    print(markdown())
