"""Model families: the published config.json of each is understood; what would change the maths is refused by name."""
import pytest

from sao_megatron import config as configs
from sao_megatron.errors import UserError
from sao_megatron.learner import layout
from sao_megatron.weights import hf
from sao_megatron.weights.families import family_of

GENERAL = dict(bos_token_id=0, eos_token_id=[1], pad_token_id=None, hidden_act="silu", initializer_range=0.02,
               max_position_embeddings=131072, attention_dropout=0.0, torch_dtype="bfloat16", use_cache=True,
               transformers_version="4.54.1", tie_word_embeddings=False)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
              rope_type="llama3")
YARN = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, type="yarn",
            original_max_position_embeddings=4096)
DEEPSEEK = GENERAL | dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", auto_map={}, attention_bias=False, ep_size=1,
    first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432, kv_lora_rank=512, moe_intermediate_size=2048,
    moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
    num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling=YARN, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4,
    topk_method="noaux_tc", v_head_dim=128, vocab_size=129280)
PUBLISHED = {
    "Llama-3.1-8B": GENERAL | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False, hidden_size=4096,
        intermediate_size=14336, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1,
        rms_norm_eps=1e-5, rope_scaling=LLAMA3, rope_theta=500000.0, vocab_size=128256),
    "SmolLM2-135M": GENERAL | {"transformers.js_config": {}} | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, hidden_size=576,
        intermediate_size=1536, is_llama_config=True, num_attention_heads=9, num_hidden_layers=30,
        num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-5, rope_interleaved=False, rope_scaling=None,
        rope_theta=100000, tie_word_embeddings=True, vocab_size=49152),
    "Qwen2.5-7B": GENERAL | dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=3584, intermediate_size=18944,
        max_window_layers=28, num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6,
        rope_theta=1000000.0, sliding_window=131072, use_sliding_window=False, vocab_size=152064),
    "Qwen3-8B": GENERAL | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128, hidden_size=4096,
        intermediate_size=12288, max_window_layers=36, num_attention_heads=32, num_hidden_layers=36,
        num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        use_sliding_window=False, vocab_size=151936),
    "Qwen3-30B-A3B": GENERAL | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1,
        head_dim=128, hidden_size=2048, intermediate_size=6144, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None, use_sliding_window=False,
        vocab_size=151936),
    "Mixtral-8x7B": GENERAL | dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_size=4096, intermediate_size=14336,
        num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8,
        num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0,
        router_aux_loss_coef=0.02, sliding_window=None, vocab_size=32000),
    "GLM-4.5-Air": GENERAL | dict(
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", attention_bias=True, first_k_dense_replace=1,
        head_dim=128, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, n_group=1,
        n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8,
        num_hidden_layers=46, num_key_value_heads=8, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0, topk_group=1,
        use_qk_norm=False, vocab_size=151552),
    "DeepSeek-V3": DEEPSEEK,
    "Kimi-K2": DEEPSEEK | dict(
        model_type="kimi_k2", aux_loss_alpha=0.001, seq_aux=True, first_k_dense_replace=1, n_group=1, topk_group=1,
        n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64, num_nextn_predict_layers=0,
        rope_scaling=YARN | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0), rope_theta=50000.0,
        routed_scaling_factor=2.827, vocab_size=163840),
    "GLM-5.2": GENERAL | dict(
        architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", attention_bias=False, ep_size=1, head_dim=192,
        first_k_dense_replace=3, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048, n_group=1,
        index_head_dim=128, index_n_heads=32, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3,
        index_share_for_mtp_iteration=True, indexer_rope_interleave=True, rope_interleave=True, kv_lora_rank=512,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 75, moe_layer_freq=1, n_routed_experts=256, n_shared_experts=1,
        indexer_types=["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)], norm_topk_prob=True,
        num_attention_heads=64, num_experts_per_tok=8, num_hidden_layers=78, num_key_value_heads=64,
        num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=2048, qk_head_dim=256, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rms_norm_eps=1e-5, rope_parameters=dict(rope_theta=8000000, rope_type="default"),
        routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc", v_head_dim=256,
        vocab_size=154880),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_config_is_understood(model):
    """If this fails, a family's own checkpoints are refused, or their layers are built in another number."""
    config = hf.canonical(PUBLISHED[model])
    fields = family_of(config).transformer_config(config)
    assert fields["num_layers"] == PUBLISHED[model]["num_hidden_layers"]
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = [PUBLISHED[model][name] for name in names if name in PUBLISHED[model]]
    assert fields.get("num_moe_experts") == (experts[0] if experts else None)
    if "first_k_dense_replace" in config:
        dense = config["first_k_dense_replace"]
        assert fields["moe_layer_freq"] == [0] * dense + [1] * (config["num_hidden_layers"] - dense)


@pytest.mark.parametrize("model", PUBLISHED)
def test_unknown_field_is_refused(model):
    """If this fails, a model is trained with another architecture than its checkpoint's."""
    with pytest.raises(UserError, match="'mystery' is not known for " + PUBLISHED[model]["architectures"][0]):
        family_of(hf.canonical(PUBLISHED[model] | {"mystery": 1}))


@pytest.mark.parametrize(("model", "change", "message"), [
    ("Llama-3.1-8B", dict(mlp_bias=True), "mlp_bias=True is not supported for LlamaForCausalLM; only False is"),
    ("Llama-3.1-8B", dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
    ("Llama-3.1-8B", dict(rope_scaling=LLAMA3 | dict(low_freq_factor=2.0)), "low_freq_factor=2.0 is not supported"),
    ("Llama-3.1-8B", dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "needs 'low_freq_factor'"),
    ("Llama-3.1-8B", dict(rope_scaling=dict(type="linear", factor=2.0)), "'linear' is not supported"),
    ("Qwen3-8B", dict(rope_scaling=YARN), "'yarn' is not supported for Qwen3ForCausalLM; only 'default' is"),
    ("Qwen3-8B", dict(use_sliding_window=True), "use_sliding_window=True is not supported"),
    ("Qwen3-8B", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types has 'sliding_attention'"),
    ("Qwen3-30B-A3B", dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\] is not supported"),
    ("Mixtral-8x7B", dict(sliding_window=4096), "sliding_window=4096 is not supported"),
    ("GLM-4.5-Air", dict(norm_topk_prob=False), "norm_topk_prob=False is not supported"),
    ("GLM-4.5-Air", dict(num_experts_per_tok=1), "num_experts_per_tok=1 is not supported"),
    ("GLM-4.5-Air", dict(n_shared_experts=None), "n_shared_experts=None is not supported"),
    ("DeepSeek-V3", dict(topk_group=2), "topk_group=2 is not supported: Megatron-Core scores a group by its best 4"),
    ("DeepSeek-V3", dict(q_lora_rank=None), "q_lora_rank=None is not supported"),
    ("DeepSeek-V3", dict(rope_interleave=False), "rope_interleave=False is not supported"),
    ("DeepSeek-V3", dict(scoring_func="softmax"), "scoring_func='softmax' is not supported"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(mscale_all_dim=0)), "needs both of mscale and mscale_all_dim"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(truncate=False)), "with the field 'truncate' is not supported"),
    ("GLM-5.2", dict(mlp_layer_types=["sparse"] * 78), "mlp_layer_types is not supported"),
    ("GLM-5.2", dict(indexer_types=["full"] * 78), "indexer_types is not supported"),
    ("GLM-5.2", dict(layer_types=["full_attention"] * 78), "layer_types is not supported"),
    ("Llama-3.1-8B", dict(num_hidden_layers=None), "num_hidden_layers=None cannot be .* an integer of at least 1"),
    ("Llama-3.1-8B", dict(hidden_size="4096"), "hidden_size='4096' cannot be"),
    ("Llama-3.1-8B", dict(rms_norm_eps=0), "rms_norm_eps=0 cannot be .* a number above 0"),
    ("Llama-3.1-8B", dict(tie_word_embeddings="false"), "tie_word_embeddings='false' cannot be .* true or false"),
    ("Llama-3.1-8B", dict(num_attention_heads=30), "num_attention_heads=30 is not a multiple of num_key_value_heads=8"),
    ("Llama-3.1-8B", dict(head_dim=127), "head_dim=127 lets RoPE turn 127 numbers"),
    ("Llama-3.1-8B", dict(rope_scaling=LLAMA3 | dict(factor="8")), "factor='8' cannot be"),
    ("Qwen3-8B", dict(rope_scaling=YARN, rope_parameters=dict(rope_type="default")), "rope_type is 'yarn' in one"),
    ("Qwen3-8B", dict(rope_parameters=dict(rope_theta=5.0)), "rope_theta is 1000000 in one place and 5.0 in another"),
    ("Qwen3-8B", dict(rope_scaling=dict(factor=4.0)), "'default' with the field 'factor' is not supported"),
    ("Qwen3-8B", dict(rope_scaling="yarn"), "are JSON objects, found 'yarn'"),
    ("Qwen3-30B-A3B", dict(n_routed_experts=8), "n_routed_experts and num_experts differ"),
    ("Qwen3-30B-A3B", dict(num_experts_per_tok=200), "num_experts_per_tok=200 is more than num_experts=128"),
    ("GLM-4.5-Air", dict(n_group=None), "n_group=None cannot be"),
    ("GLM-5.2", dict(index_topk_freq=0), "index_topk_freq=0 cannot be"),
    ("GLM-5.2", dict(layer_types=7), "layer_types=7 cannot be .* a list of texts"),
    ("GLM-5.2", dict(layer_types=[["x"]]), "layer_types=.* cannot be .* a list of texts"),
    ("GLM-5.2", dict(index_head_dim=32), "qk_rope_head_dim=64 is more than index_head_dim=32"),
    ("Qwen3-8B", dict(layer_types=[1, "a"]), "layer_types=.* cannot be .* a list of texts"),
    ("Qwen3-8B", dict(rms_norm_eps=10**400), "rms_norm_eps=1000.* cannot be .* a number above 0"),
    ("Qwen3-8B", dict(vocab_size=10**400), "vocab_size=1000.* cannot be .* an integer of"),
    ("Qwen3-8B", dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 cannot be .* at most"),
    ("GLM-4.5-Air", dict(partial_rotary_factor=0.4), "head_dim=128 lets RoPE turn 51 numbers"),
    ("GLM-4.5-Air", dict(partial_rotary_factor=0.001), "head_dim=128 lets RoPE turn 0 numbers"),
    ("DeepSeek-V3", dict(qk_rope_head_dim=7), "qk_rope_head_dim=7 lets RoPE turn 7 numbers"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(factor=float("inf"))), "factor=inf cannot be"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(factor=10**400)), "factor=1000.* cannot be"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(mscale=float("nan"))), "mscale=nan cannot be"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(original_max_position_embeddings=16.5)), "16.5 cannot .* an integer"),
    ("Mixtral-8x7B", dict(num_attention_heads="4"), "num_attention_heads='4' cannot be"),
    ("Mixtral-8x7B", dict(num_attention_heads=0, head_dim=None), "num_attention_heads=0 cannot be"),
    ("Qwen3-30B-A3B", dict(model_type="llama"), "architectures names 'Qwen3MoeForCausalLM' and model_type 'llama'"),
    ("Qwen3-8B", dict(architectures=["Qwen3NextForCausalLM"]), "gated delta-net"),
    ("Qwen3-8B", dict(architectures=["GptOssForCausalLM"]), "attention sinks"),
])
def test_what_changes_the_maths_is_refused(model, change, message):
    """If one fails, a checkpoint is trained as if it were another model."""
    with pytest.raises(UserError, match=message):
        family_of(hf.canonical(PUBLISHED[model] | change))


