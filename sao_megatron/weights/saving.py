"""Writing an HF checkpoint folder so that a crash never leaves one that looks complete.

Everything goes into `<folder>.partial`: tensors first, each file under its own name only once it is on the disk, then
checksums, tokenizer and config.json, the index last; then the folder is renamed.
"""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sao_megatron.errors import RunError
from sao_megatron.files import sync
from sao_megatron.weights.folder import CHECKSUMS, INDEX, SafetensorsFolder, checksum
from sao_megatron.weights.hf import files_beside, is_mtp, read_config

MAX_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Entry:
    """What the index and checksums.json say of one tensor."""

    file: str
    dtype: str
    bytes: int
    checksum: str


def partial_of(folder: Path) -> Path:
    folder = folder.absolute()  # "." has no name
    return folder.with_name(folder.name + ".partial")


def write_files(stream: Iterator[tuple[str, Tensor]], partial: Path, prefix: str,
                max_bytes: int = MAX_BYTES) -> dict[str, Entry]:
    """Write a stream to files `<prefix>-00000.safetensors` … of about `max_bytes`, of which one is held in memory."""
    entries: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    count = held = 0

    def write() -> None:
        nonlocal count, held
        file = f"{prefix}-{count:05d}.safetensors"
        _write_file(tensors, partial / file)
        entries.update({name: Entry(file, str(t.dtype).removeprefix("torch."), t.nbytes, checksum(t))
                        for name, t in tensors.items()})
        tensors.clear()
        count, held = count + 1, 0

    for name, tensor in stream:
        if held and held + tensor.nbytes > max_bytes:
            write()
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    if tensors:
        write()
    return entries


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_suffix(".tmp")
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"{path} cannot be written ({error}): is its disk full?") from None
    unfinished.chmod(0o644)  # safetensors lets only the owner read
    sync(unfinished)
    unfinished.rename(path)


def finish(folder: Path, entries: dict[str, Entry], model_dir: Path, beside: dict[str, dict] | None = None,
           mtp: bool = False) -> None:
    """Complete `<folder>.partial`, whose tensors are `entries`, with what `model_dir` has beside its own, with the JSON
    files `beside` and, if `mtp`, with its layers for multi-token prediction; then rename it. A folder that is already
    there is replaced."""
    partial = partial_of(folder)
    if mtp:
        dtype = getattr(torch, max(entries.values(), key=lambda entry: entry.bytes).dtype)
        entries = entries | write_files(_mtp_tensors(model_dir, dtype), partial, "model-mtp")
    entries = dict(sorted(entries.items()))
    _write_json(partial / CHECKSUMS, {"algorithm": "crc32", "tensors": {n: e.checksum for n, e in entries.items()}})
    copy_beside(model_dir, partial, max(entries.values(), key=lambda entry: entry.bytes).dtype, mtp)
    for name, content in (beside or {}).items():
        _write_json(partial / name, content)
    _write_json(partial / INDEX, {"metadata": {"total_size": sum(e.bytes for e in entries.values())},
                                  "weight_map": {name: e.file for name, e in entries.items()}})
    rename(partial, folder)


def _mtp_tensors(model_dir: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Layers for multi-token prediction as they lie in `model_dir`, multiplied out to `dtype` where it is in float8."""
    layers, source = read_config(model_dir)["num_hidden_layers"], SafetensorsFolder(model_dir)
    for name in source.names():
        if is_mtp(name, layers):
            source.verify_checksum(name)
            tensor = source.get(name, source.shape(name))
            yield name, tensor.to(dtype) if source.is_quantized and tensor.ndim == 2 else tensor


def copy_beside(model_dir: Path, target: Path, dtype: str, mtp: bool = False) -> None:
    """Copy tokenizer, code and config.json, the latter as that of a model stored in `dtype`."""
    for path in files_beside(model_dir):
        shutil.copy(path, target / path.name)
    hf = json.loads((model_dir / "config.json").read_text())
    _write_json(target / "config.json", exported_config(hf, dtype, mtp))


def rename(partial: Path, folder: Path) -> None:
    """Give a folder its name when all that it holds is on the disk; what had that name before is replaced."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)  # deleting takes a while: a crash meanwhile must not leave half of it under its name
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def exported_config(hf: dict, dtype: str, mtp: bool = False) -> dict:
    """config.json of a model written in `dtype` (what was read as float8 too); unless `mtp`, without layers for
    multi-token prediction."""
    exported = {key: value for key, value in hf.items() if key != "quantization_config"}
    exported["dtype" if "dtype" in hf else "torch_dtype"] = dtype
    return exported | ({"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in hf and not mtp else {})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
