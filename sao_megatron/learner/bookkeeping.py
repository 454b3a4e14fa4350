"""What the loop notes about a step besides the training itself: the batch's outcomes, and where the seconds went."""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np

from sao_megatron.trajectory.types import Trajectory
from sao_megatron.trajectory.versions import lag


def replayed_share(trajectories: list[Trajectory]) -> float:
    """Of the tokens that predict an action token, those whose routing was recorded."""
    recorded = [np.zeros(t.num_actions, bool) if t.routing is None
                else t.routing.recorded[np.flatnonzero(t.action_mask) - 1] for t in trajectories]
    return float(np.concatenate(recorded).mean())


def batch_metrics(trajectories: list[Trajectory], version: int) -> dict[str, float]:
    """What the batch is like before any gate: outcomes, sizes, lags (in versions, over action tokens)."""
    lags = np.concatenate([lag(version, t.action_versions) for t in trajectories])
    return {
        "reward/mean": float(np.mean([t.reward for t in trajectories])),
        "reward/solve_rate": float(np.mean([bool(t.info.get("solved")) for t in trajectories])),
        "lag/mean": float(lags.mean()), "lag/max": int(lags.max()),
        "trajectories/count": len(trajectories),
        "trajectories/mixed_version": sum(bool(np.ptp(t.action_versions)) for t in trajectories),
        "trajectories/segments": sum(len(t.segments) for t in trajectories),
        "trajectories/truncated": sum(t.status == "truncated" for t in trajectories),
        "tokens/action": len(lags), "tokens/total": sum(len(t) for t in trajectories)}


PHASES = ("wait", "critic", "recompute", "policy", "publish", "checkpoint")
"""`recompute` is the further forward pass that some presets pay for their behaviour policy; `checkpoint` is what saving
takes of the step, not the writing beside it."""


class Clock:
    """Seconds by phase between two steps."""

    def __init__(self, on_phase: Callable[[str], None]):
        """`on_phase` is called with the name of each phase that begins."""
        self._begin, self._spent, self._on_phase = time.monotonic(), defaultdict(float), on_phase

    @contextmanager
    def phase(self, name: str):
        self._on_phase(name)
        begin = time.monotonic()
        yield
        self._spent[name] += time.monotonic() - begin

    def restart(self) -> dict[str, float]:
        """Seconds of each phase, of the whole step and of the rest (`other`), since the last restart."""
        now = time.monotonic()
        seconds = {name: self._spent[name] for name in PHASES}
        seconds["step"] = now - self._begin
        seconds["other"] = seconds["step"] - sum(seconds[name] for name in PHASES)
        self._begin, self._spent = now, defaultdict(float)
        return seconds
