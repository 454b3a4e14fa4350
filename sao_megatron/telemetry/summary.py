"""What a run achieved and where its time went, computed from the trajectory store alone."""
from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.progress import duration
from sao_megatron.trajectory.store import EvaluationRow, StepRow, Store

STARTED_AT = "started_at"
"""Key of the store's state: when the launcher started the processes, Unix seconds."""
PHASES = ("wait", "critic", "recompute", "policy", "publish", "checkpoint", "other")


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Compute the summary, write it to run_dir/summary.json and return it.

    Seconds are wall-clock sums over the steps; `total` also has the start-up (until the first step began) and the
    evaluations. Rates are fractions, `lag_*` in policy updates. What the run did not record is None.
    Raises UserError if the folder holds no store.
    """
    folder = RunFolder(Path(run_dir))
    if not folder.store_path.is_file():
        raise UserError(f"{run_dir} is not the folder of a run (it has no {folder.store_path.name}): "
                        f"give one that `sao-megatron train` made, such as runs/<name>")
    with Store(folder.store_path) as store:
        steps, evaluations = store.steps(), store.evaluations()
        summary = _evaluated(evaluations) | _trained(steps) | {
            "not_trained": _not_trained(store),
            "trajectories_trained": store.summary_rows().trained,
            "mixed_version_trajectories": store.summary_rows().mixed_version,
            "seconds": _seconds(steps, evaluations, store.get_state(STARTED_AT))}
    folder.summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _evaluated(evaluations: list[EvaluationRow]) -> dict[str, Any]:
    """The solve rates of start and end are those of the first set: the run's own task's, if that is evaluated."""
    own = evaluations[0].task_set if evaluations else None
    rates = {row.name: row.solved / row.episodes for row in evaluations if row.task_set == own}
    return {"solve_rate_start": rates.get("start"), "solve_rate_end": rates.get("end"),
            "eval_episodes": max((row.episodes for row in evaluations if row.task_set == own), default=0),
            "evaluations": [{"name": row.name, "set": row.task_set, "version": row.version, "episodes": row.episodes,
                             "solve_rate": row.solved / row.episodes, "reward": row.mean_reward, **row.metrics}
                            for row in evaluations]}


def _not_trained(store: Store) -> dict[str, int]:
    """Trajectories by why they were not trained, redundant episodes that were cancelled, prompts in quarantine."""
    beside = {"redundant": store.sum_of("redundant"), "prompts in quarantine": len(store.get_state("quarantined", []))}
    return store.summary_rows().reasons | {reason: count for reason, count in beside.items() if count}


def _trained(steps: list[StepRow]) -> dict[str, Any]:
    lags = [row.metrics["lag/max"] for row in steps if row.metrics.get("lag/max") is not None]
    updates = [row for row in steps if row.metrics.get("policy_updated")]
    return {"steps": len(steps), "mask_rate_mean": _mean(updates, "mask/dropped"), "lag_mean": _mean(steps, "lag/mean"),
            "lag_max": max(lags, default=None),
            "tokens_per_second": {"learner": _rate(steps, "learner/tokens_per_second"),
                                  "engine": _rate(steps, "engine/tokens_per_second")}}


def _mean(steps: list[StepRow], key: str) -> float | None:
    values = [row.metrics[key] for row in steps if row.metrics.get(key) is not None]
    return fmean(values) if values else None


def _rate(steps: list[StepRow], key: str) -> float | None:
    """Mean of a per-second metric over time (a long step counts for more)."""
    rows = [(row.metrics[key], row.metrics.get("seconds/step", 0.0))
            for row in steps if row.metrics.get(key) is not None]
    seconds = sum(weight for _, weight in rows)
    return sum(value * weight for value, weight in rows) / seconds if seconds else None


def _seconds(steps: list[StepRow], evaluations: list[EvaluationRow], started: float | None) -> dict[str, float | None]:
    def spent(row: StepRow, phase: str) -> float:
        return row.metrics.get(f"seconds/{phase}", 0.0)

    seconds = {phase: sum(spent(row, phase) for row in steps) for phase in PHASES}
    begins = [row.time - spent(row, "step") for row in steps]
    ends = [row.time for row in [*steps, *evaluations]]
    known = started is not None
    return {"total": max(ends) - started if known and ends else None, **seconds,
            "start_up": begins[0] - started if known and begins else None}


def show(summary: dict[str, Any]) -> None:
    """Print a summary as a small table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in _rows(summary):
        table.add_row(label, value)
    Console().print(table)


def show_evaluations(summary: dict[str, Any]) -> None:
    """Print the results of each evaluation and set as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("evaluation", "set", "episodes", "errors", "solved", "reward", "pass@k and avg@n"):
        table.add_column(column)
    for row in summary["evaluations"]:
        rates = ", ".join(f"{name} {value:.1%}" for name, value in row.items() if "@" in name)
        table.add_row(row["name"], row["set"], str(row["episodes"]), str(row["errors"]), f"{row['solve_rate']:.1%}",
                      f"{row['reward']:.3f}", rates)
    Console().print(table)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    def form(value: float | None, spec: str) -> str:
        return "–" if value is None else format(value, spec)

    seconds, rates = summary["seconds"], summary["tokens_per_second"]
    phases = ", ".join(f"{phase} {duration(seconds[phase])}" for phase in ("start_up", *PHASES)
                       if seconds[phase] is not None).replace("start_up", "start-up")
    total = "–" if seconds["total"] is None else duration(seconds["total"])
    return [
        ("solve rate", f"{form(summary['solve_rate_start'], '.1%')} → {form(summary['solve_rate_end'], '.1%')} "
                       f"({summary['eval_episodes']} evaluation episodes)"),
        ("learner steps", f"{summary['steps']}, on {summary['trajectories_trained']} trajectories "
                          f"({summary['mixed_version_trajectories']} of mixed versions)"),
        ("masked by DIS", f"{form(summary['mask_rate_mean'], '.2%')} of action tokens"),
        ("lag", f"mean {form(summary['lag_mean'], '.2f')}, largest {form(summary['lag_max'], '.0f')} updates"),
        ("tokens/s", f"learner {form(rates['learner'], ',.0f')}, engines {form(rates['engine'], ',.0f')}"),
        ("time", f"{total} ({phases})")]
