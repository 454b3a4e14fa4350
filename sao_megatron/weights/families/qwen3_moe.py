"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): GQA with QK-norm, RoPE, SwiGLU experts with softmax top-k routing."""
from __future__ import annotations

from sao_megatron.weights.rules import Family, Rule

_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

RULES = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), split_dim=0),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",), split_dim=0),
    Rule((_L + "input_layernorm.weight", _L + "self_attention.linear_qkv.layer_norm_weight"),
         (_H + "input_layernorm.weight",)),
    Rule((_L + "self_attention.linear_qkv.weight",),
         tuple(_H + f"self_attn.{x}_proj.weight" for x in "qkv"), fuse="qkv", split_dim=0),
    Rule((_L + "self_attention.q_layernorm.weight",), (_H + "self_attn.q_norm.weight",)),
    Rule((_L + "self_attention.k_layernorm.weight",), (_H + "self_attn.k_norm.weight",)),
    Rule((_L + "self_attention.linear_proj.weight",), (_H + "self_attn.o_proj.weight",), split_dim=1),
    Rule((_L + "pre_mlp_layernorm.weight",), (_H + "post_attention_layernorm.weight",)),
    Rule((_L + "mlp.router.weight",), (_H + "mlp.gate.weight",)),
    Rule((_L + "mlp.experts.local_experts.{expert}.linear_fc1.weight", _L + "mlp.experts.linear_fc1.weight{expert}"),
         (_H + "mlp.experts.{expert}.gate_proj.weight", _H + "mlp.experts.{expert}.up_proj.weight"),
         fuse="gate_up", split_dim=0, expert=True),
    Rule((_L + "mlp.experts.local_experts.{expert}.linear_fc2.weight", _L + "mlp.experts.linear_fc2.weight{expert}"),
         (_H + "mlp.experts.{expert}.down_proj.weight",), split_dim=1, expert=True),
)


def transformer_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that config.json decides."""
    return dict(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"], qk_layernorm=True, normalization="RMSNorm", layernorm_epsilon=hf["rms_norm_eps"],
        num_moe_experts=hf["num_experts"], moe_router_topk=hf["num_experts_per_tok"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        # Megatron's softmax after top-k equals HF's softmax, top-k, renormalise (norm_topk_prob).
        moe_router_pre_softmax=not hf["norm_topk_prob"])


FAMILY = Family(
    name="Qwen3-MoE", architecture="Qwen3MoeForCausalLM", rules=RULES, transformer_config=transformer_config,
    used_fields=frozenset({
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "vocab_size", "tie_word_embeddings", "rope_theta"}),
    harmless_fields=frozenset({
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
        "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "output_router_logits",
        "router_aux_loss_coef", "max_window_layers",
        "_name_or_path", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions",
        "output_hidden_states", "problem_type", "id2label", "label2id"}),
    forbidden={"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False, "hidden_act": "silu",
               "use_sliding_window": False, "sliding_window": None, "attention_dropout": 0.0,
               "quantization_config": None})
