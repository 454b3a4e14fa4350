"""The page: assets/ and a run's records in one HTML file that a browser opens without a network.

The data is one zlib stream in base64: the length of a JSON header (4 bytes, little-endian), the header, padding to 8
bytes, then the per-token columns, each an array whose type, offset and length the header names.
"""
from __future__ import annotations

import base64
import html
import json
import math
import zlib
from pathlib import Path

import numpy as np

from sao_megatron.telemetry.inspect import data
from sao_megatron.telemetry.inspect.data import Run
from sao_megatron.telemetry.inspect.terminal import METRICS

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("data.js", "svg.js", "charts.js", "overview.js", "list.js", "trajectory.js", "curves.js", "page.js")
MAX_TOKENS = 3_000_000
"""Most tokens of a page: about 50 MB, which a browser still opens in seconds."""

NUMBERS = ("rollout_logprob", "policy_logprob", "log_ratio", "ratio", "weight", "advantage", "value", "return",
           "entropy", "expert_load", "reward")
_SERIES = (*METRICS, "mask/recovered", "lag/max", "critic/loss", "policy/grad_norm")
_LOG_RATIO_EDGES = np.linspace(-3, 3, 61)


def page(run: Run, other: Run | None = None) -> tuple[str, str]:
    """The page's text, and a few words about what is on it. `other` is drawn beside `run` in the charts."""
    shown = _shown(run)
    columns, words = _columns(run, shown)
    header = {"runs": [_overview(one) for one in (run, other) if one], "trajectories": _trajectories(run, shown),
              "words": words, "fates": data.FATES, "kinds": ["prompt", "action", "observation"]}
    text = (ASSETS / "template.html").read_text()
    parts = {"{{title}}": html.escape(f"{run.name} – tokens"), "{{style}}": (ASSETS / "page.css").read_text(),
             "{{script}}": "\n".join((ASSETS / name).read_text() for name in SCRIPTS),
             "{{data}}": base64.b64encode(zlib.compress(_packed(header, columns), 6)).decode()}
    for mark, part in parts.items():  # the data comes last: what it holds is not searched for marks
        text = text.replace(mark, part)
    note = f"{len(shown):,} trajectories"
    if len(shown) < len(run.starts):
        note += f" (every {math.ceil(len(run.starts) / len(shown))}th of {len(run.starts):,}: choose steps with --step)"
    return text, note


def _shown(run: Run) -> np.ndarray:
    """Which trajectories are on the page: all, or every n-th of a run that is too large."""
    every = math.ceil(len(run.table) / MAX_TOKENS)
    return np.arange(0, len(run.starts), max(every, 1))


def _overview(run: Run) -> dict:
    """What the charts of one run need."""
    series = {name: [_number(row.metrics.get(name)) for row in run.steps] for name in _SERIES}
    log_ratio = np.clip(run.column("log_ratio")[run.sampled], -2.999, 2.999)
    fates = run.fates[run.sampled]
    return {"name": run.name, "preset": run.config.algorithm.preset, "task": run.config.task.name,
            "steps": [row.step for row in run.steps], "series": series,
            "lag": [group._asdict() for group in data.by_lag(run)],
            "ratio_edges": _LOG_RATIO_EDGES.round(2).tolist(),
            "ratio_counts": [np.histogram(log_ratio[fates == index], _LOG_RATIO_EDGES)[0].tolist()
                             for index in range(len(data.FATES))],
            "words": [word._asdict() for word in data.most_dropped(run, 12)]}


def _trajectories(run: Run, shown: np.ndarray) -> dict[str, list]:
    """Columns, one entry a trajectory; `start` is its first token in the page's own columns."""
    found = {name: np.array(values)[shown] for name, values in data.per_trajectory(run).items()}
    found["start"] = np.cumsum(found["length"]) - found["length"]
    return {name: [_number(value) for value in values.tolist()] for name, values in found.items()}


def _columns(run: Run, shown: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Per-token arrays of the trajectories shown, and the strings that `word` counts."""
    rows = np.concatenate([np.arange(start, start + length) for start, length in
                           zip(run.starts[shown], run.lengths[shown], strict=True)])
    word, words = run.codes("token")
    kind, kinds = run.codes("kind")
    kind = np.array([("prompt", "action", "observation").index(name) for name in kinds])[kind]
    columns = {name: run.column(name).astype(np.float32) for name in NUMBERS} | {
        "word": word.astype(np.int32), "token_id": run.column("token_id"), "version": run.column("version"),
        "lag": run.column("lag"), "turn": run.column("turn").astype(np.int32), "kind": kind.astype(np.int8),
        "fate": run.fates.astype(np.int8)}
    return {name: values[rows] for name, values in columns.items()}, words


def _packed(header: dict, columns: dict[str, np.ndarray]) -> bytes:
    places, offset = {}, 0
    for name, values in columns.items():
        places[name] = {"type": values.dtype.name, "offset": offset, "length": len(values)}
        offset += -(-values.nbytes // 8) * 8
    text = json.dumps(header | {"columns": places}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    blobs = [values.tobytes() + bytes(-values.nbytes % 8) for values in columns.values()]
    return b"".join([len(text).to_bytes(4, "little"), text, *blobs])


def _number(value):
    """NaN and infinities do not exist in JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
