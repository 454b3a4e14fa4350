"""Token records: every token of a few trajectories a step, as Parquet in runs/<name>/tokens/ (docs/inspect.md).

One file a step, one row a token, so that pandas, DuckDB and `sao-megatron inspect` read them without this package.
What only action tokens have is null on the others, and what a step did not compute is null throughout.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sao_megatron.trajectory.types import Trajectory
from sao_megatron.trajectory.versions import lag

log = logging.getLogger("records")

SCHEMA_VERSION = b"2"
VERSION_KEY = b"sao_megatron.tokens"
"""Key of the schema's version in a file's metadata."""

_TYPES = {
    "step": pa.int32(), "trajectory": pa.string(), "prompt": pa.string(), "task": pa.string(), "status": pa.string(),
    "chosen": pa.string(),  # sample: of the seeded sample; worst: beside it, of those with most tokens dropped
    "position": pa.int32(),  # in the trajectory, from 0
    "token_id": pa.int32(), "token": pa.string(),
    "turn": pa.int16(), "kind": pa.string(),  # prompt, action or observation
    "version": pa.int32(),  # of the weights that sampled it
    "lag": pa.int32(),  # the learner's version − version
    "rollout_logprob": pa.float32(), "policy_logprob": pa.float32(),  # nats
    "log_ratio": pa.float32(), "ratio": pa.float32(),  # policy to rollout, whatever the gate's own denominator is
    "fate": pa.string(),  # kept, dropped_low, dropped_high, recovered
    "weight": pa.float32(),  # the gate's
    "advantage": pa.float32(), "value": pa.float32(), "return": pa.float32(), "entropy": pa.float32(),
    "expert_load": pa.float32(),  # of the experts of the token before it, in units of their layers' mean
    "reward": pa.float32(), "trajectory_reward": pa.float32()}
SCHEMA = pa.schema(_TYPES.items(), {VERSION_KEY: SCHEMA_VERSION})
DICTIONARIES = [name for name, kind in _TYPES.items() if kind == pa.string()]
"""Text, of few distinct values."""


@dataclass(frozen=True)
class Recorded:
    """One trajectory of a step with what the learner computed of its action tokens."""

    trajectory: Trajectory
    chosen: str
    """sample or worst."""
    results: dict[str, np.ndarray]
    """By column of the schema, [action tokens] each; fate as names."""


class Recorder:
    """Writes a step's file and keeps the folder below `limit_mb`. A fault is logged and never ends a run."""

    def __init__(self, folder: Path, limit_mb: float, tokenizer: Path):
        """`tokenizer` is a tokenizer.json; token strings are empty if there is none."""
        self._folder, self._limit, self._words = folder, limit_mb * 1e6, Words(tokenizer)
        self._bytes: int | None = None
        """Of all files; None before the first is written, which finds those of an earlier learner."""

    def write(self, step: int, version: int, recorded: list[Recorded]) -> None:
        """`version` is the learner's before the step."""
        if not recorded:
            return
        path = self._folder / f"step-{step:06d}.parquet"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(exist_ok=True)
            pq.write_table(_table(step, version, recorded, self._words), partial, compression="zstd")
            again = self._bytes is None or path.exists()
            partial.replace(path)
            self._bytes = size_of(self._folder) if again else self._bytes + path.stat().st_size
            if self._bytes > self._limit:
                self._bytes = thin(self._folder, self._limit)
        except (OSError, pa.ArrowException) as error:
            log.warning("no token records of step %d: %s", step, error)


