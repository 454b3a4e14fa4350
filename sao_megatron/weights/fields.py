"""The numbers of a config.json: of the right kind, and such that they go together."""
from __future__ import annotations

import math

from sao_megatron.errors import UserError

_FLAGS = {"tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm"}
_REALS = {"rms_norm_eps", "rope_theta", "routed_scaling_factor"}
_OPTIONAL = {"num_nextn_predict_layers", "index_topk_freq", "index_skip_topk_offset"}
"""Checked where they are there, though no family asks for them."""
_MAY_BE_ZERO = {"first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers", "index_skip_topk_offset"}
_MAY_BE_NULL = {"q_lora_rank", "n_shared_experts", "num_nextn_predict_layers"}
"""The families' own checks say what 0 and null mean."""
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("num_experts", "n_group"))
_AT_MOST = (("num_experts_per_tok", "num_experts"), ("first_k_dense_replace", "num_hidden_layers"),
            ("topk_group", "n_group"))


def check(hf: dict, used: frozenset[str], architecture: str) -> None:
    """Raise UserError for a field of `used` that is no number a model can have, or for two that do not go together."""
    for key in sorted((used | _OPTIONAL) & hf.keys()):
        if expected := _expected(key, hf[key]):
            raise UserError(f"config.json: {key}={hf[key]!r} cannot be for {architecture}; expected {expected}")
    for key, divisor in _MULTIPLES:
        if {key, divisor} <= used & hf.keys() and hf[key] % hf[divisor]:
            raise UserError(f"config.json: {key}={hf[key]} is not a multiple of {divisor}={hf[divisor]}")
    if "kv_lora_rank" not in used and hf.get("head_dim", 0) % 2:
        raise UserError(f"config.json: head_dim={hf['head_dim']} is odd; RoPE turns pairs of numbers")
    for key, limit in _AT_MOST:
        if {key, limit} <= used & hf.keys() and hf[key] > hf[limit]:
            raise UserError(f"config.json: {key}={hf[key]} is more than {limit}={hf[limit]}")


def _expected(key: str, value: object) -> str | None:
    """What the field should hold; None if it does."""
    if value is None and key in _MAY_BE_NULL:
        return None
    if key in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if key == "partial_rotary_factor":
        return None if number and 0 < value <= 1 else "a number from 0 to 1"
    if key in _REALS:
        return None if number and value > 0 else "a number above 0"
    least = 0 if key in _MAY_BE_ZERO else 1
    return None if number and isinstance(value, int) and value >= least else f"an integer of at least {least}"
