"""Multi-latent attention for learner/torch_spec.py: dense (DeepSeek-V3) and sparse (GLM-5's DSA), in plain layers."""
from __future__ import annotations

import torch
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec


class WholeLinear(torch.nn.Linear):
    """Whole on every tensor parallel rank, as TransformerEngine's down projections are; returns (output, no bias)."""

    def __init__(self, inputs, outputs, config, *_, **__):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads then sums it over TP ranks

    def forward(self, x):
        return super().forward(x), None


class _WholeDownProjections:
    """Replaces Megatron-Core's column-parallel down projections (it accepts no others without TransformerEngine).

    With those, the backward of the key's rotary part keeps only what a rank's own heads contribute to it
    (0.19.2, multi_latent_attention.py, `gather_from_tensor_model_parallel_region(kv_combined)`).
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim,
                                               config)


class LatentAttention(_WholeDownProjections, MLASelfAttention):
    pass


class SparseLatentAttention(_WholeDownProjections, AbsorbedMLASelfAttention):
    pass


class _LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def adapt(layer, config) -> None:
    """Give a layer's submodules this file's attention, for a config with multi_latent_attention."""
    attention = layer.self_attention
    if config.experimental_attention_variant != "dsa":
        attention.module = LatentAttention
        return
    attention.module = SparseLatentAttention
    indexer = ModuleSpec(DSAIndexer, submodules=DSAIndexerSubmodules(
        linear_wq_b=WholeLinear, linear_wk=WholeLinear, k_norm=_LayerNorm, linear_weights_proj=WholeLinear))
    attention.submodules.core_attention = ModuleSpec(DSAttention, submodules=DSAttentionSubmodules(indexer=indexer))
