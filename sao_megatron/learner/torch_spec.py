"""A transformer layer spec in plain torch, for machines without TransformerEngine.

Megatron-Core's own local spec has no RMSNorm with sequence parallelism and no attention on packed (thd) sequences;
these two modules supply them. Everything else (linear layers, router, dispatchers, experts) is Megatron-Core's.
"""
from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from sao_megatron.learner import torch_mla
from sao_megatron.trajectory.packing import zigzag_rows


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads then sums it over TP ranks


class PackedAttention(MegatronModule):
    """Causal attention on packed sequences: [t, heads, d] is spread to [sequences, longest, heads, d] for one call.

    Padding lies after each sequence, so the causal mask alone keeps it out of every real token's attention. Under
    context parallelism each rank has the queries of its own tokens and gathers all keys and values; the gather's
    backward sums the gradients that the ranks have for each of them.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None,
                 **_):
        super().__init__(config=config)
        self.scale = softmax_scale
        self.group = pg_collection.cp

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None, **_):
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if not hasattr(packed_seq_params, "grid"):  # the same in every layer
            packed_seq_params.grid = _Grid(packed_seq_params.cu_seqlens_q, self.group.size(), self.group.rank())
        grid: _Grid = packed_seq_params.grid
        if self.group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, group=self.group)[grid.order] for x in (key, value))
        out = F.scaled_dot_product_attention(
            grid.queries.spread(query), grid.keys.spread(key), grid.keys.spread(value), attn_mask=grid.mask,
            is_causal=grid.mask is None, scale=self.scale, enable_gqa=query.size(1) != key.size(1))
        return grid.queries.collect(out).flatten(1)


class _Cells:
    """Packed rows laid out as [sequences, longest]."""

    def __init__(self, cu_seqlens: torch.Tensor):
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        self.shape = len(lengths), int(lengths.max())
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.cells = torch.arange(int(cu_seqlens[-1])) - starts[sequence] + sequence * self.shape[1]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[t, heads, d] -> [sequences, heads, longest, d], zero where there is no row."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self.cells, x)
        return padded.view(*self.shape, *x.shape[1:]).transpose(1, 2)

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of `spread`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.cells)


class _Grid:
    """Where the queries (this context parallel rank's tokens) and the keys (all tokens) of a micro-batch are."""

    def __init__(self, cu_seqlens: torch.Tensor, size: int, rank: int):
        self.keys = self.queries = _Cells(cu_seqlens)
        self.mask = self.order = None
        if size == 1:
            return
        rows = [torch.from_numpy(zigzag_rows(cu_seqlens.numpy(), size, part)) for part in range(size)]
        self.order = torch.cat(rows).argsort()  # from the gathered order (rank by rank) to the packed one
        self.queries = _Cells(cu_seqlens // size)
        positions = rows[rank] - cu_seqlens[torch.searchsorted(cu_seqlens, rows[rank], right=True) - 1]
        self.mask = torch.arange(self.keys.shape[1]) <= self.queries.spread(positions[:, None, None])


def block_spec(config, chunk: int | None):
    """Layers of this pipeline stage (of a virtual pipeline: of its chunk number `chunk`) and the final norm."""
    plain = copy(config)
    plain.experimental_attention_variant = None  # Megatron makes the sparse kind of TransformerEngine's layers only
    block = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization=config.normalization,
                                       vp_stage=chunk)
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if config.qk_layernorm and hasattr(attention, norm):
                setattr(attention, norm, RMSNorm)
        if config.multi_latent_attention:
            torch_mla.adapt(layer, config)
    block.layer_norm = RMSNorm
    return block
