"""Tables, pictures and TensorBoard curves of tools/sweep.py.

Solve rates are of the current weights on 240 games. A run's end is the mean of its last two evaluations. It collapsed
at the first evaluation in which it solves less than half of what it solved before training (and also where its numbers
overflowed); it may come back. Mask share, effective sample size and discarded mass m (ALGORITHM.md §7, under the
preset's own gate) are means over the versions from `lag` on, when the samples really are that old.
"""
from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

AVERAGED = ("dropped", "dropped_low", "dropped_high", "recovered", "ess", "m", "entropy", "log_ratio_abs", "grad_norm",
            "explained_variance")
SHOWN = ("solved", "reward", "dropped", "dropped_low", "dropped_high", "ess", "m", "entropy", "malformed")


def write_tensorboard(folder: Path, result: dict) -> None:
    """Curves of one run; the axis is the weight version."""
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(folder)) as writer:
        for name in SHOWN:
            for version, value in enumerate(result[name]):
                if value is not None:
                    writer.add_scalar(f"batch/{name}", value, version + 1)
        for version, solved, malformed in result["evaluations"]:
            writer.add_scalar("evaluation/solve_rate", solved, version)
            writer.add_scalar("evaluation/malformed", malformed, version)


def end(result: dict) -> float:
    """Solve rate at the end; 0 where the run's numbers overflowed."""
    return 0.0 if result["failed"] else mean(rate for _, rate, _ in result["evaluations"][-2:])


def collapse_step(result: dict) -> int | None:
    rates = [(version, rate) for version, rate, _ in result["evaluations"]]
    for version, rate in rates:
        if rate < rates[0][1] / 2:
            return version
    return result["updates"] if result["failed"] else None


def compact(result: dict) -> dict:
    """A run's line in results.jsonl: every step's metrics become their means from version `lag` on."""
    lag = result["job"]["lag"]
    known = {name: [v for v in result[name][lag:] if v is not None] for name in AVERAGED}
    kept = {name: result[name] for name in ("job", "evaluations", "failed", "cpu_seconds")}
    return kept | {"updates": len(result["solved"]),
                   "means": {name: round(mean(values), 5) for name, values in known.items() if values}}


def arm(job: dict) -> str:
    return job["preset"] + (f" + anchor {job['anchor']:g}" if job["anchor"] else "")


def report(grids: dict[str, list[dict | None]], out: Path) -> None:
    """Print and write everything that these grids' results give (None: not run yet)."""
    lines = []
    for name, runs in grids.items():
        results = [run for run in runs if run]
        lines += [f"## {name}: {len(results)} of {len(runs)} runs", ""]
        if not results:
            continue
        for setting, group in _split(results, lambda job: (job["task"], job["lr"])).items():
            lines += [f"### {setting[0]}, learning rate {setting[1]:g}", "", *_tables(group)]
            _curves(group, out / f"{name}-{setting[0]}-lr{setting[1]:g}.png")
        if name == "recovery":
            lines += _paired(results)
            _recovery_picture(results, out / "recovery.png")
        else:
            _lag_picture(results, out / f"{name}-lag.png")
    text = "\n".join(lines)
    print(text)
    (out / "report.md").write_text(text + "\n")
    print(f"\nPictures and this table: {out}; curves of single runs: tensorboard --logdir {out / 'tensorboard'}")


def _split(results: list[dict], key) -> dict:
    groups = defaultdict(list)
    for result in results:
        groups[key(result["job"])].append(result)
    return dict(groups)


def _tables(results: list[dict]) -> list[str]:
    """One table of outcomes and one of mask numbers: a row per preset, a column per lag."""
    lags = sorted({result["job"]["lag"] for result in results})
    head = ["| preset | " + " | ".join(f"lag {lag}" for lag in lags) + " |", "|---|" + "---|" * len(lags)]
    cells = _split(results, lambda job: (arm(job), job["lag"]))
    arms = list(dict.fromkeys(arm(result["job"]) for result in results))

    def table(cell) -> list[str]:
        rows = (f"| `{name}` | " + " | ".join(cell(cells[name, lag]) if (name, lag) in cells else "" for lag in lags)
                + " |" for name in arms)
        return [*head, *rows, ""]
    return ["Solve rate at the end, mean over seeds (least – most), and how many seeds collapsed, with the median "
            "version:", "", *table(_outcome),
            "Dropped share of action tokens / effective sample size / discarded mass m:", "", *table(_masking)]


def _outcome(results: list[dict]) -> str:
    ends = [end(result) for result in results]
    collapsed = sorted(step for result in results if (step := collapse_step(result)) is not None)
    text = f"{mean(ends):.2f}" + (f" ({min(ends):.2f} – {max(ends):.2f})" if len(ends) > 1 else "")
    return text + (f"; {len(collapsed)}/{len(ends)} at {collapsed[len(collapsed) // 2]}" if collapsed else "")


