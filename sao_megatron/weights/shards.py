"""From HF tensors to this rank's Megatron parameters and back, under any TP × EP × ETP × PP layout.

Export is a stream: an *owner* rank yields (HF name, full tensor) one parameter at a time while the ranks that hold
the other tensor parallel parts take part in the gathers. Dense parameters of a pipeline stage are owned by its
tensor rank 0; experts are owned by the rank of their expert parallel group, so they never pass through another rank.
"""
from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from sao_megatron.weights import hf, saving
from sao_megatron.weights.families import family_of
from sao_megatron.weights.rules import Geometry, Rule, split
from sao_megatron.weights.slices import fill


@dataclass(frozen=True)
class Parameter:
    """One local parameter with what it is made of."""

    tensor: Tensor
    rule: Rule
    hf_names: tuple[str, ...]


class ShardMap:
    """The local parameters of a model (this rank's pipeline stage, in one chunk or several) tied to HF names.

    Built from the module itself, so that a parameter without a rule is an error (KeyError), never skipped.
    """

    def __init__(self, chunks: list, hf_config: dict, skip: frozenset[str] = frozenset(),
                 rules: dict[str, Rule] | None = None):
        """`skip`: parameters to leave out. `rules`: those that come before the family's, by Megatron name."""
        self.geometry = Geometry(hf_config["num_attention_heads"], hf_config["num_key_value_heads"],
                                 hf_config["head_dim"])
        family = family_of(hf_config)
        self.tied = hf_config["tie_word_embeddings"]
        self.parameters: list[Parameter] = []
        for chunk, local_name, tensor in _named_weights(chunks):
            if local_name in skip:
                continue
            if rules and local_name in rules:
                self.parameters.append(Parameter(tensor, rules[local_name], rules[local_name].hf))
                continue
            rule, names = family.find(_global_name(chunk, local_name))
            if self.tied and names == ("lm_head.weight",):
                names = ("model.embed_tokens.weight",)
            self.parameters.append(Parameter(tensor, rule, names))

    def load(self, source: hf.TensorSource) -> None:
        """Fill every parameter, reading only what this rank holds; owners also verify what has checksums, whole."""
        for parameter in self.parameters:
            if _owner(parameter.rule) == dist.get_rank():
                for name in parameter.hf_names:
                    source.verify_checksum(name)
            group = _tensor_group(parameter.rule)
            shapes = hf_shapes(parameter, group.size(), self.geometry)
            fill(parameter.tensor.detach(), parameter.rule, parameter.hf_names, shapes, self.geometry, group.size(),
                 group.rank(), source)

    def owners(self) -> list[int]:
        """Global ranks that own parameters, in the order in which they export. Collective over all ranks."""
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {_owner(parameter.rule) for parameter in self.parameters} - {None})
        return sorted(set().union(*gathered))

    def export(self, owner: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream what global rank `owner` owns, or (None) what each rank owns. Every rank calls this, and gets what is
        its own.

        Ranks that hold no part of the owner's parameters return at once. Without `owner` all groups gather at the same
        time; all ranks of a group meet its parameters in the same order.
        """
        seen = set()
        for parameter in self.parameters:
            holder = _owner(parameter.rule)
            if holder is None or owner not in (None, holder) or parameter.hf_names in seen:
                continue
            seen.add(parameter.hf_names)  # a tied head is the embedding once more
            group = _tensor_group(parameter.rule)
            shards = _gather(parameter.tensor.detach(), group)
            if dist.get_rank() == holder:
                yield from zip(parameter.hf_names, split(parameter.rule, shards, self.geometry), strict=True)


def _named_weights(chunks: list) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
    """Parameters and the buffers that a checkpoint holds, the routers' correction biases, each with its chunk."""
    for chunk in chunks:
        yield from ((chunk, *named) for named in chunk.named_parameters())
        yield from ((chunk, *named) for named in chunk.named_buffers() if named[0].endswith(".expert_bias"))


def _owner(rule: Rule) -> int | None:
    """Owner of this rank's copy of a parameter; None on data parallel replicas, which export nothing."""
    if rule.expert:
        replica = ps.get_expert_data_parallel_rank()
        group = ps.get_expert_tensor_parallel_group()
    else:
        replica = ps.get_data_parallel_rank(with_context_parallel=True)
        group = ps.get_tensor_model_parallel_group()
    return None if replica else dist.get_global_rank(group, 0)


def _tensor_group(rule: Rule) -> dist.ProcessGroup:
    return ps.get_expert_tensor_parallel_group() if rule.expert else ps.get_tensor_model_parallel_group()


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return shards


def _global_name(model, name: str) -> str:
    """Local names count layers and experts from 0 in every chunk; rules speak of global ones."""
    if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = model.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{match[2]}"
    offset = ps.get_expert_model_parallel_rank() * (model.config.num_moe_experts or 0)
    offset //= ps.get_expert_model_parallel_world_size()
    name = re.sub(r"(?<=local_experts\.)(\d+)", lambda m: str(int(m[1]) + offset), name)
    return re.sub(r"(?<=experts\.linear_fc[12]\.weight)(\d+)", lambda m: str(int(m[1]) + offset), name)


def hf_shapes(parameter: Parameter, parts: int, geometry: Geometry) -> list[tuple[int, ...]]:
    """Shapes of the full HF tensors behind a local parameter, worked out on the meta device by `split`."""
    shards = [torch.empty(parameter.tensor.shape, device="meta")] * parts
    return [tuple(t.shape) for t in split(parameter.rule, shards, geometry)]


def save_hf(shard_map: ShardMap, folder: Path, model_dir: Path, max_bytes: int = saving.MAX_BYTES,
            beside: dict[str, dict] | None = None, mtp: bool = False) -> None:
    """Write an HF checkpoint folder from all ranks (collective): each owner writes its own files, rank 0 the rest.

    `beside`: more JSON files, by name; `mtp`: with the layers for multi-token prediction of `model_dir`. The folder
    appears by rename when complete; a crash leaves only `<folder>.partial`. See weights/saving.py.
    """
    partial = saving.partial_of(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    entries: dict[str, saving.Entry] = {}
    for owner in shard_map.owners():
        entries |= saving.write_files(shard_map.export(owner), partial, f"model-{owner:05d}", max_bytes)
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, entries)
    if dist.get_rank() == 0:
        merged = {name: entry for part in parts for name, entry in part.items()}
        saving.finish(folder, merged, model_dir, beside, mtp)
    dist.barrier()
