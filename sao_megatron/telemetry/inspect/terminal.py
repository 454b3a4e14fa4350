"""The report of a run in the terminal: over its steps, by lag, side and task, dropped tokens, worst trajectories."""
from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao_megatron.telemetry.inspect import data
from sao_megatron.telemetry.inspect.data import Run

METRICS = {"reward/mean": ("reward", "{:.3f}"), "reward/solve_rate": ("solved", "{:.1%}"),
           "mask/dropped_low": ("dropped low", "{:.2%}"), "mask/dropped_high": ("dropped high", "{:.2%}"),
           "mask/effective_sample_size": ("effective sample size", "{:.3f}"),
           "mask/discarded_mass": ("discarded mass m", "{:+.4f}"), "lag/mean": ("lag, versions", "{:.2f}"),
           "policy/entropy": ("entropy, nats", "{:.3f}"), "critic/explained_variance": ("explained variance", "{:.3f}")}
MOST = 10
"""Rows of the lists of tokens and trajectories."""


def report(run: Run, other: Run | None = None, console: Console | None = None) -> None:
    """Print it; `other` stands beside `run` where the two can be compared."""
    console = console or Console()
    runs = [run, *([other] if other else [])]
    for one in runs:
        recorded = data.per_trajectory(one)["chosen"]
        console.print(f"[bold]{one.name}[/]: steps {one.column('step').min()} to {one.column('step').max()}, "
                      f"{len(recorded):,} trajectories recorded ({recorded.count('worst'):,} of them as the worst of "
                      f"their step), {len(one.table):,} tokens")
    console.print(_metrics(runs))
    tables = [_groups("By lag (versions)", runs, data.by_lag), _groups("By task", runs, data.by_task)]
    tables += [table for one in runs for table in (_sides(one), _words(one), _worst(one))]
    if not tables[0].row_count:
        console.print("\nThe policy was not updated in these steps, so no token has a fate.")
        return
    console.print("\nFrom here on: action tokens of the seeded sample; the worst trajectories are of all recorded.",
                  style="dim")
    for table in tables:
        console.print(table if table.row_count else Text(f"{table.title}: nothing was dropped"))


def _new(title: str, runs: list[Run], *columns: str, texts: int = 1) -> Table:
    """A table whose first `texts` columns are text and the others numbers."""
    table = Table(title="\n" + title + (f" of {runs[0].name}" if len(runs) == 1 else ""), title_justify="left",
                  title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", no_wrap=True)
    return table


def _metrics(runs: list[Run]) -> Table:
    columns = [f"{run.name}: {when}" for run in runs for when in ("first tenth", "last tenth")]
    table = _new("Over the steps, all tokens", runs, "", *columns)
    for name, (label, form) in METRICS.items():
        cells = []
        for run in runs:
            values = [row.metrics[name] for row in run.steps if row.metrics.get(name) is not None]
            tenth = max(1, len(values) // 10)
            cells += [form.format(np.mean(part)) if part else "–" for part in (values[:tenth], values[-tenth:])]
        table.add_row(label, *cells)
    return table


def _groups(title: str, runs: list[Run], split) -> Table:
    table = _new(title, runs, "", *(["run"] if len(runs) > 1 else []), "tokens", "dropped low", "dropped high",
                 "recovered", "ESS", "m", texts=len(runs))
    found = [{group.name: group for group in split(run)} for run in runs]
    for name in dict.fromkeys(name for groups in found for name in groups):
        for run, groups in zip(runs, found, strict=True):
            if group := groups.get(name):
                table.add_row(
                    name, *([run.name] if len(runs) > 1 else []), f"{group.tokens:,}", f"{group.dropped_low:.2%}",
                    f"{group.dropped_high:.2%}", f"{group.recovered:.2%}", f"{group.effective_sample_size:.3f}",
                    f"{group.discarded_mass:+.4f}")
    return table


def _sides(run: Run) -> Table:
    table = _new("By fate", [run], "", "tokens", "share", "median ratio", "A > 0", "lag", "entropy")
    columns = {name: run.column(name) for name in ("ratio", "advantage", "lag", "entropy")}
    for index, fate in enumerate(data.FATES):
        rows = run.sampled & (run.fates == index)
        if rows.any():
            seen = {name: values[rows] for name, values in columns.items()}
            table.add_row(fate.replace("_", " "), f"{rows.sum():,}", f"{rows.sum() / run.sampled.sum():.2%}",
                          f"{np.median(seen['ratio']):.3g}", f"{np.mean(seen['advantage'] > 0):.0%}",
                          f"{seen['lag'].mean():.2f}", f"{seen['entropy'].mean():.3f}")
    return table


def _words(run: Run) -> Table:
    table = _new("Most dropped tokens", [run], "token", "id", "dropped", "of sampled", "share", "low", "high")
    for word in data.most_dropped(run, MOST):
        dropped = word.low + word.high
        table.add_row(Text(repr(word.text) if word.text else "–"), str(word.id), f"{dropped:,}", f"{word.tokens:,}",
                      f"{dropped / word.tokens:.1%}", f"{word.low:,}", f"{word.high:,}")
    return table


def _worst(run: Run) -> Table:
    table = _new("Worst trajectories", [run], "trajectory", "prompt", "step", "reward", "dropped", "of actions", "lag",
                 texts=2)
    each = data.per_trajectory(run)
    for index in np.argsort(-each["dropped"], kind="stable")[:MOST]:
        if not each["dropped"][index]:
            break
        low, high = each["lag_min"][index], each["lag_max"][index]
        table.add_row(each["trajectory"][index][:12], Text(each["prompt"][index][:40]), str(each["step"][index]),
                      f"{each['reward'][index]:g}", f"{each['dropped'][index]:.0%}", f"{each['actions'][index]:,}",
                      f"{low}" if low == high else f"{low}–{high}")
    return table
