"""TensorBoard events of a run: the step's scalars, and histograms of lag and log-ratio with fixed bins."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from sao_megatron.telemetry.statistics import LAG_EDGES, LOG_RATIO_EDGES, Statistics


class StepWriter:
    """Writes one learner step at a time; the axis is the learner step."""

    def __init__(self, folder: Path, first_step: int = 0):
        """Steps from `first_step` on that an earlier learner of the run wrote are hidden: they are made again."""
        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first_step)

    def write(self, step: int, metrics: dict[str, float], statistics: Statistics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        if statistics["tokens"]:
            self._histogram("lag/tokens", statistics.fates.sum(1), _LAG_BINS, step)
            self._histogram("ratio/log", statistics.log_ratio, _LOG_RATIO_BINS, step)

    def _histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, step: int) -> None:
        """Add counts of fixed bins (one edge more than counts), without the empty bins at both ends.

        TensorBoard also wants sums of the values, which are not known: bin centres stand for them.
        """
        filled = np.flatnonzero(counts)
        counts, edges = counts[filled[0]:filled[-1] + 1], edges[filled[0]:filled[-1] + 2]
        centres = (edges[:-1] + edges[1:]) / 2
        self._writer.add_histogram_raw(
            name, min=float(edges[0]), max=float(edges[-1]), num=int(counts.sum()),
            sum=float((counts * centres).sum()), sum_squares=float((counts * centres**2).sum()),
            bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist(), global_step=step)

    def close(self) -> None:
        self._writer.close()


_LAG_BINS = np.concatenate([LAG_EDGES - 0.5, [2 * LAG_EDGES[-1] - 0.5]])  # an integer lag lies inside its bin
_LOG_RATIO_BINS = np.concatenate([[-6.0], LOG_RATIO_EDGES[1:-1], [6.0]])  # the open ends are drawn up to ±6
