"""DeepSeek-V3 and R1, Kimi-K2: multi-latent attention, YaRN, shared experts, sigmoid routing in groups."""
from __future__ import annotations

from sao_megatron.weights.families import blocks
from sao_megatron.weights.rules import Family

DEEPSEEK_V3 = Family(
    name="DeepSeek-V3", architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3",
    rules=(blocks.ENDS + blocks.MLA + blocks.DENSE_MLP + blocks.experts() + blocks.SHARED_EXPERTS
           + blocks.CORRECTION_BIAS),
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.mla(hf) | blocks.sigmoid_router(hf),
    used_fields=blocks.USED | blocks.USED_BY_SIGMOID_ROUTER | blocks.USED_BY_MLA,
    harmless_fields=blocks.HARMLESS_WITH_SIGMOID_ROUTER | {"qk_head_dim"},
    only=blocks.ONLY_WITH_SIGMOID_ROUTER | {"rope_interleave": True}, rope_types=("default", "yarn"),
    checks=(blocks.check_mla, blocks.check_sigmoid_router), has=blocks.in_dense_or_sparse_layer)
