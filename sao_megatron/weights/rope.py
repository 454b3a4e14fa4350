"""Rotary position embeddings in config.json: one spelling, and the scalings that Megatron-Core computes as HF does."""
from __future__ import annotations

from sao_megatron.errors import UserError
from sao_megatron.weights.fields import is_number

_FIELDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"), "default": (),
}
_OPTIONAL = {"default": (), "llama3": (), "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Fields that may stand within or beside the others."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core's RotaryEmbedding has these numbers built in."""


def canonical(parameters: dict, scaling: dict, hf: dict) -> dict:
    """Fields rope_theta and partial_rotary_factor, each where there is one, and rope_scaling.

    `parameters` and `scaling` are config.json's rope_parameters (transformers 5) and rope_scaling (before), `hf` the
    rest of it. Raises UserError where two of them differ: which one counts depends on who reads.
    """
    found: dict = {}
    for place in ({name: hf.get(name) for name in _BESIDE}, scaling, parameters):
        if not isinstance(place, dict):
            raise UserError(f"config.json: rope_scaling and rope_parameters are JSON objects, found {place!r}")
        for name, value in place.items():
            name = "rope_type" if name == "type" else name  # its older name; some files have both
            if value is not None and found.setdefault(name, value) is not value and found[name] != value:
                raise UserError(f"config.json: RoPE's {name} is {found[name]!r} in one place and {value!r} in another: "
                                f"leave the one that is meant")
    fields = {name: found.pop(name) for name in _BESIDE if name in found}
    kind = found.pop("rope_type", "default")
    return fields | {"rope_scaling": {"rope_type": kind, **found} if found or kind != "default" else None}


def check(scaling: dict | None, kinds: tuple[str, ...], architecture: str) -> None:
    """Raise UserError if the scaling is not one that Megatron-Core computes as HF does."""
    kind = scaling["rope_type"] if scaling else "default"
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"config.json: RoPE scaling {kind!r} is not supported for {architecture}; "
                        f"only {' and '.join(map(repr, kinds))} is")
    if not scaling:
        return
    for name in _FIELDS[kind]:
        if name not in scaling:
            raise UserError(f"config.json: RoPE scaling {kind!r} needs {name!r}, which is missing")
    for name in scaling.keys() - {"rope_type", *_FIELDS[kind], *_OPTIONAL[kind]}:
        raise UserError(f"config.json: RoPE scaling {kind!r} with the field {name!r} is not supported: remove it if it "
                        f"has no effect")
    for name, value in scaling.items():
        if name == "rope_type":
            continue
        whole = name == "original_max_position_embeddings"
        if not is_number(value) or value < 0 or value == 0 and name in _FIELDS[kind] or whole and value % 1:
            raise UserError(f"config.json: RoPE scaling {kind!r} with {name}={value!r} cannot be; expected "
                            f"{'an integer' if whole else 'a number'} above 0")
    if kind == "llama3":
        for name, value in _LLAMA3.items():
            if scaling[name] != value:
                raise UserError(f"config.json: RoPE scaling {kind!r} with {name}={scaling[name]!r} is not supported; "
                                f"Megatron-Core has {value} built in")
    # With one of the two alone, HF ignores it and Megatron-Core does not.
    if kind == "yarn" and bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        raise UserError("config.json: RoPE scaling 'yarn' needs both of mscale and mscale_all_dim, or neither")


def yarn(scaling: dict) -> dict:
    """Fields of Megatron's MLATransformerConfig; without mscale both are as HF's formula has it."""
    return dict(
        rope_type="yarn", rotary_scaling_factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        beta_fast=scaling.get("beta_fast") or 32, beta_slow=scaling.get("beta_slow") or 1,
        mscale=scaling.get("mscale") or 1.0, mscale_all_dim=scaling.get("mscale_all_dim") or 0.0)
