"""Tensors of an HF checkpoint folder, by their per-expert names, read slice by slice and checked.

Read as they come: safetensors in one file or many with an index; experts one by one or fused (transformers 5); float32,
bfloat16, float16, and float8 with a scale per block (DeepSeek's), which is multiplied out.
"""
from __future__ import annotations

import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sao_megatron.errors import UserError

INDEX, SINGLE, CHECKSUMS = "model.safetensors.index.json", "model.safetensors", "checksums.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Stored types that are weights as they are; F8_E4M3 is one together with its scales."""
_EXPERT = re.compile(r"(?P<block>.*)\.(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)"
                     r"\.(?P<part>gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
_FUSED = re.compile(r"(?P<block>.*)\.mlp\.experts\.(?P<part>gate_up_proj|down_proj)")
_HALF = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
_MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
SCALE = "_scale_inv"
"""What the name of a float8 tensor's scales adds to its own."""
_MAPPED_BYTES = 16 * 2**20  # a file's pages count as this process's memory until it is closed


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a file, the name there, and what of that is meant (expert, half of gate and up)."""

    file: str
    stored: str
    expert: int | None = None
    half: int | None = None


class SafetensorsFolder:
    """A TensorSource. `bytes_read` counts what was asked of the files."""

    def __init__(self, folder: Path):
        """Opens no file of tensors; `check` does."""
        self.folder = Path(folder)
        self.bytes_read = self._mapped = 0
        self._open: tuple[str, safe_open] | None = None
        self.file_of = self._read_index()
        """The file of each tensor, by stored names."""
        checksums = self.folder / CHECKSUMS
        self._checksums = read_json(checksums).get("tensors") if checksums.is_file() else {}
        if not isinstance(self._checksums, dict):
            raise UserError(f"{checksums} has no checksums by tensor: remove it to read the folder without them")
        self._block = self._block_size()

    @property
    def is_quantized(self) -> bool:
        return self._block is not None

    @property
    def has_checksums(self) -> bool:
        return bool(self._checksums)

    def check(self) -> dict[str, str]:
        """Open every file, look for every tensor that the index names and for any that is there twice, in two files or
        in two spellings. Returns the file of each tensor that the index does not name. Raises UserError naming file and
        tensor."""
        found: dict[str, str] = {}
        for file in sorted(set(self.file_of.values())):
            for name in self._opened(file).keys():  # noqa: SIM118
                if name in found:
                    raise UserError(f"{self.folder / file}: tensor {name} lies in {found[name]} too, so that every "
                                    f"reader may take another one: copy or export this checkpoint again")
                found[name] = file
        for name, file in self.file_of.items():
            if found.get(name) != file:
                raise UserError(f"{self.folder / file}: tensor {name} is missing, the index says it is there: one of "
                                f"the two is damaged, or from another checkpoint")
        spelled: dict[str, str] = {}
        for name in self.names():
            if (other := spelled.get(common_name(name))) is not None:
                how = "fused with other experts" if other == name else f"as {other}"
                raise UserError(f"{self.folder}: tensor {name} lies there {how} too, so that every reader may take "
                                f"another one: remove the one that is not the model, or export this checkpoint again")
            spelled[common_name(name)] = name
        self._open = None
        return {name: file for name, file in found.items() if name not in self.file_of}

    def names(self) -> list[str]:
        """Every tensor, by per-expert names, without the scales of others (float8)."""
        found: list[str] = []
        for stored in sorted(self.file_of):
            if stored.endswith(SCALE) and stored.removesuffix(SCALE) in self.file_of:
                continue
            match = _FUSED.fullmatch(stored)
            if match is None:
                found.append(stored)
                continue
            experts = self._fused_shape(stored)[0]
            parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else ("down_proj",)
            found += [f"{match['block']}.mlp.experts.{e}.{part}.weight" for e in range(experts) for part in parts]
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor `name`."""
        place = self._place(name)
        shape = self._shape(place)
        if place.expert is not None:
            shape = shape[1:]
        return shape if place.half is None else (shape[0] // 2, *shape[1:])

    def get(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        """Part `index` of the tensor `name`, of full shape `shape`; in its stored type, float8 as float32. Raises
        UserError if it is not what config.json asks for, or not finite."""
        place = self._place(name)
        stored, found, is_float8 = self._expected(place, name, shape)
        index = [slice(*part.indices(size)) for part, size in zip(
            (*index, *[slice(None)] * (len(found) - len(index))), found, strict=True)]
        if place.half is not None:
            rows = found[0] * place.half
            index[0] = slice(index[0].start + rows, index[0].stop + rows)
        tensor = stored[(*([] if place.expert is None else [place.expert]), *index)]
        self.bytes_read += tensor.nbytes
        self._mapped += tensor.nbytes
        if is_float8:
            tensor = self._scaled(tensor, place, index, self._shape(place))
        if not _is_finite(tensor):
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} holds numbers that are not finite (NaN "
                            f"or infinite): copy this checkpoint again, or take another one")
        return tensor

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError for a tensor that is not of its shape, or of a type that is no weight's. Reads no data."""
        places = sorted(((self._place(name), name) for name in shapes), key=lambda found: (found[0].file, found[1]))
        for place, name in places:  # file by file
            self._expected(place, name, shapes[name])
        self._open = None

    def _expected(self, place: Place, name: str, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...], bool]:
        """What lies at a place, its shape, and whether it is float8. Raises UserError if it cannot be `name`."""
        stored = self._stored_slice(place)
        is_float8 = stored.get_dtype() == "F8_E4M3"
        if stored.get_dtype() not in DTYPES and not is_float8:
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} has type {stored.get_dtype()}; weights "
                            f"are read from {', '.join(DTYPES)} and from F8_E4M3 with scales")
        if not is_float8 and place.stored + SCALE in self.file_of:
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} has type {stored.get_dtype()} and yet "
                            f"block scales ({place.stored}{SCALE}): were they multiplied in? If so, remove them")
        if (found := self.shape(name)) != tuple(shape):
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} has shape {self._shape(place)}, "
                            f"config.json asks for {tuple(shape)}" + (f" for {name}" if place.stored != name else ""))
        return stored, found, is_float8

    def verify_checksum(self, name: str) -> None:
        """Compare the tensor with checksums.json, where the folder has one (ours do). Raises UserError."""
        place = self._place(name)
        if (expected := self._checksums.get(place.stored)) is None:
            return
        tensor = self._opened(place.file).get_tensor(place.stored)
        self._mapped += tensor.nbytes
        if (found := checksum(tensor)) != expected:
            raise UserError(f"{self.folder / place.file}: the data of tensor {place.stored} are damaged (checksum "
                            f"{found}, {CHECKSUMS} says {expected}): copy or export this checkpoint again")

    def _read_index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            files = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise UserError(f"{self.folder / INDEX} has no weight_map from tensors to files: it is not an index of "
                                f"safetensors files")
            if (self.folder / SINGLE).is_file() and SINGLE not in files.values():
                raise UserError(f"{self.folder} holds {SINGLE} and an index of other files, and some readers take the "
                                f"one, some the other: remove the one that is not the model")
            for name, file in files.items():
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise UserError(f"{self.folder / INDEX}: tensor {name} is said to lie in {file}, outside this "
                                    f"folder: name a file in it (a link will do)")
                if not os.path.isfile(self.folder / file):  # unlike Path's, False for names that no file can have
                    raise UserError(f"{self.folder / file} does not exist; the index names it for tensor {name}: copy "
                                    f"the missing file, or the whole checkpoint again")
            return files
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        raise UserError(f"{self.folder} holds no {SINGLE} and no {INDEX}: convert the checkpoint to safetensors first")

    def _block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale in a float8 checkpoint; None if this is none. Refuses other kinds."""
        path = self.folder / "config.json"
        quantized = read_json(path).get("quantization_config") if path.is_file() else None
        if not quantized:
            return None
        fields = quantized if isinstance(quantized, dict) else {}
        match fields.get("quant_method"), fields.get("weight_block_size"):
            case "fp8", [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
            case method, block:
                raise UserError(f"{path}: weights quantised by {method!r} (block {block}) cannot be read; only 'fp8' "
                                f"with a weight_block_size of rows and columns can: use the unquantised checkpoint")

    def _place(self, name: str) -> Place:
        if name in self.file_of:
            return Place(self.file_of[name], name)
        if match := _EXPERT.fullmatch(name):
            half = _HALF.get(match["part"])
            fused = f"{match['block']}.mlp.experts.{'down_proj' if half is None else 'gate_up_proj'}"
            if fused in self.file_of:
                place = Place(self.file_of[fused], fused, int(match["expert"]), half)
                experts = self._fused_shape(fused)[0]
                if place.expert >= experts:
                    raise UserError(f"{self.folder / place.file}: tensor {fused} has {experts} experts; config.json "
                                    f"asks for more ({name})")
                return place
        renamed = name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's router, as transformers 5 calls it
        if renamed in self.file_of:
            return Place(self.file_of[renamed], renamed)
        raise UserError(f"{self.folder}: tensor {name} is missing; config.json asks for it, but "
                        f"{INDEX if (self.folder / INDEX).is_file() else SINGLE} does not name it")

    def _scaled(self, tensor: Tensor, place: Place, index: list[slice], shape: tuple[int, ...]) -> Tensor:
        """float32 of part `index` of a float8 matrix: each block times its scale."""
        scale = place.stored + SCALE
        if self._block is None or scale not in self.file_of or len(shape) != 2:
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} is float8 without block scales: "
                            f"expected a matrix, a tensor {scale}, and weight_block_size in config.json")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        part = tuple(slice(i.start // block, -(-i.stop // block)) for i, block in zip(index, self._block, strict=True))
        scales = self.get(scale, blocks, part).float()
        for dim, (i, block) in enumerate(zip(index, self._block, strict=True)):
            scales = scales.repeat_interleave(block, dim).narrow(dim, i.start % block, i.stop - i.start)
        return tensor.float() * scales

    def _fused_shape(self, fused: str) -> tuple[int, ...]:
        """Of a tensor of all experts, which is experts × rows × columns. Raises UserError for another."""
        place, gated = Place(self.file_of[fused], fused), fused.endswith("gate_up_proj")
        shape = self._shape(place)
        if len(shape) != 3 or 0 in shape or gated and shape[1] % 2:
            raise UserError(f"{self.folder / place.file}: tensor {fused} has shape {shape}; expected experts × "
                            f"{'rows of gate and as many of up' if gated else 'rows'} × columns")
        return shape

    def _shape(self, place: Place) -> tuple[int, ...]:
        return tuple(self._stored_slice(place).get_shape())

    def _stored_slice(self, place: Place):
        """safetensors' slice object of a stored tensor."""
        try:
            return self._opened(place.file).get_slice(place.stored)
        except SafetensorError:
            raise UserError(f"{self.folder / place.file}: tensor {place.stored} is missing, the index says it is "
                            f"there: one of the two is damaged, or from another checkpoint") from None

    def _opened(self, file: str):
        if self._open is None or self._open[0] != file or self._mapped > _MAPPED_BYTES:
            try:
                self._open, self._mapped = (file, safe_open(self.folder / file, framework="pt")), 0
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / file} is not a readable safetensors file (truncated or damaged?): "
                                f"{error}") from None
        return self._open[1]


def read_json(path: Path) -> dict:
    """A file that must hold a JSON object, and says nothing twice and differently. Raises UserError."""
    try:
        content = json.loads(path.read_text(), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _object(pairs: list[tuple[str, object]]) -> dict:
    found: dict = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"{key!r} stands there twice, with different values")
        found[key] = value
    return found


def _is_finite(tensor: Tensor) -> bool:
    """A sum sees every NaN and infinity, in a twentieth of `isfinite`'s time and without a copy; where it overflows,
    the extremes tell."""
    return math.isfinite(tensor.sum()) or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def common_name(name: str) -> str:
    """One name for a tensor that Mixtral's older folders call otherwise than those of transformers 5."""
    for old, new in _MIXTRAL.items():
        name = name.replace(old, new)
    return name


def checksum(tensor: Tensor) -> str:
    """CRC-32 of a tensor's bytes, in hexadecimal."""
    return f"{zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy()):08x}"
