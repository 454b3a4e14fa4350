"""Two config.json: which fields make two models of them."""
import pytest
from test_family_maps import PUBLISHED

from sao_megatron.weights import hf
from sao_megatron.weights.maths import differences

OTHER = dict(rms_norm_eps=1e-3, rope_theta=7.0, vocab_size=1000, num_hidden_layers=5, num_experts=16, q_lora_rank=7,
             moe_intermediate_size=64, routed_scaling_factor=1.5, index_topk=5, partial_rotary_factor=0.25)


def config(name: str, **fields) -> dict:
    return hf.canonical(PUBLISHED[name] | fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_same_model(name):
    """If one fails, a checkpoint is refused, or called another, that only spells its config.json otherwise."""
    same = config(name, use_cache=False, initializer_range=0.5, eos_token_id=7, torch_dtype="float32")
    same.pop("head_dim") if "kv_lora_rank" in same else None  # multi-latent attention does not use it
    assert differences(config(name), hf.canonical(same)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_another_model(name):
    """If one fails, weights go on under a config.json that they were not trained with, and compute something else."""
    first = config(name)
    patterns = ("mlp_layer_types", "indexer_types")  # these say again what other fields do
    for field, value in OTHER.items():
        second = {key: of for key, of in first.items() if key not in patterns} | {field: value}
        assert field not in first or differences(first, second) == [f"{field} is {first[field]!r} and {value!r}"]


def test_another_family_and_rope_scaling():
    """If this fails, two models of equal shapes but another scaling, or of two families, are one."""
    llama = config("Llama-3.1-8B")
    other = llama | {"rope_scaling": llama["rope_scaling"] | {"factor": 32.0}}
    assert [line.split()[0] for line in differences(llama, other)] == ["rope_scaling"]
    deepseek = config("DeepSeek-V3")
    other = deepseek | {"rope_scaling": deepseek["rope_scaling"] | {"factor": 41.0}}
    assert [line.split()[0] for line in differences(deepseek, other)] == ["rope_scaling"]
    assert differences(llama, config("Qwen2.5-7B"))[0].startswith("architectures is ['LlamaForCausalLM'] and ['Qwen2")
