"""The comparison of two checkpoints, tensor by tensor, whatever their formats."""
from __future__ import annotations

from pathlib import Path

import torch

from sao_megatron.conversion.formats import model_directory
from sao_megatron.conversion.job import share
from sao_megatron.errors import UserError
from sao_megatron.learner.megatron_folder import MegatronFolder
from sao_megatron.weights import hf
from sao_megatron.weights.folder import SafetensorsFolder, common_name
from sao_megatron.weights.rules import HEAD

SHOWN = 10
"""Differences that are printed."""


def verify(first: Path, second: Path | None = None) -> int:
    """Compare every tensor of two checkpoints, each of either kind, and print the first differences; or, given one,
    read all of it and compare it with its checksums. Returns how many tensors differ.

    Tensors stored in different types are compared in the second one's.
    """
    a = _open(first)
    if second is None:
        return _verify_one(first, a)
    b = _open(second)
    in_a, in_b = ({common_name(name): name for name in source.names()} for source in (a, b))
    names = list(in_b | in_a if isinstance(b, MegatronFolder) else in_a | in_b)  # along the parts of one that has any
    hf_config = hf.read_config(model_directory(first))
    rank, world = share()
    faults = compared = 0
    for name in names[len(names) * rank // world:len(names) * (rank + 1) // world]:
        if name not in in_a or name not in in_b:
            if not _is_left_out(name, hf_config):
                faults += 1
                _say(faults, f"{name}: only in {first if name in in_a else second}")
            continue
        compared += 1
        if difference := _difference(a, in_a[name], b, in_b[name]):
            faults += 1
            _say(faults, f"{name}: {difference}")
    print(f"{compared} tensors compared, {faults} differ" + (f" (in the share of process {rank})" if world > 1 else ""))
    return faults


def _verify_one(folder: Path, source) -> int:
    faults = 0
    names = source.names()
    for name in names:
        try:
            source.verify_checksum(name)
            source.get(name, source.shape(name))
        except UserError as error:
            faults += 1
            print(error)
    print(f"{len(names)} tensors of {folder} read, {faults} damaged" + (
        "" if source.has_checksums else " (it has no checksums: only what cannot be read was found)"))
    return faults


def _difference(a, name_a: str, b, name_b: str) -> str | None:
    shape_a, shape_b = a.shape(name_a), b.shape(name_b)
    if shape_a != shape_b:
        return f"shape {shape_a} and {shape_b}"
    x, y = a.get(name_a, shape_a), b.get(name_b, shape_b)
    x = x.to(y.dtype)
    bits = {2: torch.int16, 4: torch.int32}[y.element_size()]
    unequal = x.contiguous().view(bits) != y.contiguous().view(bits)  # NaN equals itself
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(unequal.nonzero()[0].tolist())
    largest = float((x.double() - y.double()).abs().max())
    return (f"{count} of {x.numel()} elements differ, first at {list(at)}: {float(x[at])!r} and {float(y[at])!r}; "
            f"largest difference {largest:.3g}")


def _say(count: int, text: str) -> None:
    if count <= SHOWN:
        print(text)


def _is_left_out(name: str, hf_config: dict) -> bool:
    """Tensors that lie in HF folders but belong to no part of the model that is trained: MTP layers, a tied head."""
    return (hf.is_mtp(name, hf_config["num_hidden_layers"])
            or name == HEAD and hf_config["tie_word_embeddings"])


def _open(folder: Path) -> SafetensorsFolder | MegatronFolder:
    if (folder / ".metadata").is_file():
        return MegatronFolder(folder, hf.read_config(model_directory(folder)), *share())
    source = SafetensorsFolder(folder)
    source.check()
    return source
