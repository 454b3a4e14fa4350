"""GLM-4.5, 4.6 and 4.7 MoE: GQA with partial RoPE, leading dense layers, a shared expert, sigmoid routing.
GLM-5: multi-latent attention on the keys that an indexer picks (DSA, DeepSeek sparse attention).

The indexer stays as it came, for its choice has no gradient. The norms of GLM-5's latents use rms_norm_eps, as SGLang's
do; those of HF Transformers use 1e-6 whatever the config says.
"""
from __future__ import annotations

from sao_megatron.errors import UserError
from sao_megatron.weights.families import blocks
from sao_megatron.weights.rules import Family

GLM4_MOE = Family(
    name="GLM-4.5 MoE", architecture="Glm4MoeForCausalLM", model_type="glm4_moe",
    rules=(blocks.ENDS + blocks.GQA + blocks.QKV_BIAS + blocks.QK_NORM + blocks.DENSE_MLP + blocks.experts()
           + blocks.SHARED_EXPERTS + blocks.CORRECTION_BIAS),
    transformer_config=lambda hf: blocks.dimensions(hf) | blocks.gqa(hf) | blocks.sigmoid_router(hf) | dict(
        add_qkv_bias=hf["attention_bias"], qk_layernorm=hf["use_qk_norm"]),
    used_fields=blocks.USED | blocks.USED_BY_SIGMOID_ROUTER | {
        "attention_bias", "use_qk_norm", "partial_rotary_factor"},
    harmless_fields=blocks.HARMLESS_WITH_SIGMOID_ROUTER,
    only={key: value for key, value in blocks.ONLY_WITH_SIGMOID_ROUTER.items() if key != "attention_bias"},
    checks=(blocks.check_sigmoid_router,),
    has=lambda hf, rule, layer: (
        hf["attention_bias"] if rule in blocks.QKV_BIAS else hf["use_qk_norm"] if rule in blocks.QK_NORM
        else blocks.in_dense_or_sparse_layer(hf, rule, layer)))


def _sparse_attention(hf: dict) -> dict:
    return dict(
        experimental_attention_variant="dsa", dsa_indexer_n_heads=hf["index_n_heads"],
        dsa_indexer_head_dim=hf["index_head_dim"], dsa_indexer_topk=hf["index_topk"], dsa_indexer_loss_coeff=0.0,
        dsa_indexer_topk_freq=hf.get("index_topk_freq", 1), dsa_indexer_skip_topk_offset=_offset(hf),
        dsa_indexer_rope_interleaved=True, dsa_indexer_rotate_activation=False, dsa_indexer_k_norm_epsilon=1e-6)


def _offset(hf: dict) -> int:
    return hf.get("index_skip_topk_offset", 2)


def indexer_types(hf: dict) -> list[str]:
    """'full' for each layer with an indexer of its own, 'shared' for those that use the last one's choice (GLM-5.2)."""
    every, offset = hf.get("index_topk_freq", 1), _offset(hf)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(hf["num_hidden_layers"])]


def _check_layers(hf: dict) -> None:
    dense = hf["first_k_dense_replace"]
    pattern = ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense)
    if hf.get("mlp_layer_types", pattern) != pattern:
        raise UserError(f"config.json: mlp_layer_types is not supported unless the first_k_dense_replace={dense} first "
                        "layers are dense and all others sparse")
    if set(hf.get("layer_types") or ()) - {"indexed_attention"}:
        raise UserError("config.json: layer_types is not supported unless every layer is 'indexed_attention'")
    if hf.get("indexer_types", indexer_types(hf)) != indexer_types(hf):
        raise UserError("config.json: indexer_types is not supported unless it is the pattern that index_topk_freq="
                        f"{hf.get('index_topk_freq', 1)} and index_skip_topk_offset={_offset(hf)} give: Megatron-Core "
                        "has no other")


GLM5 = Family(
    name="GLM-5", architecture="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa",
    rules=(blocks.ENDS + blocks.MLA + blocks.INDEXER + blocks.DENSE_MLP + blocks.experts() + blocks.SHARED_EXPERTS
           + blocks.CORRECTION_BIAS),
    transformer_config=lambda hf: (
        blocks.dimensions(hf) | blocks.mla(hf) | blocks.sigmoid_router(hf) | _sparse_attention(hf)),
    used_fields=blocks.USED | blocks.USED_BY_SIGMOID_ROUTER | blocks.USED_BY_MLA | {
        "index_topk", "index_n_heads", "index_head_dim"},
    harmless_fields=blocks.HARMLESS_WITH_SIGMOID_ROUTER | {
        "qk_head_dim", "index_share_for_mtp_iteration", "index_topk_freq", "index_skip_topk_offset",
        "mlp_layer_types", "layer_types", "indexer_types"},  # the last three are checked
    only=blocks.ONLY_WITH_SIGMOID_ROUTER | {
        "rope_interleave": True, "indexer_rope_interleave": True, "mlp_bias": False},
    checks=(blocks.check_mla, blocks.check_sigmoid_router, _check_layers),
    has=lambda hf, rule, layer: (indexer_types(hf)[layer] == "full" if rule in blocks.INDEXER
                                 else blocks.in_dense_or_sparse_layer(hf, rule, layer)))
