"""TensorBoard events of a run: the step's scalars, and histograms of lag and log-ratio with fixed bins."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from sao_megatron.telemetry.statistics import LAG_EDGES, LOG_RATIO_EDGES, Statistics


class StepWriter:
    """Writes one learner step at a time; the axis is the learner step."""

    def __init__(self, folder: Path):
        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, step: int, metrics: dict[str, float], statistics: Statistics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        if statistics["tokens"]:
            self._histogram("lag/tokens", statistics.fates.sum(1), np.append(LAG_EDGES[1:], LAG_EDGES[-1] + 16), step)
            self._histogram("ratio/log", statistics.log_ratio, np.append(LOG_RATIO_EDGES[1:-1], 6.0), step)

    def _histogram(self, name: str, counts: np.ndarray, upper_edges: np.ndarray, step: int) -> None:
        """Add counts that are already binned; the exact sums are not known, so bin edges stand for the values."""
        self._writer.add_histogram_raw(
            name, min=float(upper_edges[0]), max=float(upper_edges[-1]), num=int(counts.sum()),
            sum=float((counts * upper_edges).sum()), sum_squares=float((counts * upper_edges**2).sum()),
            bucket_limits=upper_edges.tolist(), bucket_counts=counts.tolist(), global_step=step)

    def close(self) -> None:
        self._writer.close()