@pytest.mark.parametrize("model", PUBLISHED)
def test_missing_field_is_refused(model):
    """If this fails, a size is guessed, or a base of RoPE (readers' defaults differ)."""
    for name in {"rms_norm_eps", "rope_theta", "moe_intermediate_size"} & PUBLISHED[model].keys():
        with pytest.raises(UserError, match=f"'{name}' is required for"):
            family_of(hf.canonical({k: v for k, v in PUBLISHED[model].items() if k != name}))


def test_null_says_no_more_than_false():
    """If this fails, a config that a tool wrote with nulls is refused."""
    config = hf.canonical(PUBLISHED["Qwen3-30B-A3B"] | dict(mlp_only_layers=None, attention_bias=None, rope_scaling={},
                                                            use_sliding_window=None, tie_word_embeddings=None))
    assert family_of(config).name == "Qwen3-MoE"


@pytest.mark.parametrize(("model", "name", "held"), [
    ("Qwen3-30B-A3B", "model.layers.47.mlp.experts.127.up_proj.weight", True),
    ("Qwen3-30B-A3B", "model.layers.48.mlp.experts.0.up_proj.weight", False),
    ("Qwen3-30B-A3B", "model.layers.0.mlp.experts.128.up_proj.weight", False),
    ("Qwen3-30B-A3B", "model.layers.0.mlp.shared_expert.up_proj.weight", False),
    ("Mixtral-8x7B", "model.layers.0.block_sparse_moe.experts.7.w2.weight", True),
    ("Qwen2.5-7B", "model.layers.0.self_attn.q_proj.bias", True),
    ("Llama-3.1-8B", "model.layers.0.self_attn.q_proj.bias", False),
    ("GLM-4.5-Air", "model.layers.0.self_attn.k_proj.bias", True),
    ("GLM-4.5-Air", "model.layers.0.self_attn.k_norm.weight", False),  # use_qk_norm is false
    ("GLM-4.5-Air", "model.layers.0.mlp.up_proj.weight", True),  # the first is dense
    ("GLM-4.5-Air", "model.layers.1.mlp.up_proj.weight", False),
    ("GLM-4.5-Air", "model.layers.0.mlp.gate.weight", False),
    ("GLM-4.5-Air", "model.layers.0.post_attention_layernorm.weight", True),
    ("GLM-4.5-Air", "model.layers.9.mlp.shared_experts.up_proj.weight", True),
    ("SmolLM2-135M", "lm_head.weight", False), ("Qwen3-8B", "lm_head.weight", True),
    ("GLM-5.2", "model.layers.3.self_attn.indexer.wk.weight", False),  # it shares another's
    ("GLM-4.5-Air", "model.layers.9.mlp.gate.e_score_correction_bias", True),
    ("DeepSeek-V3", "model.layers.61.eh_proj.weight", False),  # multi-token prediction
    ("GLM-5.2", "model.layers.0.self_attn.indexer.wk.weight", True)])
