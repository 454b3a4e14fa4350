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

    def write(self, step: int, version: int, recorded: list[Recorded]) -> None:
        """`version` is the learner's before the step."""
        if not recorded:
            return
        path = self._folder / f"step-{step:06d}.parquet"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(exist_ok=True)
            tables = [_table(step, version, one, self._words) for one in recorded]
            pq.write_table(pa.concat_tables(tables), partial, compression="zstd")
            partial.replace(path)
            thin(self._folder, self._limit)
        except (OSError, pa.ArrowException) as error:
            log.warning("no token records of step %d: %s", step, error)


def thin(folder: Path, limit: float) -> None:
    """Delete every second file of the older half until all together are below `limit` bytes or only one is left."""
    files = {path: path.stat().st_size for path in files_of(folder)}
    while sum(files.values()) > limit and len(files) > 1:
        older = list(files)[:max(2, len(files) // 2)]
        for path in older[1::2] if len(files) > 2 else older[:1]:
            path.unlink()
            del files[path]


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


def _table(step: int, version: int, recorded: Recorded, words: Words) -> pa.Table:
    t, action = recorded.trajectory, recorded.trajectory.action_mask
    first = np.argmax(action)  # the prompt is what comes before the first action
    kind = np.where(action, "action", np.where(np.arange(len(t)) < first, "prompt", "observation"))
    columns = {
        "step": step, "trajectory": t.id, "prompt": t.prompt_id, "task": t.task, "status": str(t.status),
        "chosen": recorded.chosen, "trajectory_reward": t.reward,
        "position": np.arange(len(t)), "token_id": t.tokens, "token": words.of(t.tokens), "turn": t.turns,
        "kind": kind.tolist(), "reward": t.rewards}
    actions = {"version": t.action_versions, "lag": lag(version, t.action_versions),
               "rollout_logprob": t.rollout_logprobs[action]} | recorded.results
    if "log_ratio" in actions:
        with np.errstate(over="ignore"):
            actions["ratio"] = np.exp(actions["log_ratio"])
    columns |= {name: _spread(values, action) for name, values in actions.items()}
    return pa.table([_column(columns.get(name), kind, len(t)) for name, kind in _TYPES.items()], schema=SCHEMA)


def _spread(values: np.ndarray, action: np.ndarray) -> pa.Array:
    """[action tokens] -> [tokens], null elsewhere."""
    result = np.zeros(len(action), values.dtype)
    result[action] = values
    return pa.array(result, mask=~action)


def _column(values, kind: pa.DataType, length: int) -> pa.Array:
    if values is None:
        return pa.nulls(length, kind)
    if isinstance(values, np.ndarray | list | pa.Array):
        return pa.array(values).cast(kind)
    return pa.array([values], kind).take(pa.array(np.zeros(length, np.int64)))
