"""Qwen2.5 (biases on q, k and v), Qwen3 (QK-norm) and Qwen3-MoE (softmax top-k routing)."""
from __future__ import annotations

from sao_megatron.weights.families import blocks
from sao_megatron.weights.rules import Family

_ONLY = blocks.ONLY | {"use_sliding_window": False}
_HARMLESS = blocks.HARMLESS | {"sliding_window", "layer_types"}  # both say nothing while use_sliding_window is false

QWEN2 = Family(
    name="Qwen2.5", architecture="Qwen2ForCausalLM", model_type="qwen2",
    rules=blocks.ENDS + blocks.GQA + blocks.QKV_BIAS + blocks.DENSE_MLP,
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | dict(add_qkv_bias=True),
    used_fields=blocks.USED, harmless_fields=_HARMLESS, only=_ONLY, checks=(blocks.check_layer_types,))

QWEN3 = Family(
    name="Qwen3", architecture="Qwen3ForCausalLM", model_type="qwen3",
    rules=blocks.ENDS + blocks.GQA + blocks.QK_NORM + blocks.DENSE_MLP,
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | dict(qk_layernorm=True),
    used_fields=blocks.USED, harmless_fields=_HARMLESS, only=_ONLY | {"attention_bias": False},
    checks=(blocks.check_layer_types,))

QWEN3_MOE = Family(
    name="Qwen3-MoE", architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe",
    rules=blocks.ENDS + blocks.GQA + blocks.QK_NORM + blocks.experts(),
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | blocks.softmax_router(hf) | dict(
        qk_layernorm=True, moe_router_pre_softmax=not hf["norm_topk_prob"]),
    used_fields=blocks.USED | blocks.USED_BY_EXPERTS | {"norm_topk_prob"}, harmless_fields=_HARMLESS,
    only=_ONLY | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    checks=(blocks.check_layer_types,))
