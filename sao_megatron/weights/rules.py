"""How one Megatron parameter is made of HF tensors, as data: the language in which a model family is written.

A Rule ties a Megatron parameter name (with {layer}, {expert}) to the HF names it holds, says how they are fused
and how the result is split over (expert) tensor parallel ranks. The same rule serves loading, saving and publishing:
`join` makes this rank's parameter from full HF tensors, `split` makes full HF tensors from all ranks' parts.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sao_megatron.errors import UserError
from sao_megatron.weights import fields, rope

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Rule:
    megatron: tuple[str, ...]
    """Names of the parameter: the plain-torch one, then TransformerEngine's where it differs."""
    hf: tuple[str, ...]
    """HF names in fusing order: one, (q, k, v) or (gate, up)."""
    fuse: Literal["none", "qkv", "gate_up"] = "none"
    split_dim: int | None = None
    """Dimension that tensor parallel ranks divide; None = every rank holds it whole."""
    expert: bool = False
    """Belongs to one expert: split over expert tensor parallel ranks, owned by one expert parallel rank."""


@dataclass(frozen=True)
class Geometry:
    """Numbers that fusing q, k and v needs."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Family:
    """One architecture: its rules, and what its config.json means to Megatron-Core."""

    name: str
    architecture: str
    """`architectures[0]` in config.json."""
    model_type: str
    """The same in config.json's other field for it; there are more names for one architecture (kimi_k2)."""
    rules: tuple[Rule, ...]
    transformer_config: Callable[[dict], dict[str, Any]]
    """HF config -> fields of Megatron's TransformerConfig."""
    used_fields: frozenset[str]
    """Fields that must be there."""
    harmless_fields: frozenset[str]
    """Fields that do not change the maths of this stack."""
    only: dict[str, Any] = field(default_factory=dict)
    """Field -> the only value supported; it may be missing."""
    rope_types: tuple[str, ...] = ("default",)
    checks: tuple[Callable[[dict], None], ...] = ()
    """Each raises UserError for values that do not go together."""
    has: Callable[[dict, Rule, int], bool] = lambda hf, rule, layer: True
    """Whether a model with this HF config has the parameters of a rule in a layer."""
    _patterns: list = field(default_factory=list, compare=False)

    def __post_init__(self):
        for rule in self.rules:
            for name in rule.megatron:
                pattern = re.escape(name)
                for index in ("layer", "expert"):
                    pattern = pattern.replace(rf"\{{{index}\}}", rf"(?P<{index}>\d+)")
                self._patterns.append((re.compile(pattern + "$"), rule))

    def find(self, global_name: str) -> tuple[Rule, tuple[str, ...]]:
        """Rule and HF names of a Megatron parameter (global layer and expert numbers). KeyError if there is none."""
        for pattern, rule in self._patterns:
            if match := pattern.match(global_name):
                return rule, tuple(name.format(**match.groupdict()) for name in rule.hf)
        raise KeyError(f"{self.name} has no rule for the Megatron parameter {global_name}")

    def names(self, hf_config: dict) -> Iterator[str]:
        """Every HF tensor of the model of this config; a head only if it is not tied."""
        for rule in self.rules:
            layers = range(hf_config["num_hidden_layers"]) if "{layer}" in rule.hf[0] else (0,)
            experts = range(hf_config["num_experts"]) if rule.expert else (0,)
            found = (name.format(layer=layer, expert=expert) for layer in layers if self.has(hf_config, rule, layer)
                     for expert in experts for name in rule.hf)
            yield from (name for name in found if name != HEAD or not hf_config["tie_word_embeddings"])

    def check_config(self, hf_config: dict) -> None:
        """Raise UserError for a field of config.json that this family does not know, a value that it does not support,
        or a missing field."""
        for key, value in hf_config.items():
            if key in self.only and (value or None) != (self.only[key] or None):  # null is as good as false, 0 or []
                raise UserError(f"config.json: {key}={value!r} is not supported for {self.architecture}; "
                                f"only {self.only[key]!r} is")
            if key not in self.used_fields | self.harmless_fields | self.only.keys() | {"rope_scaling"}:
                raise UserError(f"config.json: field {key!r} is not known for {self.architecture} and may change "
                                f"the maths: remove it if it has no effect")
        fields.check(hf_config, self.used_fields, self.architecture)
        for key in sorted(self.used_fields - hf_config.keys()):
            raise UserError(f"config.json: field {key!r} is required for {self.architecture} and missing")
        rope.check(hf_config["rope_scaling"], self.rope_types, self.architecture)
        for check in self.checks:
            check(hf_config)


def join(rule: Rule, tensors: list[Tensor], geometry: Geometry, parts: int, part: int) -> Tensor:
    """This rank's parameter (`part` of `parts`) from full HF tensors, in the rule's order."""
    if rule.fuse == "gate_up":  # each rank holds its slice of gate above its slice of up
        return torch.cat([t.chunk(parts, rule.split_dim)[part] for t in tensors])
    whole = _fuse_qkv(tensors, geometry) if rule.fuse == "qkv" else tensors[0]
    return whole if rule.split_dim is None else whole.chunk(parts, rule.split_dim)[part]


def split(rule: Rule, shards: list[Tensor], geometry: Geometry) -> list[Tensor]:
    """Inverse of `join`: full HF tensors, in the rule's order, from the parameter of every tensor parallel rank."""
    if rule.fuse == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    whole = shards[0] if rule.split_dim is None else torch.cat(shards, rule.split_dim)
    return _unfuse_qkv(whole, geometry) if rule.fuse == "qkv" else [whole]


def _fuse_qkv(tensors: list[Tensor], g: Geometry) -> Tensor:
    """Megatron's order: for each kv head its query heads, its key, its value."""
    tail = tensors[0].shape[1:]
    per_group = [t.reshape(g.kv_heads, -1, *tail) for t in tensors]
    return torch.cat(per_group, 1).reshape(-1, *tail)


def _unfuse_qkv(fused: Tensor, g: Geometry) -> list[Tensor]:
    tail = fused.shape[1:]
    rows = [g.heads // g.kv_heads * g.head_dim, g.head_dim, g.head_dim]
    return [t.reshape(-1, *tail) for t in fused.reshape(g.kv_heads, sum(rows), *tail).split(rows, 1)]
