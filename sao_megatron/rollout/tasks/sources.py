"""Prompts from files (JSONL, .jsonl.gz, Parquet, a folder of them, a Hugging Face dataset on disk) or from a class.

Which row is the index-th prompt depends on index, seed and the file alone, so a restarted controller goes on where it
was by counting. Each epoch is a new order of all training rows.
"""
from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sao_megatron.errors import RunError, UserError


class Rows(Protocol):
    """Dicts by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> dict[str, Any]: ...


class JsonLines:
    """Of a file, found by their offsets: it may be larger than memory."""

    def __init__(self, path: Path):
        self.path = path
        self.offsets = []
        with path.open("rb") as file:
            offset = 0
            for line in file:
                if line.strip():
                    self.offsets.append(offset)
                offset += len(line)
        self.offsets = np.array(self.offsets, np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, number: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunError(f"{self.path}: row {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise RunError(f"{self.path}: row {number} is {type(row).__name__}, expected an object")
        return row


class ArrowRows:
    """Of Arrow or Parquet files, memory-mapped where they are Arrow's."""

    def __init__(self, table):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.table.slice(number, 1).to_pylist()[0]


class Joined:
    """Several files as one."""

    def __init__(self, parts: list[Rows]):
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        part = int(np.searchsorted(self.ends, number, side="right"))
        return self.parts[part][number - (int(self.ends[part - 1]) if part else 0)]


def read_rows(source: str | Path | Rows) -> Rows:
    """The rows of a file or folder, folders in the order of their files' names. Raises UserError.

    `path/to/file.py:Class` is a class that makes them: its object has a length and gives a dict for a number.
    """
    if not isinstance(source, str | Path):
        return source
    if ".py:" in str(source):
        from sao_megatron.rollout.tasks import load_class
        return load_class(str(source))()
    path = Path(source)
    if not path.exists():
        raise UserError(f"prompts {path} do not exist: give a .jsonl or .parquet file, or a folder of them")
    try:
        return Joined([_read_file(file) for file in _files(path)])
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        raise UserError(f"prompts {path} cannot be read: {' '.join(str(error).split())}") from None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (state := path / "state.json").is_file():  # Dataset.save_to_disk
        return [path / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
    if (splits := path / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text())["splits"]
        raise UserError(f"prompts {path} is a dataset with the splits {', '.join(names)}: give one, such as "
                        f"{path / names[0]}")
    found = sorted(file for suffix in _READERS for file in path.glob(f"*{suffix}"))
    if not found:
        raise UserError(f"prompts {path} is a folder without files that end in {', '.join(_READERS)}")
    return found


def _read_file(path: Path) -> Rows:
    if path.suffix not in _READERS:
        raise UserError(f"prompts {path} end in {path.suffix!r}: expected {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _read_parquet(path: Path) -> Rows:
    import pyarrow.parquet
    return ArrowRows(pyarrow.parquet.read_table(path, memory_map=True))


def _read_arrow(path: Path) -> Rows:
    import pyarrow
    return ArrowRows(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all())


def _read_packed(path: Path) -> Rows:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


_READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonLines, ".parquet": _read_parquet, ".arrow": _read_arrow,
                                              ".gz": _read_packed, ".json": JsonLines}


class PromptSource:
    """Training and evaluation rows.

    `held_out` rows, the same in every run with this seed, are for evaluation and never trained on; `evaluation` is a
    file of its own for that. `fields` must be in every row; the first row is looked at here.
    """

    def __init__(self, path: str | Path | Rows, fields: list[str], seed: int = 0, held_out: int = 0,
                 evaluation: str | Path | None = None):
        self.rows, self.seed = read_rows(path), seed
        self.evaluation_rows = read_rows(evaluation) if evaluation else self.rows
        for rows, source in ((self.rows, path), (self.evaluation_rows, evaluation or path)):
            if not len(rows):
                raise UserError(f"prompts {source} have no rows")
            if missing := [field for field in fields if field not in rows[0]]:
                raise UserError(f"prompts {source}: the first row has no {', '.join(missing)}; it has "
                                f"{', '.join(rows[0])}")
        if not 0 <= held_out < len(self.rows):
            raise UserError(f"held_out={held_out}: expected 0 to {len(self.rows) - 1}, there are {len(self.rows)} "
                            f"rows")
        chosen = _permutation(len(self.rows), f"{seed}/held out")
        self.training = np.sort(chosen[held_out:])
        self.held_out = np.arange(len(self.evaluation_rows)) if evaluation else chosen[:held_out]

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        """(name, row) of the index-th training prompt of an endless stream. The name is the row's own in every run."""
        epoch, place = divmod(index, len(self.training))
        number = int(self.training[_permutation(len(self.training), f"{self.seed}/{epoch}")[place]])
        return str(number), self.rows[number]

    def evaluation(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """(name, row) of the first `count` evaluation prompts. Raises UserError where there are not so many."""
        if count > len(self.held_out):
            raise UserError(f"evaluation.episodes={count}, and {len(self.held_out)} prompts are for evaluation: give "
                            f"the task's option held_out or evaluation_prompts")
        return [(f"evaluation-{int(number)}", self.evaluation_rows[int(number)]) for number in self.held_out[:count]]


@lru_cache(8)
def _permutation(count: int, seed: str) -> np.ndarray:
    return np.random.default_rng(list(f"prompts/{seed}".encode())).permutation(count)
