"""What a person sees while a run runs: a line per start-up stage, then a line per learner step.

On a terminal the line of the current step is rewritten in place; elsewhere (a file, CI) plain lines come, at most one
per 2 s. Nothing is silent for longer than 5 s.
"""
from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from sao_megatron.telemetry.events import Events, Kind

PLAIN_INTERVAL = 2.0
"""Least seconds between two step lines where there is no terminal."""
SILENCE = 5.0
"""Most seconds without a line."""
_ETA_STEPS = 20  # the time left is judged by this many last steps


class Progress:
    """Prints to `out`; `total_steps` counts critic-only steps and policy updates."""

    def __init__(self, total_steps: int, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic,
                 journal: Events | None = None):
        self._total = total_steps
        self._journal = journal
        self.saved_step = 0
        """Learner steps in the newest checkpoint, for the journal."""
        self._out = out or sys.stdout
        self._clock = clock
        self._live = self._out.isatty()
        self._began = self._printed = self._step_printed = clock()
        self._status = ""
        self._pending: str | None = None
        self._seconds: list[float] = []

    def note(self, text: str) -> None:
        """One line that stays."""
        self._write(f"[{self._clock() - self._began:5.0f} s] {text}", stays=True)

    def event(self, kind: Kind, what: str, text: str) -> None:
        """A note that the run's journal keeps too (telemetry/events.py)."""
        self.note(text)
        self.record(kind, what, text)

    def record(self, kind: Kind, what: str, text: str) -> None:
        """For the journal alone."""
        if self._journal is not None:
            self._journal.add(kind, what, text, self.saved_step)

    def status(self, text: str) -> None:
        """What the run is doing now: printed when it changes, and again when nothing was printed for a while."""
        if text != self._status or self._clock() - self._printed >= SILENCE:
            self._status = text
            self._write(f"[{self._clock() - self._began:5.0f} s] {text}", stays=not self._live)

    def quiet(self) -> bool:
        """Whether it is time to say something because nothing was printed for a while."""
        return self._clock() - self._printed >= SILENCE

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """One learner step, `step` counted from 1, as the store recorded it."""
        self._seconds = [*self._seconds, metrics.get("seconds/step", 0.0)][-_ETA_STEPS:]
        left = (self._total - step) * sum(self._seconds) / len(self._seconds)
        self._pending = step_line(step, self._total, metrics, left)
        if self._live or step >= self._total:
            self.flush()

    def flush(self, now: bool = True) -> None:
        """Print the latest step that was held back; `now=False`: only if the last one is long enough ago."""
        if self._pending and (now or self._clock() - self._step_printed >= PLAIN_INTERVAL):
            self._write(self._pending, stays=not self._live)
            self._pending, self._step_printed = None, self._clock()

    def close(self) -> None:
        """Leave the cursor at the start of an empty line."""
        self.flush()
        if self._live:
            self._out.write("\n")
            self._out.flush()

    def _write(self, line: str, stays: bool) -> None:
        if self._live:
            line = "\r\x1b[2K" + line[:shutil.get_terminal_size().columns - 1]
        self._out.write(line + ("\n" if stays else ""))
        self._out.flush()
        self._printed = self._clock()


def step_line(step: int, total: int, metrics: dict[str, Any], seconds_left: float) -> str:
    """One step in one line; a metric that the learner did not write shows as –."""

    def show(key: str, form: str) -> str:
        return "–" if metrics.get(key) is None else form.format(metrics[key])

    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        "reward " + show("reward/mean", "{:.3f}"),
        "solved " + show("reward/solve_rate", "{:.0%}"),
        "masked " + show("mask/dropped", "{:.2%}"),
        "lag " + show("lag/mean", "{:.1f}"),
        f"tok/s {show('learner/tokens_per_second', '{:,.0f}')} learn, "
        f"{show('engine/tokens_per_second', '{:,.0f}')} sample",
        "left " + duration(seconds_left)]
    if metrics.get("policy_updated") is False:
        parts.append("(critic only)")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`42s`, `3m05s` or `2h07m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
