"""The numbers of a config.json: of the right kind, and such that they go together."""
from __future__ import annotations

import sys

from sao_megatron.errors import UserError

_FLAGS = {"tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm"}
_REALS = {"rms_norm_eps", "rope_theta", "routed_scaling_factor"}
_TEXTS = {"layer_types", "mlp_layer_types", "indexer_types"}
_OPTIONAL = {"num_nextn_predict_layers", "index_topk_freq", "index_skip_topk_offset"} | _TEXTS
"""Checked where they are there, though no family asks for them."""
_MAY_BE_ZERO = {"first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers", "index_skip_topk_offset"}
_MAY_BE_NULL = {"q_lora_rank", "n_shared_experts", "num_nextn_predict_layers"} | _TEXTS
"""The families' own checks say what 0 and null mean."""
_MOST_LAYERS, _MOST = 1000, 10**9
"""Some fields are compared with lists of as many entries as there are layers."""
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("num_experts", "n_group"))
_AT_MOST = (("num_experts_per_tok", "num_experts"), ("first_k_dense_replace", "num_hidden_layers"),
            ("topk_group", "n_group"), ("qk_rope_head_dim", "index_head_dim"))


def check(hf: dict, used: frozenset[str], architecture: str) -> None:
    """Raise UserError for a field of `used` that is no number a model can have, or for two that do not go together."""
    for key in sorted((used | _OPTIONAL) & hf.keys(), key=lambda key: (key == "head_dim", key)):  # reckoned from others
        if expected := _expected(key, hf[key]):
            raise UserError(f"config.json: {key}={hf[key]!r} cannot be for {architecture}; expected {expected}")
    for key, divisor in _MULTIPLES:
        if {key, divisor} <= used & hf.keys() and hf[key] % hf[divisor]:
            raise UserError(f"config.json: {key}={hf[key]} is not a multiple of {divisor}={hf[divisor]}")
    key = "qk_rope_head_dim" if "qk_rope_head_dim" in used else "head_dim"
    turned = int(hf[key] * hf.get("partial_rotary_factor", 1)) if key in hf else 2
    if turned % 2 or not turned:
        raise UserError(f"config.json: {key}={hf[key]} lets RoPE turn {turned} numbers of a head; it turns pairs")
    for key, limit in _AT_MOST:
        if {key, limit} <= used & hf.keys() and hf[key] > hf[limit]:
            raise UserError(f"config.json: {key}={hf[key]} is more than {limit}={hf[limit]}")


def is_number(value: object) -> bool:
    """Whether it is a finite number, which an integer of JSON is only if it has no more than 308 digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _expected(key: str, value: object) -> str | None:
    """What the field should hold; None if it does."""
    if value is None and key in _MAY_BE_NULL:
        return None
    if key in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if key in _TEXTS:
        return None if isinstance(value, list) and all(isinstance(text, str) for text in value) else "a list of texts"
    number = is_number(value)
    if key == "partial_rotary_factor":
        return None if number and 0 < value <= 1 else "a number from 0 to 1"
    if key in _REALS:
        return None if number and value > 0 else "a number above 0"
    least, most = 0 if key in _MAY_BE_ZERO else 1, _MOST_LAYERS if key == "num_hidden_layers" else _MOST
    return None if number and isinstance(value, int) and least <= value <= most else (
        f"an integer of at least {least} and at most {most}")
