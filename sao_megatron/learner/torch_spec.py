"""A transformer layer spec in plain torch, for machines without TransformerEngine.

Megatron-Core's own local spec has no RMSNorm with sequence parallelism and no attention on packed (thd) sequences;
these two modules supply them. Everything else (linear layers, router, dispatchers, experts) is Megatron-Core's.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads then sums it over TP ranks


class PackedAttention(MegatronModule):
    """Causal attention on packed sequences: [t, heads, d] is spread to [sequences, longest, heads, d] for one call.

    Padding lies after each sequence, so the causal mask alone keeps it out of every real token's attention.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs TransformerEngine's attention: set its size to 1 without a GPU")
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None, **_):
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        slots, shape = _padded_slots(packed_seq_params, len(query))

        def spread(x):  # [t, heads, d] -> [sequences, heads, longest, d]
            padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, slots, x)
            return padded.view(*shape, *x.shape[1:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(spread(query), spread(key), spread(value), is_causal=True,
                                             scale=self.scale, enable_gqa=query.size(1) != key.size(1))
        return out.transpose(1, 2).flatten(0, 1).index_select(0, slots).flatten(1)


def _padded_slots(packed, total: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Row of each packed token in the padded [sequences * longest] layout; worked out once per micro-batch."""
    if not hasattr(packed, "padded_slots"):
        starts, lengths = packed.cu_seqlens_q[:-1].long(), packed.cu_seqlens_q.diff().long()
        longest = int(lengths.max())
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        slots = torch.arange(total) - starts[sequence] + sequence * longest
        packed.padded_slots = slots, (len(lengths), longest)
    return packed.padded_slots


def _layer_spec(config):
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm,
                                    normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config):
    """Layers of this pipeline stage and the final norm."""
    count = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[_layer_spec(config)] * count, layer_norm=RMSNorm)
