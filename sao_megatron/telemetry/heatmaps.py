"""Pictures for TensorBoard's image page: a metric's buckets over the steps, and advantage against log r."""
from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sao_megatron.telemetry.buckets import BREAKDOWNS
from sao_megatron.telemetry.statistics import ADVANTAGE_EDGES, COARSE_LOG_RATIO_EDGES

PHASES = ("wait", "critic", "recompute", "policy", "publish", "checkpoint", "other")
DRAWN = ("lag", "position", "turn")
"""Breakdowns that are drawn over the steps."""
MOST_COLUMNS = 400
"""Longer runs are averaged over neighbouring steps."""


def dropped_by(name: str, steps: list[int], metrics: list[dict[str, float]]) -> Figure | None:
    """Dropped share by bucket of breakdown `name` (rows) and learner step (columns); None where nothing is known."""
    rows = [bucket for bucket in BREAKDOWNS[name].names
            if any(f"by_{name}/dropped {bucket}" in step for step in metrics)]
    if not rows:
        return None
    shares = np.array([[step.get(f"by_{name}/dropped {bucket}", np.nan) for step in metrics] for bucket in rows])
    figure = _figure(3.2 if len(rows) > 4 else 2.4)
    axes = figure.subplots()
    image = axes.imshow(100 * _averaged(shares), aspect="auto", origin="lower", cmap="viridis", vmin=0,
                        interpolation="nearest", extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(rows) - 0.5))
    axes.set(xlabel="learner step", ylabel=name, yticks=range(len(rows)), yticklabels=rows,
             title=f"dropped, % of the action tokens of each {name}")
    figure.colorbar(image, ax=axes, pad=0.03, fraction=0.12, label="% dropped")
    return figure


def phases(steps: list[int], metrics: list[dict[str, float]]) -> Figure | None:
    """Seconds of each learner step by phase, one above the other; None where nothing is known."""
    known = [name for name in PHASES if any(step.get(f"seconds/{name}") for step in metrics)]
    if not known:
        return None
    seconds = _averaged(np.array([[step.get(f"seconds/{name}", np.nan) for step in metrics] for name in known]))
    figure = _figure(3.4, right=0.79)
    axes = figure.subplots()
    axes.stackplot(np.linspace(steps[0], steps[-1], seconds.shape[1]), np.nan_to_num(seconds), labels=known)
    axes.set(xlabel="learner step", ylabel="seconds", title="seconds of a step by phase")
    axes.margins(x=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def advantage_ratio(joint: np.ndarray) -> Figure:
    """Action tokens of one step by advantage (rows) and log r (columns); the open bins are drawn at the edges."""
    figure = _figure(3.4)
    axes = figure.subplots()
    image = axes.imshow(np.where(joint > 0, joint, np.nan), aspect="auto", origin="lower", cmap="viridis",
                        norm=matplotlib.colors.LogNorm(vmin=1, vmax=max(joint.max(), 2)), interpolation="nearest",
                        extent=(*_drawn(COARSE_LOG_RATIO_EDGES), *_drawn(ADVANTAGE_EDGES)))
    axes.axvline(0, color="grey", linewidth=0.5)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set(xlabel="log r (nats)", ylabel="advantage", title="action tokens of the step")
    figure.colorbar(image, ax=axes, pad=0.03, fraction=0.12, label="tokens")
    return figure


def _figure(height: float, right: float = 1.0) -> Figure:
    """Margins as wide as the labels need; to have them measured would take as long again as the drawing."""
    figure = Figure(figsize=(7, height), dpi=100)
    figure.subplots_adjust(left=0.14, right=right, bottom=0.52 / height, top=1 - 0.3 / height)
    return figure


def _drawn(edges: np.ndarray) -> tuple[float, float]:
    width = edges[2] - edges[1]
    return edges[1] - width, edges[-2] + width


def _averaged(shares: np.ndarray) -> np.ndarray:
    """[rows, steps] -> at most MOST_COLUMNS columns; steps without a value do not count."""
    parts = np.array_split(shares, min(MOST_COLUMNS, shares.shape[1]), axis=1)
    known = [~np.isnan(part) for part in parts]
    sums = [np.where(k, part, 0).sum(1) / np.maximum(k.sum(1), 1) for part, k in zip(parts, known, strict=True)]
    return np.stack([np.where(k.any(1), s, np.nan) for s, k in zip(sums, known, strict=True)], axis=1)
