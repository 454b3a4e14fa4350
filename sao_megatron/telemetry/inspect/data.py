"""A run as `inspect` sees it: its steps' metrics and its token records, and what these say by lag, side or task."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sao_megatron.config import RunConfig
from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry import records
from sao_megatron.telemetry.buckets import LAG
from sao_megatron.trajectory.store import StepRow, Store

FATES = ("kept", "dropped_low", "dropped_high", "recovered")


@dataclass(frozen=True)
class Run:
    config: RunConfig
    steps: list[StepRow]
    """Of the chosen range, by step."""
    table: pa.Table
    """Token records of the chosen range, trajectory by trajectory."""

    @property
    def name(self) -> str:
        return self.config.name

    def column(self, name: str) -> np.ndarray:
        """A number's column; null becomes NaN, or −1 where the column holds integers."""
        column = self.table[name]
        if pa.types.is_integer(column.type):
            return column.fill_null(-1).to_numpy()
        return column.to_numpy()

    def codes(self, name: str) -> tuple[np.ndarray, list[str]]:
        """A text's column as (index of each row's text, −1 for null; texts)."""
        column = self.table[name].combine_chunks()
        return column.indices.fill_null(-1).to_numpy(zero_copy_only=False), column.dictionary.to_pylist()

    @cached_property
    def fates(self) -> np.ndarray:
        """Index into FATES, −1 where the token has none."""
        codes, names = self.codes("fate")
        return np.array([*map(FATES.index, names), -1])[codes]

    @cached_property
    def starts(self) -> np.ndarray:
        """Row of each trajectory's first token."""
        return np.flatnonzero(self.column("position") == 0)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each trajectory."""
        return np.diff([*self.starts, len(self.table)])

    @cached_property
    def sampled(self) -> np.ndarray:
        """Rows that estimate shares fairly: action tokens with a fate, of the seeded sample."""
        codes, names = self.codes("chosen")
        return (self.fates >= 0) & (np.array(names)[codes] == "sample")


def load(run_dir: Path, steps: tuple[int, int]) -> Run:
    """Read the records of the steps first … last. Raises UserError if there are none."""
    folder, (first, last) = RunFolder(Path(run_dir)), steps
    config = folder.config()
    files = {int(path.stem.removeprefix("step-")): path for path in records.files_of(folder.tokens_dir)}
    if not files:
        raise UserError(f"{run_dir} has no token records: they are written at every step of `sao-megatron train` with "
                        f"tokens.trajectories > 0 (here: {config.tokens.trajectories})")
    chosen = [path for step, path in files.items() if first <= step <= last]
    if not chosen:
        raise UserError(f"{run_dir} has no token records of steps {first} to {last}: they are of {min(files)} to "
                        f"{max(files)}")
    table = pa.concat_tables([_read(path) for path in chosen]).unify_dictionaries()
    with Store(folder.store_path) as store:
        rows = [row for row in store.steps() if first <= row.step <= last]
    return Run(config, rows, table)


def _read(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path, read_dictionary=records.DICTIONARIES)
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file that can be read ({error}): delete it") from None
    version = (table.schema.metadata or {}).get(records.VERSION_KEY, b"none")
    if version != records.SCHEMA_VERSION:
        raise UserError(f"{path} has schema {version.decode()} and this version reads "
                        f"{records.SCHEMA_VERSION.decode()}: use the version of sao-megatron that wrote it")
    return table


class Group(NamedTuple):
    """Action tokens that share something. Shares are of them; ESS and m as in docs/algorithm.md."""

    name: str
    tokens: int
    dropped_low: float
    dropped_high: float
    recovered: float
    effective_sample_size: float
    discarded_mass: float

    @property
    def dropped(self) -> float:
        return self.dropped_low + self.dropped_high


def by_lag(run: Run) -> list[Group]:
    buckets = LAG.of(run.column("lag"))
    return [group for index, name in enumerate(LAG.names) if (group := _group(run, name, buckets == index)).tokens]


def by_task(run: Run) -> list[Group]:
    codes, names = run.codes("task")
    return [group for code, name in enumerate(names) if (group := _group(run, name, codes == code)).tokens]


def _group(run: Run, name: str, rows) -> Group:
    rows = run.sampled & rows
    fate, weight = run.fates[rows], run.column("weight")[rows].astype(float)
    tokens, shares = len(fate), np.bincount(fate, minlength=len(FATES)) / max(len(fate), 1)
    kept_ratio = run.column("ratio")[rows][fate == 0].sum(dtype=float)
    return Group(name, tokens, *shares[1:], weight.sum()**2 / max(tokens * (weight**2).sum(), 1e-12),
                 1 - kept_ratio / max(tokens, 1))


class Word(NamedTuple):
    text: str
    id: int
    low: int
    """Times dropped low."""
    high: int
    tokens: int
    """Times sampled."""


def most_dropped(run: Run, count: int) -> list[Word]:
    """Tokens of the seeded sample by how often they were dropped."""
    ids, fates = run.column("token_id")[run.sampled], run.fates[run.sampled]
    size = ids.max(initial=0) + 1
    low, high = np.bincount(ids[fates == 1], minlength=size), np.bincount(ids[fates == 2], minlength=size)
    total = np.bincount(ids, minlength=size)
    order = np.argsort(-(low + high), kind="stable")[:count]
    known, first = np.unique(run.column("token_id"), return_index=True)
    codes, words = run.codes("token")
    text = {id: words[codes[row]] for id, row in zip(known.tolist(), first, strict=True)}
    return [Word(text[id], int(id), int(low[id]), int(high[id]), int(total[id])) for id in order if low[id] + high[id]]


def per_trajectory(run: Run) -> dict[str, np.ndarray | list]:
    """One entry for each recorded trajectory: its identity and what its tokens add up to."""
    starts, fates, lags = run.starts, run.fates, run.column("lag")
    acted, dropped = lags >= 0, (fates == 1) | (fates == 2)
    actions = np.add.reduceat(acted, starts, dtype=int)
    texts = {}
    for name in ("trajectory", "prompt", "task", "status", "chosen"):
        codes, words = run.codes(name)
        texts[name] = [words[code] for code in codes[starts]]
    return texts | {
        "step": run.column("step")[starts], "reward": run.column("trajectory_reward")[starts],
        "start": starts, "length": run.lengths, "actions": actions,
        "low": np.add.reduceat(fates == 1, starts, dtype=int), "high": np.add.reduceat(fates == 2, starts, dtype=int),
        "recovered": np.add.reduceat(fates == 3, starts, dtype=int),
        "dropped": np.add.reduceat(dropped, starts, dtype=int) / actions,
        "lag_min": np.minimum.reduceat(np.where(acted, lags, 2**31 - 1), starts),
        "lag_max": np.maximum.reduceat(lags, starts)}