def thin(folder: Path, limit: float) -> int:
    """Delete every second file of the older half until all together are below `limit` bytes or only one is left;
    returns what they have then."""
    files = {path: path.stat().st_size for path in files_of(folder)}
    while sum(files.values()) > limit and len(files) > 1:
        older = list(files)[:max(2, len(files) // 2)]
        for path in older[1::2] if len(files) > 2 else older[:1]:
            path.unlink()
            del files[path]
    return sum(files.values())


def size_of(folder: Path) -> int:
    """Bytes of a run's record files."""
    return sum(path.stat().st_size for path in files_of(folder))


def files_of(folder: Path) -> list[Path]:
    """A run's record files by step."""
    return sorted(folder.glob("step-*.parquet"))


class Words:
    """Strings of token ids, by a tokenizer.json that is read when the first is asked for."""

    def __init__(self, path: Path):
        self._path, self._known = path, {}

    @cached_property
    def _tokenizer(self):
        from tokenizers import Tokenizer
        return Tokenizer.from_file(str(self._path)) if self._path.is_file() else None

    def of(self, ids: np.ndarray) -> list[str]:
        return [self._known.get(id) or self._known.setdefault(id, self._word(id)) for id in ids.tolist()]

    def _word(self, id: int) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode([id], skip_special_tokens=False)
        whole = text and "\ufffd" not in text  # not a part of a character
        return text if whole else self._tokenizer.id_to_token(id) or ""


def _table(step: int, version: int, recorded: list[Recorded], words: Words) -> pa.Table:
    """Of all trajectories at once: most of what a column costs is the same for one token and for many."""
    trajectories = [one.trajectory for one in recorded]
    columns = _identities(recorded) | _tokens(trajectories, words)
    columns["step"] = np.full(len(columns["position"]), step)
    action, sampled = _all(trajectories, "action_mask"), _all(trajectories, "action_versions")
    results = {"version": sampled, "lag": lag(version, sampled),
               "rollout_logprob": _all(trajectories, "rollout_logprobs")[action]} | {
        name: np.concatenate([one.results[name] for one in recorded]) for name in recorded[0].results}
    if "log_ratio" in results:
        with np.errstate(over="ignore"):
            results["ratio"] = np.exp(results["log_ratio"])
    columns |= {name: _spread(values, action) for name, values in results.items()}
    return pa.table([_column(columns[name], kind) if name in columns else pa.nulls(len(action), kind)
                     for name, kind in _TYPES.items()], schema=SCHEMA)


def _identities(recorded: list[Recorded]) -> dict[str, pa.Array]:
    """What all tokens of a trajectory share."""
    trajectories = [one.trajectory for one in recorded]
    values = {"trajectory": [t.id for t in trajectories], "prompt": [t.prompt_id for t in trajectories],
              "task": [t.task for t in trajectories], "status": [str(t.status) for t in trajectories],
              "chosen": [one.chosen for one in recorded], "trajectory_reward": [t.reward for t in trajectories]}
    owner = pa.array(np.repeat(np.arange(len(trajectories)), [len(t) for t in trajectories]))
    return {name: pa.array(of_each, _TYPES[name]).take(owner) for name, of_each in values.items()}


def _tokens(trajectories: list[Trajectory], words: Words) -> dict[str, np.ndarray | pa.Array]:
    """What a token is, whether or not it was sampled."""
    tokens, action = _all(trajectories, "tokens"), _all(trajectories, "action_mask")
    position = np.concatenate([np.arange(len(t)) for t in trajectories])
    first = np.repeat([np.argmax(t.action_mask) for t in trajectories], [len(t) for t in trajectories])
    kind = np.where(action, 1, np.where(position < first, 0, 2))  # the prompt is what comes before the first action
    ids, place = np.unique(tokens, return_inverse=True)
    return {"position": position, "token_id": tokens, "token": pa.array(words.of(ids)).take(pa.array(place)),
            "turn": _all(trajectories, "turns"), "reward": _all(trajectories, "rewards"),
            "kind": pa.array(("prompt", "action", "observation")).take(pa.array(kind))}


def _all(trajectories: list[Trajectory], name: str) -> np.ndarray:
    return np.concatenate([getattr(t, name) for t in trajectories])


def _spread(values: np.ndarray, action: np.ndarray) -> pa.Array:
    """[action tokens] -> [tokens], null elsewhere."""
    result = np.zeros(len(action), values.dtype)
    result[action] = values
    return pa.array(result, mask=~action)


def _column(values: np.ndarray | pa.Array, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)
