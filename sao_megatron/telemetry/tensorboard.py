"""TensorBoard events of a run: scalars, histograms with fixed bins, heat maps, and a first page that tells the story.

Names, units and meaning: telemetry/metrics.py and docs/metrics.md.
"""
from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from sao_megatron.telemetry import heatmaps
from sao_megatron.telemetry.buckets import LAG
from sao_megatron.telemetry.records import Recorded
from sao_megatron.telemetry.statistics import LOG_RATIO_EDGES, Statistics
from sao_megatron.telemetry.worst import Worst

DRAW_EVERY = 10
"""Fewest steps between two drawings of the pictures."""
DRAW_SHARE = 0.01
"""Most of the run's time that drawing takes."""
TELL_EVERY = 50
"""Steps between two texts of the worst trajectories."""
HYPERPARAMETERS = ("seed", "steps", "model", "algorithm", "policy_optimizer", "critic_optimizer", "critic", "batch",
                   "warmup", "task", "rollout", "parallel")
"""Sections of a recipe that are shown as such: the others change nothing that is learnt."""
LAYOUT = {
    "How is it going?": {
        "reward": ["Multiline", ["reward/mean", "reward/solve_rate"]],
        "dropped action tokens, by side": ["Multiline", ["mask/dropped_low$", "mask/dropped_high$", "mask/recovered"]],
        "effective sample size": ["Multiline", ["mask/effective_sample_size"]],
        "discarded mass m": ["Multiline", ["mask/discarded_mass"]],
        "lag (versions)": ["Multiline", ["lag/mean", "lag/max"]],
        "entropy (nats)": ["Multiline", ["policy/entropy"]]},
    "Is it learning well?": {
        "gradient norm": ["Multiline", ["policy/grad_norm", "critic/grad_norm"]],
        "explained variance": ["Multiline", ["critic/explained_variance"]],
        "engine against learner at lag 0 (nats)": ["Multiline", ["mismatch/mean", "mismatch/p99", "mismatch/max"]],
        "experts, busiest against mean": ["Multiline", ["experts/busiest"]],
        "alarms": ["Multiline", ["alarm/.*"]]},
    "Are the machines busy?": {
        "seconds by phase": ["Multiline", [f"seconds/{name}" for name in heatmaps.PHASES]],
        "tokens a second": ["Multiline", ["learner/tokens_per_second", "engine/tokens_per_second"]],
        "FLOP/s": ["Multiline", ["learner/flops_per_second", "engine/flops_per_second"]],
        "MFU": ["Multiline", ["learner/mfu", "engine/mfu"]],
        "GPU utilisation": ["Multiline", ["gpu/utilisation .*"]],
        "engines: requests running and waiting": ["Multiline", ["sglang/running .*", "sglang/waiting .*"]],
        "pacing": ["Multiline", ["pacing/max_lag", "queue/ready", "queue/in_flight"]]}}


class TensorBoardWriter:
    """Writes one learner step at a time; the axis is the learner step.

    Of `settings` (flat names and values) the hyperparameters are shown. After a restart, steps from `first_step` on
    that an earlier learner wrote are hidden, since they are made again; `earlier` are the (step, metrics) of those
    before it, which the heat maps show too; `worst` makes the text of the trajectories that lost most tokens.
    """

    def __init__(self, folder: Path, settings: dict[str, float | str | bool] | None = None,
                 first_step: int = 0, earlier: list[tuple[int, dict[str, float]]] = (), worst: Worst | None = None):
        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first_step)
        self._writer.add_custom_scalars(LAYOUT)
        chosen = {name: value for name, value in (settings or {}).items() if name.partition(".")[0] in HYPERPARAMETERS}
        if chosen:
            for summary in hparams(chosen, {"reward/mean": None}):
                self._writer.file_writer.add_summary(summary)
        self._worst = worst
        self._steps = [step for step, _ in earlier]
        self._metrics = [_drawn(metrics) for _, metrics in earlier]
        self._joint: np.ndarray | None = None
        """Of the last step."""
        self._undrawn, self._draw_after = False, 0.0

    def write(self, step: int, metrics: dict[str, float], statistics: Statistics,
              recorded: list[Recorded] = ()) -> None:
        scalars = Summary(value=[Summary.Value(tag=name, simple_value=float(v)) for name, v in metrics.items()])
        self._writer.file_writer.add_summary(scalars, step)  # one event: hundreds of add_scalar would take 30 ms
        if self._worst:
            self._worst.add(step, recorded)
        if not statistics.log_ratio.any():
            return
        self._histogram("lag/tokens", statistics.fates.sum(1), _LAG_BINS, step)
        self._histogram("ratio/log", statistics.log_ratio, _LOG_RATIO_BINS, step)
        self._steps.append(step)
        self._metrics.append(_drawn(metrics))
        self._joint, self._undrawn = statistics.joint, True
        if len(self._steps) % DRAW_EVERY == 0 and time.monotonic() >= self._draw_after:
            self._draw()
        if len(self._steps) % TELL_EVERY == 0:
            self._tell()

    def alarm(self, step: int, sentence: str) -> None:
        """Mark the step: a sentence on the text page, and 1 under alarm/ on the scalar page."""
        self._writer.add_text("alarms", sentence, step)
        self._writer.add_scalar(f"alarm/{sentence.partition(' ')[0]}", 1.0, step)

    def _draw(self) -> None:
        begin, step = time.monotonic(), self._steps[-1]
        for name in heatmaps.DRAWN:
            if figure := heatmaps.dropped_by(name, self._steps, self._metrics):
                self._writer.add_figure(f"heat/{name}", figure, step)
        if figure := heatmaps.phases(self._steps, self._metrics):
            self._writer.add_figure("heat/seconds", figure, step)
        self._writer.add_figure("heat/advantage_ratio", heatmaps.advantage_ratio(self._joint), step)
        self._undrawn = False
        self._draw_after = time.monotonic() + (time.monotonic() - begin) / DRAW_SHARE

    def _tell(self) -> None:
        if self._worst and (text := self._worst.take()):
            self._writer.add_text("worst", text, self._steps[-1])

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
        if self._undrawn:
            self._draw()
            self._tell()
        self._writer.close()


def _drawn(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items()
            if name.startswith("seconds/") or name.startswith("by_") and "/dropped " in name}


_LAG_BINS = np.concatenate([LAG.edges - 0.5, [2 * LAG.edges[-1] - 0.5]])  # an integer lag lies inside its bin
_LOG_RATIO_BINS = np.concatenate([[-6.0], LOG_RATIO_EDGES[1:-1], [6.0]])  # the open ends are drawn up to ±6
