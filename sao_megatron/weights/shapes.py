"""The shape of every HF tensor of a model, from its config.json alone: folders are held to it before anything starts.

The learner gets the same from Megatron-Core's parameters (shards.hf_shapes), when they exist.
"""
from __future__ import annotations

import re
from collections.abc import Callable

from sao_megatron.weights.folder import common_name

Shape = tuple[int, ...]


def shape_of(hf: dict) -> Callable[[str], Shape]:
    """Shape by HF name, for a config in the spelling of weights/hf.py."""
    table = _ends(hf) | (_mla(hf) if "kv_lora_rank" in hf else _gqa(hf)) | _mlp("mlp", hf, hf["intermediate_size"])
    if "num_experts" in hf:
        table |= _experts(hf)
    if "index_topk" in hf:
        table |= _indexer(hf)
    return lambda name: table[re.sub(r"^model\.layers\.\d+\.|(?<=\.experts\.)\d+\.", "", common_name(name))]


def _ends(hf: dict) -> dict[str, Shape]:
    hidden, table = hf["hidden_size"], (hf["vocab_size"], hf["hidden_size"])
    norms = dict.fromkeys(("model.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,))
    return norms | dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), table)


def _gqa(hf: dict) -> dict[str, Shape]:
    hidden, width = hf["hidden_size"], hf["head_dim"]
    rows = {"q": hf["num_attention_heads"] * width, "k": hf["num_key_value_heads"] * width}
    rows["v"] = rows["k"]
    found: dict[str, Shape] = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    found |= {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
    found |= {f"self_attn.{x}_norm.weight": (width,) for x in "qk"}
    return found | {"self_attn.o_proj.weight": (hidden, rows["q"])}


def _mla(hf: dict) -> dict[str, Shape]:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    query, latent, rotary = hf["q_lora_rank"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    key, value = hf["qk_nope_head_dim"], hf["v_head_dim"]
    return {f"self_attn.{name}.weight": shape for name, shape in {
        "q_a_proj": (query, hidden), "q_a_layernorm": (query,), "q_b_proj": (heads * (key + rotary), query),
        "kv_a_proj_with_mqa": (latent + rotary, hidden), "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (key + value), latent), "o_proj": (hidden, heads * value)}.items()}


def _mlp(block: str, hf: dict, width: int) -> dict[str, Shape]:
    hidden = hf["hidden_size"]
    return {f"{block}.gate_proj.weight": (width, hidden), f"{block}.up_proj.weight": (width, hidden),
            f"{block}.down_proj.weight": (hidden, width)}


def _experts(hf: dict) -> dict[str, Shape]:
    width, experts, shared = hf["moe_intermediate_size"], hf["num_experts"], hf.get("n_shared_experts") or 0
    return _mlp("mlp.experts", hf, width) | _mlp("mlp.shared_experts", hf, shared * width) | {
        "mlp.gate.weight": (experts, hf["hidden_size"]), "mlp.gate.e_score_correction_bias": (experts,)}


def _indexer(hf: dict) -> dict[str, Shape]:
    heads, width = hf["index_n_heads"], hf["index_head_dim"]
    return {f"self_attn.indexer.{name}": shape for name, shape in {
        "wq_b.weight": (heads * width, hf["q_lora_rank"]), "wk.weight": (width, hf["hidden_size"]),
        "k_norm.weight": (width,), "k_norm.bias": (width,), "weights_proj.weight": (heads, hf["hidden_size"])}.items()}
