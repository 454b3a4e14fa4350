"""What families are put together from: rules and configuration of embeddings, attention, MLP and experts.

A rule's second Megatron name is TransformerEngine's, whose layers hold the norm in front of a projection inside it
(`linear_qkv.layer_norm_weight`) and all experts of a rank in one module (`experts.linear_fc1.weight3`).
"""
from __future__ import annotations

from sao_megatron.errors import UserError
from sao_megatron.weights import rope
from sao_megatron.weights.rules import Rule

_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_A, _S = _L + "self_attention.", _H + "self_attn."

ENDS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), split_dim=0),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",), split_dim=0),
    Rule((_L + "input_layernorm.weight", _A + "linear_qkv.layer_norm_weight"), (_H + "input_layernorm.weight",)),
    Rule((_L + "pre_mlp_layernorm.weight", _L + "mlp.linear_fc1.layer_norm_weight"),
         (_H + "post_attention_layernorm.weight",)),
)
OUTPUT = Rule((_A + "linear_proj.weight",), (_S + "o_proj.weight",), split_dim=1)
GQA = (
    Rule((_A + "linear_qkv.weight",), tuple(_S + f"{x}_proj.weight" for x in "qkv"), fuse="qkv", split_dim=0), OUTPUT)
QKV_BIAS = (
    Rule((_A + "linear_qkv.bias",), tuple(_S + f"{x}_proj.bias" for x in "qkv"), fuse="qkv", split_dim=0),)
QK_NORM = (
    Rule((_A + "q_layernorm.weight",), (_S + "q_norm.weight",)),
    Rule((_A + "k_layernorm.weight",), (_S + "k_norm.weight",)),
)
MLA = (
    Rule((_A + "linear_q_down_proj.weight",), (_S + "q_a_proj.weight",)),
    Rule((_A + "q_layernorm.weight", _A + "linear_q_up_proj.layer_norm_weight"), (_S + "q_a_layernorm.weight",)),
    Rule((_A + "linear_q_up_proj.weight",), (_S + "q_b_proj.weight",), split_dim=0),
    Rule((_A + "linear_kv_down_proj.weight",), (_S + "kv_a_proj_with_mqa.weight",)),
    Rule((_A + "kv_layernorm.weight", _A + "linear_kv_up_proj.layer_norm_weight"), (_S + "kv_a_layernorm.weight",)),
    Rule((_A + "linear_kv_up_proj.weight",), (_S + "kv_b_proj.weight",), split_dim=0),
    OUTPUT,
)


def _mlp(megatron: str, hf: str) -> tuple[Rule, Rule]:
    return (Rule((_L + megatron + ".linear_fc1.weight",), (_H + hf + ".gate_proj.weight", _H + hf + ".up_proj.weight"),
                 fuse="gate_up", split_dim=0),
            Rule((_L + megatron + ".linear_fc2.weight",), (_H + hf + ".down_proj.weight",), split_dim=1))


def experts(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Rules of router and experts, by their HF names."""
    megatron, hf = _L + "mlp.experts.", _H + block + ".experts.{expert}."
    return (Rule((_L + "mlp.router.weight",), (_H + block + ".gate.weight",)),
            Rule((megatron + "local_experts.{expert}.linear_fc1.weight", megatron + "linear_fc1.weight{expert}"),
                 (hf + gate + ".weight", hf + up + ".weight"), fuse="gate_up", split_dim=0, expert=True),
            Rule((megatron + "local_experts.{expert}.linear_fc2.weight", megatron + "linear_fc2.weight{expert}"),
                 (hf + down + ".weight",), split_dim=1, expert=True))


DENSE_MLP = _mlp("mlp", "mlp")
SHARED_EXPERTS = _mlp("mlp.shared_experts", "mlp.shared_experts")
CORRECTION_BIAS = (Rule((_L + "mlp.router.expert_bias",), (_H + "mlp.gate.e_score_correction_bias",)),)
INDEXER = tuple(Rule((_A + "core_attention.indexer." + megatron,), (_S + "indexer." + hf,)) for megatron, hf in (
    ("linear_wq_b.weight", "wq_b.weight"), ("linear_wk.weight", "wk.weight"), ("k_norm.weight", "k_norm.weight"),
    ("k_norm.bias", "k_norm.bias"), ("linear_weights_proj.weight", "weights_proj.weight")))

USED = frozenset({
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "tie_word_embeddings", "rope_theta"})
USED_BY_EXPERTS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
USED_BY_SIGMOID_ROUTER = USED_BY_EXPERTS | {
    "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group"}
USED_BY_MLA = frozenset({"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
HARMLESS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "output_router_logits",
    "router_aux_loss_coef", "max_window_layers", "pretraining_tp", "auto_map", "unk_token_id",
    "_name_or_path", "_model_name_or_path", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "output_attentions", "output_hidden_states", "problem_type", "id2label", "label2id"})
"""In every family."""
HARMLESS_WITH_SIGMOID_ROUTER = HARMLESS | {"ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"}
"""Multi-token prediction layers are dropped: they predict nothing that RL uses."""
ONLY = {"hidden_act": "silu", "attention_dropout": 0.0}
ONLY_WITH_SIGMOID_ROUTER = ONLY | {
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "attention_bias": False}


def dimensions(hf: dict) -> dict:
    """Megatron's TransformerConfig fields that every family sets."""
    return dict(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], normalization="RMSNorm", layernorm_epsilon=hf["rms_norm_eps"])


