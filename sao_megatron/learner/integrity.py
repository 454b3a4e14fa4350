"""Is what lies in a distributed checkpoint what was written?

Every item (a piece of a tensor, an object) is a zip archive inside a file, and holds a CRC-32 of its data. torch.load
does not look at them, so that a flipped bit would become a weight. `.metadata`, which says where each item belongs, has
none: state.json keeps it, in the folders that this package writes.
"""
from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from sao_megatron.checkpoints import STATE, read_state
from sao_megatron.errors import UserError

CHECKSUM = "metadata"
"""Where state.json keeps it."""


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint says of its items. Raises UserError, also where that is not what was once written."""
    expected = read_state(folder).get(CHECKSUM)
    try:
        if expected not in (None, found := metadata_checksum(folder)):
            raise UserError(f"{folder}: its .metadata is damaged (checksum {found}, {STATE} says {expected}): take "
                            f"another checkpoint; a run goes on from an older one if this one's folder is removed")
        metadata = dcp.FileSystemReader(folder).read_metadata()
        _check_types(metadata)
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:  # whatever unpickling a damaged file raises
        raise UserError(f"{folder} is no checkpoint of the learner: its .metadata cannot be read ({error})") from None
    return metadata


def metadata_checksum(folder: Path) -> str:
    """Of what `read_metadata` reads, and compares with this."""
    return f"{zlib.crc32((folder / '.metadata').read_bytes()):08x}"


def _check_types(metadata: Metadata) -> None:
    """Raise TypeError or AttributeError for what unpickled, but is no metadata."""
    for index, info in metadata.storage_data.items():
        if not all(isinstance(text, str) for text in (index.fqn, info.relative_path)):
            raise TypeError(f"{index.fqn!r} in the file {info.relative_path!r}")
        if not all(isinstance(number, int) for number in (info.offset, info.length)):
            raise TypeError(f"{index.fqn} at {info.offset!r}, of length {info.length!r}")
    for key, value in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r}")
        if not isinstance(value, TensorStorageMetadata):
            continue
        numbers = [*value.size, *(n for piece in value.chunks for n in (*piece.offsets, *piece.sizes))]
        if not isinstance(value.properties.dtype, torch.dtype) or not all(isinstance(n, int) for n in numbers):
            raise TypeError(f"{key} with {value}")


def check(folder: Path, prefix: str = "", share: int = 0, shares: int = 1) -> None:
    """Read all items whose keys begin with `prefix`, or the part `share` of `shares` of them, and compare them with
    their CRCs. Raises UserError naming file and item."""
    found = sorted((info.relative_path, info.offset, info.length, index.fqn)
                   for index, info in read_metadata(folder).storage_data.items() if index.fqn.startswith(prefix))
    for name, offset, length, key in found[share::shares]:
        try:
            with (folder / name).open("rb") as file, zipfile.ZipFile(_Slice(file, offset, length)) as item:
                damaged = item.testzip()
        except Exception as error:  # whatever unpacking a damaged archive raises
            damaged = str(error) or type(error).__name__
        if damaged is not None:
            raise UserError(f"{folder / name}: the data of {key} are damaged ({damaged}): take another checkpoint; a "
                            f"run goes on from an older one if this one's folder is removed")


class _Slice(io.RawIOBase):
    """Bytes `start` … `start + length` of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("seek before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[:len(data)] = data
        self._at += len(data)
        return len(data)
