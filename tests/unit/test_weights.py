"""The weight map: fusing and splitting are inverse, names are found, and a wrong checkpoint is refused by name."""
from __future__ import annotations

import pytest
import torch

from sao_megatron.errors import UserError
from sao_megatron.weights import hf
from sao_megatron.weights.families import family_of
from sao_megatron.weights.families.qwen3_moe import FAMILY
from sao_megatron.weights.rules import Geometry, join, split

GEOMETRY = Geometry(heads=8, kv_heads=4, head_dim=6)
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=2, hidden_size=16, intermediate_size=32,
    num_attention_heads=8, num_key_value_heads=4, head_dim=6, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8, norm_topk_prob=True, vocab_size=32, rope_theta=1e4, tie_word_embeddings=False)


def hf_tensors(rule) -> list[torch.Tensor]:
    if rule.fuse == "qkv":
        return [torch.randn(heads * GEOMETRY.head_dim, 16) for heads in (8, 4, 4)]
    return [torch.randn(8, 16) for _ in rule.hf]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rule", FAMILY.rules, ids=lambda rule: rule.hf[0])
def test_split_undoes_join(rule, parts):
    """If this fails, a checkpoint changes on its way through a layout."""
    tensors = hf_tensors(rule)
    shards = [join(rule, tensors, GEOMETRY, parts, part) for part in range(parts)]
    for before, after in zip(tensors, split(rule, shards, GEOMETRY), strict=True):
        assert torch.equal(before, after)


def test_qkv_order_is_by_group():
    """If this fails, tensor parallel ranks get the query heads of other ranks' keys."""
    rule, _ = FAMILY.find("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (torch.arange(n * 6.0)[:, None] + offset for n, offset in ((8, 0), (4, 100), (4, 200)))
    first = join(rule, [q, k, v], GEOMETRY, 4, 0)[:, 0].tolist()
    assert first == [*range(12), *range(100, 106), *range(200, 206)]


@pytest.mark.parametrize("name", ["decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight",
                                  "decoder.layers.7.mlp.experts.linear_fc1.weight3"])
def test_both_namings_are_known(name):
    """If this fails, TransformerEngine's or the plain-torch names of the experts are not mapped."""
    assert FAMILY.find(name)[1] == tuple(f"model.layers.7.mlp.experts.3.{x}_proj.weight" for x in ("gate", "up"))


def test_unknown_parameter_is_an_error():
    """If this fails, a parameter without a rule is silently left at its random start."""
    with pytest.raises(KeyError, match="mlp.shared"):
        FAMILY.find("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


@pytest.mark.parametrize("change, message", [
    ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"), ({"attention_bias": True}, "attention_bias"),
    ({"mystery": 1}, "mystery"), ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"), ({"num_experts": None}, None)])
def test_config_that_changes_the_maths_is_refused(change, message):
    """If this fails, a model is trained with another architecture than its checkpoint's."""
    if message is None:
        config = {key: value for key, value in CONFIG.items() if key not in change}
        message = "num_experts"
    else:
        config = CONFIG | change
    with pytest.raises(UserError, match=message):
        family_of(hf.canonical(config))


def test_spellings_of_both_transformers_generations_agree():
    """If this fails, a checkpoint saved by transformers 5 is read with other numbers than one saved by 4."""
    new = {key: value for key, value in CONFIG.items() if key not in ("num_experts", "rope_theta")}
    new |= {"num_local_experts": 4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert hf.canonical(new) == hf.canonical(CONFIG)


def test_fresh_weights_depend_on_name_and_seed_only():
    """If this fails, two layouts of one run start from different models."""
    first, again, other = (hf.FreshTensors(seed, 0.02).get("a.weight", (4, 4)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first, hf.FreshTensors(0, 0.02).get("b.weight", (4, 4)))