def gqa(hf: dict) -> dict:
    return dict(num_query_groups=hf["num_key_value_heads"], kv_channels=hf["head_dim"])


def mla(hf: dict) -> dict:
    """Fields of MLATransformerConfig. Megatron's fused RoPE does not cover every kind of RoPE here, so it is off."""
    fields = dict(
        multi_latent_attention=True, qk_layernorm=True, q_lora_rank=hf["q_lora_rank"], kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"], qk_pos_emb_head_dim=hf["qk_rope_head_dim"], v_head_dim=hf["v_head_dim"],
        rotary_base=hf["rope_theta"], apply_rope_fusion=False, rope_type="rope", rotary_scaling_factor=1.0)
    return fields | (rope.yarn(hf["rope_scaling"]) if hf["rope_scaling"] else {})


def softmax_router(hf: dict) -> dict:
    """Megatron's softmax after top-k equals HF's softmax, top-k, renormalise."""
    return dict(num_moe_experts=hf["num_experts"], moe_router_topk=hf["num_experts_per_tok"],
                moe_ffn_hidden_size=hf["moe_intermediate_size"])


def sigmoid_router(hf: dict) -> dict:
    """Leading dense layers, shared experts, and a router whose correction bias chooses experts but does not weigh them.

    The bias stays as it came: RL does not balance experts.
    """
    dense, groups = hf["first_k_dense_replace"], hf["n_group"] > 1
    return softmax_router(hf) | dict(
        moe_layer_freq=[int(layer >= dense) for layer in range(hf["num_hidden_layers"])],
        moe_shared_expert_intermediate_size=hf["n_shared_experts"] * hf["moe_intermediate_size"],
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_num_groups=hf["n_group"] if groups else None,
        moe_router_group_topk=hf["topk_group"] if groups else None)


def in_dense_or_sparse_layer(hf: dict, rule: Rule, layer: int) -> bool:
    """`Family.has` where the first layers are dense and the others have experts."""
    dense = layer < hf["first_k_dense_replace"]
    return dense if rule in DENSE_MLP else not dense or ".mlp." not in rule.hf[0]


def check_mla(hf: dict) -> None:
    """Raise UserError for multi-latent attention without a latent query."""
    if hf["q_lora_rank"] is None:
        raise UserError("config.json: q_lora_rank=None is not supported: Megatron-Core normalises keys and values only "
                        "together with a latent query")


def check_sigmoid_router(hf: dict) -> None:
    """Raise UserError where Megatron's routing is another function than HF's."""
    if not hf["n_shared_experts"]:
        raise UserError(f"config.json: n_shared_experts={hf['n_shared_experts']} is not supported; HF's layers of this "
                        "kind have at least one")
    experts, groups = hf["num_experts_per_tok"], hf["topk_group"]
    if experts < 2:
        raise UserError(f"config.json: num_experts_per_tok={experts} is not supported with sigmoid routing: "
                        "Megatron-Core normalises the weights of two or more experts only")
    if hf["n_group"] > 1 and experts // groups != 2:
        raise UserError(f"config.json: num_experts_per_tok={experts} with topk_group={groups} is not supported: "
                        f"Megatron-Core scores a group by its best {experts // groups} experts, HF by its best 2")


def check_layer_types(hf: dict) -> None:
    """Raise UserError if a layer's attention is windowed."""
    other = set(hf.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise UserError(f"config.json: layer_types has {min(other)!r}; only 'full_attention' is supported")