def test_tensors_that_a_model_holds(model, name, held):
    """If one fails, weights that belong to a model are refused, or those that it has no place for are ignored."""
    config = hf.canonical(PUBLISHED[model])
    assert (name in family_of(config).names(config)) == held


@pytest.mark.parametrize(("model", "parallel", "message"), [
    ("Qwen3-8B", dict(ranks=2, ep=2), "parallel.ep=2, parallel.etp=1: Qwen3ForCausalLM has no experts"),
    ("Qwen3-8B", dict(ranks=5, tp=5), "does not divide the model's attention heads"),
    ("GLM-4.5-Air", dict(ranks=3, ep=3), r"parallel.ep=3 does not divide the model's experts \(num_experts=128\)"),
    ("Mixtral-8x7B", dict(ranks=3, etp=3), "does not divide the model's expert width"),
    ("GLM-5.2", dict(ranks=2, cp=2), "context parallelism is not supported with the sparse attention"),
    ("GLM-5.2", dict(ranks=2, pp=2), "a pipeline stage would start with layer 39"),
])
def test_layout_that_a_model_excludes_is_refused(model, parallel, message):
    """If one fails, the learner's processes start and die in Megatron-Core."""
    recipe = configs.parse(dict(name="t", model=dict(path="m"), task=dict(name="t"), parallel=parallel))
    with pytest.raises(UserError, match=message):
        layout.check(recipe, hf.canonical(PUBLISHED[model]))


