"""`sao-megatron status`: how a run is doing, from its folder alone and without disturbing it.

Everything comes from files that the run writes anyway (store, checkpoints, journal, logs), opened for reading, so any
machine that sees the folder will do; only the engines are asked over the network whether they live.
"""
from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from sao_megatron.checkpoints import Checkpoint
from sao_megatron.config import RunConfig
from sao_megatron.engine.process import answers
from sao_megatron.errors import RunError, UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.events import Event, read
from sao_megatron.telemetry.progress import duration
from sao_megatron.telemetry.summary import PHASES
from sao_megatron.trajectory.store import EvaluationRow, StepRow, Store

LAST = 20
"""Steps that means are taken over."""
SHOWN = 5
"""Restarts that are shown, the newest."""
WATCH_SECONDS = 5.0
ENGINE_SECONDS = 2.0
"""For all engines to answer."""
USUAL = {"start", "end"}
"""Kinds of events that say nothing of what went wrong."""


@dataclass
class Status:
    config: RunConfig
    now: float
    """Unix seconds, as all times here."""
    steps: list[StepRow] = field(default_factory=list)
    """The last ones."""
    evaluations: list[EvaluationRow] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """Of the store: finished, in_flight, warmup."""
    counts: dict[str, int] = field(default_factory=dict)
    engines: dict[str, bool] = field(default_factory=dict)
    """Whether the engine at each URL answers."""
    checkpoint: Checkpoint | None = None
    events: list[Event] = field(default_factory=list)
    sign_of_life: float | None = None
    """When a log or the store was written last."""
    paused: str | None = None
    """Why the run waits."""


def collect(run_dir: Path) -> Status:
    """Raises UserError if this is not the folder of a run, RunError if its store cannot be read."""
    folder = RunFolder(run_dir)
    if folder.submitted_path.is_file() and not folder.config_path.is_file():
        raise UserError(f"{run_dir} was submitted, and its job has not begun yet: look at `squeue --me "
                        f"--name={run_dir.name} --start`, and at {run_dir}.slurm-<job>.out if it is not in the queue")
    status = Status(folder.config(), time.time(), checkpoint=folder.checkpoints.latest(),
                    events=read(folder.events_path), sign_of_life=_last_write(folder))
    if folder.paused_path.is_file():
        status.paused = folder.paused_path.read_text().strip()
    with suppress(UserError):  # the engines were not placed yet
        status.engines = _ask(folder.engine_urls())
    if folder.store_path.is_file():
        _read_store(folder.store_path, status)
    return status


def _read_store(path: Path, status: Status) -> None:
    try:
        with Store(path, read_only=True) as store:
            status.steps = store.last_steps(LAST)
            status.evaluations, status.counts = store.evaluations(), store.counts()
            status.state = {key: store.get_state(key) for key in ("finished", "warmup")} | {
                "in_flight": store.sum_of("in_flight")}
    except sqlite3.Error as error:
        raise RunError(f"trajectory store {path} cannot be read ({error}): try again") from None


def _ask(urls: list[str]) -> dict[str, bool]:
    if not urls:
        return {}
    with ThreadPoolExecutor(min(32, len(urls))) as pool:
        return dict(zip(urls, pool.map(lambda url: answers(url, ENGINE_SECONDS), urls), strict=True))


def _last_write(folder: RunFolder) -> float | None:
    files = [folder.store_path, Path(f"{folder.store_path}-wal"), *folder.log_dir.rglob("*.log")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=None)


def rows(status: Status) -> list[tuple[str, str]]:
    """(label, text) of each line that is shown."""
    last = status.steps[-1].metrics if status.steps else {}
    found = [("run", f"{status.config.run_dir}: {_doing(status)}"), ("step", _step(status)),
             ("reward", f"{_form(last, 'reward/mean', '.3f')}, {LAST}-step mean {_mean(status, 'reward/mean', '.3f')}; "
                        f"solved {_form(last, 'reward/solve_rate', '.0%')}"),
             ("tokens/s", f"learner {_mean(status, 'learner/tokens_per_second', ',.0f')}, engines "
                          f"{_mean(status, 'engine/tokens_per_second', ',.0f')}"),
             ("lag", f"mean {_mean(status, 'lag/mean', '.1f')}, largest {_form(last, 'lag/max', '.0f')} versions"),
             ("masked", f"{_mean(status, 'mask/dropped', '.2%')} of action tokens"),
             ("queue", f"{status.counts.get('ready', 0)} trajectories ready of {status.config.batch.trajectories}, "
                       f"{status.state.get('in_flight') or 0} episodes in flight"),
             ("engines", _engines(status)), ("time", _phases(status)), ("checkpoint", _checkpoint(status))]
    if status.evaluations:
        found.append(("evaluation", ", ".join(f"{row.name}: {row.solved / max(1, row.episodes):.1%} of {row.episodes}"
                                              for row in status.evaluations[-3:])))
    return found + _restarts(status)


