"""Policy and critic: one function builds a Megatron-Core GPT from an HF config, for this rank's place in the layout."""
from __future__ import annotations

import torch
from torch import Tensor

from sao_megatron.learner import runtime
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from sao_megatron.config import ParallelSection
from sao_megatron.weights.families import family_of
from sao_megatron.weights.maths import model_arguments


def transformer_config(hf: dict, parallel: ParallelSection, dtype: torch.dtype) -> TransformerConfig:
    """TransformerConfig of an HF config under a layout. Dropout is 0: RL compares log-probs of two engines."""
    fields = runtime.fused_kernels() | family_of(hf).transformer_config(hf)
    if parallel.recompute == "full":
        fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return kind(
        **fields,
        hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_router_dtype="fp32",
        moe_token_dispatcher_type=parallel.dispatcher,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp, pipeline_model_parallel_size=parallel.pp, **_virtual_pipeline(parallel),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.tp > 1,  # MoE with tensor parallelism needs it
        variable_seq_lengths=varies_in_length(parallel),
        calculate_per_token_loss=True,  # losses are sums; gradients are divided by the global number of action tokens
        perform_initialization=False,  # weights are always loaded
        finalize_model_grads_func=finalize_model_grads)


def varies_in_length(parallel: ParallelSection) -> bool:
    """Packed micro-batches differ in length, except under the allgather dispatcher, which exchanges equal shapes."""
    return parallel.dispatcher != "allgather"


def _virtual_pipeline(parallel: ParallelSection) -> dict:
    """With two ranks a batch of both directions' messages would be two to the same peer, which nothing tells apart; so
    each direction is a message of its own, as Megatron's interleaved schedule wants it for overlapping them."""
    if parallel.vpp == 1:
        return {}
    return dict(virtual_pipeline_model_parallel_size=parallel.vpp, overlap_p2p_comm=True, batch_p2p_comm=False)


def build(hf: dict, parallel: ParallelSection, dtype: torch.dtype, value_outputs: int = 0) -> list[GPTModel]:
    """This rank's chunks of the model, on the device, with unset weights: one, or `parallel.vpp` of them in their order
    along the model. `value_outputs` > 0 makes it a critic, whose head has that many outputs."""
    config = transformer_config(hf, parallel, dtype)
    return [_chunk(hf, config, number if parallel.vpp > 1 else None, value_outputs) for number in range(parallel.vpp)]


def _chunk(hf: dict, config: TransformerConfig, number: int | None, value_outputs: int) -> GPTModel:
    first, last = (at(ignore_virtual=False, vp_stage=number)
                   for at in (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage))
    model = GPTModel(
        config=config, transformer_layer_spec=runtime.block_spec(config, number), max_sequence_length=0,
        pre_process=first, post_process=last, vp_stage=number, parallel_output=True, position_embedding_type="rope",
        **model_arguments(hf | ({"tie_word_embeddings": False} if value_outputs else {})))
    if value_outputs and model.post_process:
        model.output_layer = ValueHead(config, value_outputs)
    model.to(device=runtime.device(), dtype=config.params_dtype)
    for name, parameter in model.named_parameters():
        if ".core_attention.indexer." in name:  # which keys it picks has no gradient
            parameter.requires_grad_(False)
    for buffer in model.buffers():  # the router's correction bias stays float32, as in the checkpoint
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return model


class ValueHead(torch.nn.Linear):
    """In place of the vocabulary head: hidden [s, b, h] -> float32 [s, b, outputs], replicated over TP ranks."""

    def __init__(self, config: TransformerConfig, outputs: int, std: float = 0.01):
        super().__init__(config.hidden_size, outputs, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        generator = torch.Generator().manual_seed(0)  # every tensor and data parallel rank must hold the same head
        with torch.no_grad():
            self.weight.normal_(0.0, std, generator=generator)
            self.bias.zero_()
        for parameter in self.parameters():  # finalize_model_grads then sums their gradients over TP ranks
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, weight=None, runtime_gather_output=None):
        value = super().forward(hidden).float()
        if self.sequence_parallel:
            value = tensor_parallel.gather_from_sequence_parallel_region(value, tensor_parallel_output_grad=False)
        return value, None


def start_from_policy(critic: list[GPTModel], policy: list[GPTModel]) -> None:
    """Copy every weight but the head from the policy (ALGORITHM.md §3)."""
    for to, chunk in zip(critic, policy, strict=True):
        weights = {name: tensor for name, tensor in chunk.state_dict().items() if not name.startswith("output_layer.")}
        missing, unexpected = to.load_state_dict(weights, strict=False)
        wrong = [name for name in missing if not name.startswith("output_layer.") and "_extra_state" not in name]
        if wrong or unexpected:
            raise ValueError(f"critic and policy differ in {(wrong + unexpected)[:3]}")


def freeze_attention(critic: list[GPTModel]) -> int:
    """Freeze each layer's attention module, whatever is in it: GQA or MLA, inner norms too. Returns frozen tensors.

    TransformerEngine fuses the *layer's* input norm into GQA's first projection; that norm keeps training.
    Raises ValueError if nothing matched: a critic that silently trains everything is another algorithm.
    """
    frozen = 0
    for layer in (layer for chunk in critic for layer in chunk.decoder.layers):
        for name, parameter in layer.self_attention.named_parameters():
            if name != "linear_qkv.layer_norm_weight":
                parameter.requires_grad_(False)
                frozen += 1
    if not frozen:
        raise ValueError("freeze_critic_attention found no attention parameter on this pipeline stage")
    return frozen
