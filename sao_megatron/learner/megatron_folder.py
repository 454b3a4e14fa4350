"""The policy's weights in a checkpoint of the learner (Megatron-Core's distributed format), by HF names, part by part.

One process builds the whole model, under no parallelism, without the memory for it: Megatron leaves weights unset, and
pages that nobody touches take no memory. A *part* is a run of consecutive parameters of about `PART_BYTES`; only the
part at hand is filled, and then emptied. Parts are written as files of their own, by any number of processes, and
`join_parts` makes them one checkpoint.
"""
from __future__ import annotations

import io
import json
import math
import pickle
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sao_megatron.learner import integrity, runtime
from sao_megatron.learner import model as models
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from sao_megatron.config import ParallelSection
from sao_megatron.errors import RunError, UserError
from sao_megatron.files import sync
from sao_megatron.weights.hf import TensorSource
from sao_megatron.weights.rules import split
from sao_megatron.weights.shards import Parameter, ShardMap, hf_shapes
from sao_megatron.weights.slices import fill

PART_BYTES = 2**30  # a process needs about four times this: the part, what was read, what is written
PREFIX = "policy."


class WholeModel:
    """Every parameter of a model in this one process, in parts."""

    def __init__(self, hf_config: dict, dtype: torch.dtype):
        if not dist.is_initialized():  # a world of its own: processes that share a conversion do not talk
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel = ParallelSection(ranks=1)
        runtime.initialize(parallel, seed=0)
        self.dtype = dtype
        module, = models.build(hf_config, parallel, dtype)
        self.shards = ShardMap([module], hf_config)
        state = module.sharded_state_dict(metadata={
            "distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
            "distrib_optim_fully_reshardable_mem_efficient": False, "chained_optim_avoid_prefix": True,
            "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)})
        add_prefix_for_sharding(state, PREFIX)
        self._state = state
        tensors = *module.named_parameters(), *module.named_buffers()
        self._names = {id(tensor): name for name, tensor in tensors}
        self.parts = _parts(self.shards.parameters, PART_BYTES)

    def check(self, folder: Path, share: int, shares: int) -> None:
        """Raise UserError if the policy in a checkpoint is damaged (of several processes, each looks at its share), or
        has a tensor that this model lacks, such as a head where config.json ties it: what is left out makes another
        model. One that is lacking there is found in reading."""
        known = {value.key for value in nested_values(self._state) if not isinstance(value, ShardedObject)}
        tensors = {key: value for key, value in integrity.read_metadata(folder).state_dict_metadata.items()
                   if key.startswith(PREFIX) and isinstance(value, TensorStorageMetadata)}
        for key, value in tensors.items():
            if not _is_made_up(value):
                raise UserError(f"{folder}: the pieces of {key} do not make up the whole: its .metadata is damaged")
        if strange := tensors.keys() - known:
            raise UserError(f"{folder} holds the tensor {min(strange)}, for which the model of config.json has no "
                            f"place: name the folder of the model that was trained (--model)")
        integrity.check(folder, PREFIX, share, shares)

    def names(self, part: int) -> list[str]:
        """HF names of a part, in the order of its parameters."""
        return [name for parameter in self.parts[part] for name in parameter.hf_names]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every HF tensor of the model."""
        return {name: shape for p in self.shards.parameters for name, shape in zip(p.hf_names, self._shapes(p),
                                                                                  strict=True)}

    def bytes(self, part: int) -> int:
        return sum(parameter.tensor.nbytes for parameter in self.parts[part])

    def write(self, part: int, source: TensorSource, folder: Path) -> None:
        """Read a part from an HF folder and write it as `part-<n>.distcp` and `part-<n>.metadata`, which comes last."""
        for parameter in self.parts[part]:
            _resize(parameter.tensor, parameter.tensor.numel())
            for name in parameter.hf_names:
                source.verify_checksum(name)
            fill(parameter.tensor.detach(), parameter.rule, parameter.hf_names, self._shapes(parameter),
                 self.shards.geometry, 1, 0, source)
        _write_part(self._sharded(part, with_objects=part == 0), folder, part)
        self._empty(part)

    def read(self, part: int, folder: Path) -> dict[str, Tensor]:
        """The HF tensors of a part, from a checkpoint that any layout wrote. Raises UserError."""
        try:
            return self._read(part, folder)
        finally:
            self._empty(part)

    def _read(self, part: int, folder: Path) -> dict[str, Tensor]:
        for parameter in self.parts[part]:
            _resize(parameter.tensor, parameter.tensor.numel())
            parameter.tensor.detach().fill_(math.nan)  # where nothing is read, because .metadata is damaged, it stays
        wanted = _as_torch_saves_it(self._sharded(part))
        try:
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True,
                     planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        except (Exception, dcp.api.CheckpointException) as error:  # whatever reading a damaged file raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise UserError(f"{folder}: the tensors {self.names(part)[0]} … {self.names(part)[-1]} cannot be read "
                            f"({reason}): the checkpoint is damaged, or of another model") from None
        tensors = {}
        for parameter in self.parts[part]:
            if parameter.tensor.detach().amax().isnan():
                raise UserError(f"{folder}: the checkpoint has no data for a part of {', '.join(parameter.hf_names)}, "
                                f"or NaN: it is damaged, or a run's that has diverged; take another one")
            whole = split(parameter.rule, [parameter.tensor.detach()], self.shards.geometry)
            tensors |= {name: t.clone() for name, t in zip(parameter.hf_names, whole, strict=True)}
        return tensors

    def _shapes(self, parameter: Parameter) -> list[tuple[int, ...]]:
        return hf_shapes(parameter, 1, self.shards.geometry)

    def _sharded(self, part: int, with_objects: bool = False) -> dict:
        """The part's entries of the sharded state dict; `with_objects`: and all that are no parameters."""
        names = {self._names[id(parameter.tensor)] for parameter in self.parts[part]}
        known = {self._names[id(parameter.tensor)] for parameter in self.shards.parameters}
        return {name: value for name, value in self._state.items()
                if name in names or (with_objects and name not in known)}

    def _empty(self, part: int) -> None:
        for parameter in self.parts[part]:
            _resize(parameter.tensor, 0)


class MegatronFolder:
    """A TensorSource: the policy of a learner's checkpoint. Reading in the order of `names()` reads each part once."""

    has_checksums = True
    """They were looked at when it was opened."""

    def __init__(self, folder: Path, hf_config: dict, share: int, shares: int):
        self.folder = folder
        self.model = WholeModel(hf_config, stored_dtype(folder))
        self.model.check(folder, share, shares)
        self._shapes = self.model.shapes()
        self._part_of = {name: i for i in range(len(self.model.parts)) for name in self.model.names(i)}
        self._held: tuple[int, dict[str, Tensor]] = (-1, {})

    def names(self) -> list[str]:
        return list(self._part_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        """Part `index` of the tensor `name`; the model decides its shape."""
        part = self._part_of[name]
        if self._held[0] != part:
            self._held = (-1, {})
            self._held = part, self.model.read(part, self.folder)
        return self._held[1][name][index]

    def verify_checksum(self, name: str) -> None:
        """See `has_checksums`."""


def _is_made_up(tensor: TensorStorageMetadata) -> bool:
    """Whether the pieces of a tensor lie in it and are as large as it; `read` sees where two lie over each other, since
    something is lacking then."""
    inside = all(0 <= start and start + size <= whole for piece in tensor.chunks
                 for start, size, whole in zip(piece.offsets, piece.sizes, tensor.size, strict=False))
    return inside and sum(math.prod(piece.sizes) for piece in tensor.chunks) == math.prod(tensor.size)


def stored_dtype(folder: Path) -> torch.dtype:
    """Type of the policy's weights in a checkpoint. Raises UserError if there are none."""
    metadata, key = integrity.read_metadata(folder).state_dict_metadata, PREFIX + "embedding.word_embeddings.weight"
    if key not in metadata:
        raise UserError(f"{folder} holds no weights of a policy (no tensor {key})")
    return metadata[key].properties.dtype


def join_parts(folder: Path, parts: int) -> None:
    """Make the parts' metadata one (they stay), and so the folder a checkpoint."""
    pieces = [pickle.loads(_metadata_path(folder, part).read_bytes()) for part in range(parts)]
    whole = pieces[0]
    for piece in pieces[1:]:
        for key, entry in piece.state_dict_metadata.items():
            if key in whole.state_dict_metadata:  # another layer, or another expert, of one stacked tensor
                entry = replace(entry, chunks=whole.state_dict_metadata[key].chunks + entry.chunks)
            whole.state_dict_metadata[key] = entry
        whole.storage_data |= piece.storage_data
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _metadata_path(folder: Path, part: int) -> Path:
    return folder / f"part-{part:05d}.metadata"


def _as_torch_saves_it(state: dict) -> dict:
    """A sharded state dict by the names on disk, as torch.distributed.checkpoint takes it: it may hold any part of a
    model, whose tensors are read into and written from where they are."""
    storages = {value.data.untyped_storage().data_ptr() for value in nested_values(state) if _has_tensor(value)}
    apply_factories(state)  # they cut fused weights into views
    shards: dict[str, list[CheckpointableShardedTensor]] = defaultdict(list)
    result: dict[str, object] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedObject):
            result[value.unique_key] = _serialized(value)
            continue
        if value.data.untyped_storage().data_ptr() not in storages:
            raise NotImplementedError(f"Megatron-Core copies {value.key} to save it: it cannot be read in place")
        shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)  # its place in a stack of layers and experts
        whole = replace(value, data=value.data.detach().view(shape), local_shape=shape, prepend_axis_num=0)
        shards[value.key].append(CheckpointableShardedTensor.from_sh_ten(whole))
    return result | {key: LocalShardsContainer(parts) if len(parts) > 1 else parts[0] for key, parts in shards.items()}


def _has_tensor(value) -> bool:
    return isinstance(getattr(value, "data", None), Tensor)


def _serialized(value: ShardedObject) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save([value.data], buffer)
    return buffer


def _write_part(state: dict, folder: Path, part: int) -> None:
    """`part-<n>.distcp`, then `part-<n>.metadata`, each under its name only when it is whole."""
    if part == 0:
        state = state | {"common_state": ShardedObject("common_state", {}, (1,), (0,))}
    scratch, file = folder / f"part-{part:05d}.tmp", f"part-{part:05d}.distcp"
    try:
        dcp.save(_as_torch_saves_it(state), storage_writer=dcp.FileSystemWriter(scratch),
                 planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise RunError(f"{folder / file} cannot be written ({str(error).strip().splitlines()[-1]}): is its disk full?"
                       ) from None
    metadata = pickle.loads((scratch / ".metadata").read_bytes())
    written, = {info.relative_path for info in metadata.storage_data.values()}
    (scratch / written).rename(folder / file)
    metadata.storage_data = {k: replace(info, relative_path=file) for k, info in metadata.storage_data.items()}
    (scratch / "renamed").write_bytes(pickle.dumps(metadata))
    sync(scratch / "renamed")
    (scratch / "renamed").rename(_metadata_path(folder, part))
    (scratch / ".metadata").unlink()
    scratch.rmdir()


def _parts(parameters: list[Parameter], part_bytes: int) -> list[list[Parameter]]:
    """Consecutive parameters of at most about `part_bytes`."""
    parts: list[list[Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        if held and held + parameter.tensor.nbytes > part_bytes:
            parts.append([])
            held = 0
        parts[-1].append(parameter)
        held += parameter.tensor.nbytes
    return parts


def _resize(tensor: Tensor, elements: int) -> None:
    tensor.untyped_storage().resize_(elements * tensor.element_size())
