"""Llama 3 (RoPE scaling 'llama3'), SmolLM2, and Mixtral (softmax top-k routing)."""
from __future__ import annotations

from sao_megatron.weights.families import blocks
from sao_megatron.weights.rules import Family

LLAMA = Family(
    name="Llama 3", architecture="LlamaForCausalLM", model_type="llama",
    rules=blocks.ENDS + blocks.GQA + blocks.DENSE_MLP,
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf),
    used_fields=blocks.USED, harmless_fields=blocks.HARMLESS | {"is_llama_config", "transformers.js_config"},
    only=blocks.ONLY | {"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
    rope_types=("default", "llama3"))

MIXTRAL = Family(
    name="Mixtral", architecture="MixtralForCausalLM", model_type="mixtral",
    rules=blocks.ENDS + blocks.GQA + blocks.experts("block_sparse_moe", "w1", "w3", "w2"),
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | blocks.softmax_router(hf),
    used_fields=blocks.USED | blocks.USED_BY_EXPERTS, harmless_fields=blocks.HARMLESS,
    only=blocks.ONLY | {"sliding_window": None, "router_jitter_noise": 0.0})
