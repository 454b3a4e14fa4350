"""test_freezing.py's one rank: which parameters of a GQA and of an MLA critic still train. Writes JSON."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sao_megatron.learner import runtime
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from reference import make_model
from sao_megatron.config import ParallelSection
from sao_megatron.learner import model as models
from sao_megatron.learner.torch_spec import PackedAttention, RMSNorm
from sao_megatron.weights import hf


def mla_model() -> GPTModel:
    """DeepSeek-like: multi-latent attention and experts, in Megatron-Core's own layers."""
    config = MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=8, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16,
        normalization="RMSNorm", add_bias_linear=False, rope_type="rope", qk_layernorm=True, params_dtype=torch.float32)
    spec = get_gpt_layer_local_spec(num_experts=4, qk_layernorm=True, multi_latent_attention=True,
                                    normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.kv_layernorm = RMSNorm
    model = GPTModel(config=config, vocab_size=32, max_sequence_length=0, position_embedding_type="none",
                     transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=RMSNorm))
    model.output_layer = models.ValueHead(config, 1)
    return model


class FusedLayer(torch.nn.Module):
    """Parameter names of TransformerEngine's attention, which fuses norms into projections (not runnable here)."""

    def __init__(self, fused: list[str]):
        super().__init__()
        self.self_attention = torch.nn.Module()
        for name in fused:
            projection = torch.nn.Module()
            projection.weight, projection.layer_norm_weight = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
            self.self_attention.add_module(name, projection)


def fused_model(*fused: str) -> torch.nn.Module:
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([FusedLayer(list(fused))])
    return model


def main(folder: Path) -> None:
    runtime.initialize(ParallelSection(), seed=0)
    make_model(folder / "gqa")
    built = {"gqa": models.build(hf.read_config(folder / "gqa"), ParallelSection(), torch.float32, value_outputs=1),
             "mla": mla_model(), "fused gqa": fused_model("linear_qkv"),
             "fused mla": fused_model("linear_qkv_down_proj", "linear_q_up_proj", "linear_kv_up_proj")}
    result = {}
    for name, model in built.items():
        count = models.freeze_attention(model)
        result[name] = dict(count=count, trains={n: p.requires_grad for n, p in model.named_parameters()})
    (folder / "frozen.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
