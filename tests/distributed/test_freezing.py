"""The critic's frozen attention, by module role: GQA, MLA, and norms that TransformerEngine fuses into projections."""
from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, run_ranks):
    folder = tmp_path_factory.mktemp("frozen")
    run_ranks("freeze_worker.py", 1, str(folder))
    return json.loads((folder / "frozen.json").read_text())


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_attention_is_frozen_and_nothing_else(frozen, name):
    """If this fails, a family's critic trains its attention, or does not train its experts, norms or head."""
    trains = frozen[name]["trains"]
    attention = {parameter for parameter in trains if ".self_attention." in parameter}
    assert {parameter for parameter, value in trains.items() if not value} == attention
    assert frozen[name]["count"] == len(attention)
    assert any("kv_up_proj" in parameter for parameter in attention) == (name == "mla")
    for role in ("input_layernorm", "router", "experts", "word_embeddings", "final_layernorm", "output_layer.bias"):
        assert any(role in parameter for parameter in trains.keys() - attention), role


def test_a_fused_input_norm_keeps_training(frozen):
    """If this fails, a GPU's critic trains other parameters than a CPU's, where norms are modules of their own."""
    trains = frozen["fused gqa"]["trains"] | frozen["fused mla"]["trains"]
    training = {parameter.split(".self_attention.")[1] for parameter, value in trains.items() if value}
    assert training == {"linear_qkv.layer_norm_weight", "linear_qkv_down_proj.layer_norm_weight"}
