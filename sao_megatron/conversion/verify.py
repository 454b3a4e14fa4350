"""The comparison of two checkpoints, tensor by tensor, whatever their formats."""
from __future__ import annotations

from pathlib import Path

import torch

from sao_megatron.conversion import config_json
from sao_megatron.conversion.job import share
from sao_megatron.errors import UserError
from sao_megatron.learner import integrity
from sao_megatron.learner.megatron_folder import MegatronFolder
from sao_megatron.weights import hf
from sao_megatron.weights.folder import SafetensorsFolder, common_name
from sao_megatron.weights.maths import differences

SHOWN = 10
"""Differences that are printed."""


def verify(first: Path, second: Path | None = None) -> int:
    """Compare every tensor of two checkpoints, each of either kind, and print the first differences; or, given one,
    read all of it and compare it with its checksums. Returns how many differences there are.

    Tensors stored in different types are compared in the second one's. A field of config.json with which they compute
    differently is a difference too.
    """
    if second is None:
        return _verify_one(first, _open(first))
    config_a, config_b = config_json.of(first), config_json.of(second)
    a, b = _open(first), _open(second)
    in_a, in_b = ({common_name(name): name for name in source.names()} for source in (a, b))
    names = list(in_b | in_a if isinstance(b, MegatronFolder) else in_a | in_b)  # along the parts of one that has any
    rank, world = share()
    fields = differences(config_a, config_b) if rank == 0 else []
    for field in fields:
        print(f"config.json: {field}")
    faults = compared = 0
    for name in names[len(names) * rank // world:len(names) * (rank + 1) // world]:
        if name not in in_a or name not in in_b:
            if not hf.is_left_out(name, config_a if name in in_a else config_b):
                faults += 1
                _say(faults, f"{name}: only in {first if name in in_a else second}")
            continue
        compared += 1
        if difference := _difference(a, in_a[name], b, in_b[name]):
            faults += 1
            _say(faults, f"{name}: {difference}")
    print(f"{compared} tensors compared, {faults} differ" + (f" (in the share of process {rank})" if world > 1 else "")
          + (", and config.json does" if fields else ""))
    return faults + len(fields)


def _verify_one(folder: Path, source) -> int:
    faults = 0
    names = source.names()
    if isinstance(source, MegatronFolder):
        integrity.check(folder, "", *share())  # critic and optimizers too
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


def _open(folder: Path) -> SafetensorsFolder | MegatronFolder:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist, or is no folder")
    if (folder / ".metadata").is_file():
        return MegatronFolder(folder, config_json.of(folder), *share())
    source = SafetensorsFolder(folder)
    source.check()
    return source