def test_routing_replay_needs_experts():
    """If this fails, a dense model's engines die at a flag, and the run with them."""
    recipe = configs.parse(dict(name="t", model=dict(path="m"), task=dict(name="t"), rollout=dict(routing_replay=True)))
    layout.check(recipe, hf.canonical(PUBLISHED["GLM-4.5-Air"]))
    with pytest.raises(UserError, match="rollout.routing_replay=true: Qwen3ForCausalLM has no experts"):
        layout.check(recipe, hf.canonical(PUBLISHED["Qwen3-8B"]))


def test_both_spellings_of_rope_agree():
    """If this fails, a checkpoint saved by transformers 5 is read with other frequencies than one saved by 4."""
    old = dict(rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling=LLAMA3)
    new = dict(rope_parameters=LLAMA3 | dict(rope_theta=5e5, partial_rotary_factor=0.5))
    assert hf.canonical(old) == hf.canonical(new)
    assert hf.canonical(old)["rope_scaling"] == LLAMA3


@pytest.mark.parametrize(("name", "value"), [
    ("model.layers.0.self_attn.q_a_layernorm.weight", 1.0), ("model.norm.weight", 1.0),
    ("model.layers.0.self_attn.indexer.k_norm.weight", 1.0), ("model.layers.0.self_attn.indexer.k_norm.bias", 0.0),
    ("model.layers.0.self_attn.q_proj.bias", 0.0), ("model.layers.0.mlp.gate.e_score_correction_bias", 0.0)])
def test_fresh_norms_are_one_and_biases_zero(name, value):
    """If this fails, a model with random weights starts far from where such models train."""
    assert hf.FreshTensors(0, 0.02).get(name, (4,)).tolist() == [value] * 4