def _masking(results: list[dict]) -> str:
    def average(name):
        values = [result["means"][name] for result in results if name in result["means"]]
        return mean(values) if values else float("nan")
    return f"{average('dropped'):.2%} / {average('ess'):.2f} / {average('m'):.3f}"


def _paired(results: list[dict]) -> list[str]:
    """The other arms against `sao` with the same seed, task, learning rate and lag."""
    of = {(arm(r["job"]), r["job"]["task"], r["job"]["lr"], r["job"]["lag"], r["job"]["seed"]): end(r) for r in results}
    others = sorted({key[0] for key in of} - {"sao"})
    lines = ["### Against `sao`, seed by seed: mean difference of the solve rate at the end ± standard error (wins of "
             "pairs)", "", "| task | learning rate | lag | " + " | ".join(f"`{name}`" for name in others) + " |",
             "|---|---|---|" + "---|" * len(others)]
    for task, lr, lag in sorted({key[1:4] for key in of}):
        cells = []
        for other in others:
            differences = [of[other, task, lr, lag, key[4]] - value for key, value in of.items()
                           if key[:4] == ("sao", task, lr, lag) and (other, task, lr, lag, key[4]) in of]
            cells.append(_difference(differences))
        lines.append(f"| {task} | {lr:g} | {lag} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _difference(differences: list[float]) -> str:
    if len(differences) < 2:
        return ""
    error = stdev(differences) / len(differences) ** 0.5
    return f"{mean(differences):+.2f} ± {error:.2f} ({sum(d > 0 for d in differences)}/{len(differences)})"


# Pictures

def _figure(rows: int, columns: int):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False, layout="constrained")


def _save(figure, path: Path) -> None:
    from matplotlib import pyplot
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(results: list[dict], path: Path) -> None:
    """Solve rate against version: a panel per lag, a line per preset (mean over seeds, band from least to most)."""
    lags = sorted({result["job"]["lag"] for result in results})
    figure, axes = _figure(1, len(lags))
    arms = list(dict.fromkeys(arm(result["job"]) for result in results))
    for axis, lag in zip(axes[0], lags, strict=True):
        for index, name in enumerate(arms):
            runs = [r["evaluations"] for r in results if r["job"]["lag"] == lag and arm(r["job"]) == name]
            shortest = min(map(len, runs), default=0)
            rates = [[run[i][1] for run in runs] for i in range(shortest)]
            versions = [runs[0][i][0] for i in range(shortest)]
            axis.plot(versions, [mean(rate) for rate in rates], color=f"C{index}", label=name)
            axis.fill_between(versions, [min(r) for r in rates], [max(r) for r in rates], color=f"C{index}", alpha=0.1)
        axis.set(title=f"lag {lag}", xlabel="weight version", ylim=(0, 1))
    axes[0][0].set_ylabel("solve rate")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    _save(figure, path)


def _lag_picture(results: list[dict], path: Path) -> None:
    """Outcome, mask share, effective sample size and discarded mass against lag."""
    panels = {"solve rate at the end": end, "dropped share": _mean_of("dropped"),
              "effective sample size": _mean_of("ess"), "discarded mass m": _mean_of("m")}
    figure, axes = _figure(1, len(panels))
    for axis, (title, value) in zip(axes[0], panels.items(), strict=True):
        for name, runs in _split(results, arm).items():
            points = {lag: mean(v) for lag, group in sorted(_split(runs, lambda job: job["lag"]).items())
                      if (v := [x for r in group if (x := value(r)) is not None])}
            axis.plot(points.keys(), points.values(), marker="o", label=name)
        axis.set_xscale("symlog", linthresh=1)
        axis.set(title=title, xlabel="lag (versions)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    _save(figure, path)


def _mean_of(name: str):
    return lambda result: result["means"].get(name)


def _recovery_picture(results: list[dict], path: Path) -> None:
    """Outcome against lag: a row per task, a column per learning rate, a line per arm, a point per run."""
    settings = _split(results, lambda job: (job["task"], job["lr"]))
    tasks, rates = sorted({task for task, _ in settings}), sorted({rate for _, rate in settings})
    figure, axes = _figure(len(tasks), len(rates))
    for (task, rate), group in settings.items():
        axis = axes[tasks.index(task)][rates.index(rate)]
        for index, (name, runs) in enumerate(_split(group, arm).items()):
            by_lag = {lag: [end(r) for r in cell] for lag, cell in
                      sorted(_split(runs, lambda job: job["lag"]).items())}
            axis.plot(by_lag.keys(), [mean(v) for v in by_lag.values()], color=f"C{index}", label=name)
            axis.scatter([lag for lag, v in by_lag.items() for _ in v], [x for v in by_lag.values() for x in v], s=8,
                         color=f"C{index}")
        axis.set_xscale("symlog", linthresh=1)
        axis.set(title=f"{task}, learning rate {rate:g}", xlabel="lag (versions)", ylim=(0, 1))
    axes[0][0].set_ylabel("solve rate at the end")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    _save(figure, path)