def _doing(status: Status) -> str:
    last = status.events[-1] if status.events else None
    silent = "" if status.sign_of_life is None else f"last sign of life {_ago(status, status.sign_of_life)}"
    if status.state.get("finished"):
        return "finished" if last and last.kind == "end" else "trained to its last step; " + silent
    if status.paused:
        return f"paused until the file PAUSED is deleted: {status.paused}"
    if last and last.kind in ("failure", "end"):
        return f"ended {_ago(status, last.time)}: {last.why}"
    if last and last.kind == "requeue":
        return f"back in the queue since {_ago(status, last.time)}: {last.why}"
    return silent or "nothing was started yet"


def _step(status: Status) -> str:
    total = status.config.total_steps
    if not status.steps:
        warmup = status.state.get("warmup")
        return f"0 of {total}" + (f" (warm-up step {warmup['step']} of {warmup['steps']})" if warmup else "")
    row = status.steps[-1]
    seconds = fmean(row.metrics.get("seconds/step", 0.0) for row in status.steps)
    left = duration((total - row.step - 1) * seconds)
    return f"{row.step + 1} of {total}, the last {_ago(status, row.time)}; {seconds:.1f} s a step, {left} left"


def _engines(status: Status) -> str:
    if not status.engines:
        return "not placed yet"
    silent = [url for url, alive in status.engines.items() if not alive]
    return f"{len(status.engines) - len(silent)} of {len(status.engines)} answer" + (
        f"; silent: {', '.join(silent[:SHOWN])}" if silent else "")


def _phases(status: Status) -> str:
    """Mean seconds of a step by phase."""
    means = {phase: fmean(row.metrics.get(f"seconds/{phase}", 0.0) for row in status.steps) for phase in PHASES
             } if status.steps else {}
    total = sum(means.values())
    return ", ".join(f"{phase} {seconds:.1f} s ({seconds / total:.0%})" for phase, seconds in means.items()
                     if seconds >= 0.01 * total > 0) or "–"


def _checkpoint(status: Status) -> str:
    if status.checkpoint is None:
        return "none yet" if status.config.checkpoint.every else "none: checkpoint.every is 0"
    try:
        written = status.checkpoint.state().get("written")
    except UserError as error:
        return str(error)
    return f"step {status.checkpoint.step}" + (f", written {_ago(status, written)}" if written else "")


def _restarts(status: Status) -> list[tuple[str, str]]:
    wrong = [event for event in status.events if event.kind not in USUAL]
    if not wrong:
        return [("restarts", "none")]
    lines = [("restarts", f"{len(wrong)}" + (f", the last {SHOWN}:" if len(wrong) > SHOWN else ":"))]
    for event in wrong[-SHOWN:]:
        when = datetime.fromtimestamp(event.time).strftime("%d %b %H:%M:%S") + f", job {event.job}" * bool(event.job)
        lines.append(("", f"{when}: {event.kind.replace('_', ' ')} {event.what}: {event.why}"))
    return lines


def _ago(status: Status, when: float) -> str:
    return f"{duration(max(0.0, status.now - when))} ago"


def _form(metrics: dict[str, Any], key: str, spec: str) -> str:
    return "–" if metrics.get(key) is None else format(metrics[key], spec)


def _mean(status: Status, key: str, spec: str) -> str:
    values = [row.metrics[key] for row in status.steps if row.metrics.get(key) is not None]
    return format(fmean(values), spec) if values else "–"


def show(run_dir: Path, watch: bool = False) -> None:
    """Print the status: a table on a terminal, plain lines elsewhere. `watch`: again and again, until interrupted."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    found = rows(collect(run_dir))
    if not console.is_terminal:
        print(_lines(found), flush=True)
        while watch:
            time.sleep(WATCH_SECONDS)
            print("", _lines(rows(collect(run_dir))), sep="\n", flush=True)
        return
    with Live(_table(found), console=console, auto_refresh=False) as live:
        while watch:
            time.sleep(WATCH_SECONDS)
            live.update(_table(rows(collect(run_dir))), refresh=True)


def _table(found: list[tuple[str, str]]):
    from rich.table import Table
    from rich.text import Text
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, text in found:
        table.add_row(Text(label, style="bold"), Text(text))
    return table


def _lines(found: list[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<11}{text}" for label, text in found)
