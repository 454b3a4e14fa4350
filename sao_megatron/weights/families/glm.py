"""GLM-4.5, 4.6 and 4.7 MoE: GQA with partial RoPE, leading dense layers, a shared expert, sigmoid routing."""
from __future__ import annotations

from sao_megatron.weights.families import blocks
from sao_megatron.weights.rules import Family

GLM4_MOE = Family(
    name="GLM-4.5 MoE", architecture="Glm4MoeForCausalLM",
    rules=(blocks.ENDS + blocks.GQA + blocks.QKV_BIAS + blocks.QK_NORM + blocks.DENSE_MLP + blocks.experts()
           + blocks.SHARED_EXPERTS + blocks.CORRECTION_BIAS),
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | blocks.sigmoid_router(hf) | dict(
        add_qkv_bias=hf["attention_bias"], qk_layernorm=hf["use_qk_norm"]),
    used_fields=blocks.USED | blocks.USED_BY_SIGMOID_ROUTER | {
        "attention_bias", "use_qk_norm", "partial_rotary_factor"},
    harmless_fields=blocks.HARMLESS_WITH_SIGMOID_ROUTER,
    only={key: value for key, value in blocks.ONLY_WITH_SIGMOID_ROUTER.items() if key != "attention_bias"},
    checks=(blocks.check_sigmoid_router,))
