"""Draw the curves of one or more finished runs: `python tools/plot_run.py runs/a runs/b --out curves.png`.

Solve rate, masked share and lag against the learner step, read from the runs' stores; one line per run.
"""
from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import Store

PANELS = (("reward/solve_rate", "solve rate of the training batch", 11),
          ("mask/dropped", "share of action tokens that DIS drops", 1), ("lag/mean", "lag (weight versions)", 1))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over `width` steps, shorter at the ends."""
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def draw(runs: list[Path], out: Path) -> None:
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.6), constrained_layout=True)
    for run in runs:
        with Store(RunFolder(run).store_path) as store:
            steps, evaluations = store.steps(), store.evaluations()
        for axis, (key, _, width) in zip(axes, PANELS, strict=True):
            points = [(row.step, row.metrics[key]) for row in steps if key in row.metrics]
            x, y = np.array(points).T
            line, = axis.plot(x, smooth(y, width), label=run.name, linewidth=1.2)
            if key == "reward/solve_rate":
                ends = {"start": x[0], "end": x[-1]}
                rates = [row.solved / row.episodes for row in evaluations]
                axis.scatter([ends[row.name] for row in evaluations], rates, color=line.get_color(), zorder=3, s=30)
    for axis, (_, title, width) in zip(axes, PANELS, strict=True):
        axis.set_title(title + (f" (mean of {width} steps)" if width > 1 else ""), fontsize=10)
        axis.set_xlabel("learner step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, title="dots: fixed evaluation set", title_fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/demo")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="PNG to write (default: %(default)s)")
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)


if __name__ == "__main__":
    main()
