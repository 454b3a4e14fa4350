"""One forward (and backward) pass of a model over a step's micro-batches, through Megatron-Core's pipeline schedule.

Losses are sums over action tokens; Megatron divides the gradients by the number of action tokens of the whole global
batch (`calculate_per_token_loss`), so layout, packing and micro-batching never change them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sao_megatron.learner import runtime
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (copy_to_tensor_model_parallel_region,
                                           gather_from_sequence_parallel_region)

from sao_megatron.algorithm.objective import Objective
from sao_megatron.learner.logprob import HeadOutput, one_pass_head
from sao_megatron.trajectory.packing import MicroBatch


@dataclass(eq=False)
class DeviceBatch:
    """A micro-batch on this rank's device; tensors as in MicroBatch."""

    source: MicroBatch
    tokens: Tensor
    positions: Tensor
    packed: PackedSeqParams
    predict: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    lengths: Tensor
    last: Tensor
    results: dict = field(default_factory=dict)


def to_device(batch: MicroBatch) -> DeviceBatch:
    def move(array):
        return torch.from_numpy(array).to(runtime.device(), non_blocking=True)
    cu_seqlens, longest = move(batch.cu_seqlens), int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                             max_seqlen_q=longest, max_seqlen_kv=longest)
    fields = ("predict", "targets", "rollout_logprobs", "rewards", "lengths", "last")
    return DeviceBatch(batch, move(batch.tokens)[None], move(batch.positions)[None], packed,
                       **{name: move(getattr(batch, name)) for name in fields})


def policy_pass(model, batches: list[DeviceBatch], objectives: list[Objective], temperature: float,
                forward_only: bool = False) -> list[HeadOutput]:
    """Train (or only evaluate) the policy. Outputs per micro-batch on the last pipeline stage, [] elsewhere."""
    outputs: list[HeadOutput] = []

    def head(hidden_states, output_layer, output_weight, context, config, **_):
        batch, objective = context
        group = ps.get_tensor_model_parallel_group()
        if config.sequence_parallel:  # every rank sees all rows; their gradients, one part per shard, are summed
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        weight = output_layer.weight if output_weight is None else output_weight
        unscaled = config.grad_scale_func is None  # then the schedule's gradient of the loss is 1
        output = one_pass_head(hidden[:, 0].index_select(0, batch.predict), weight, batch.targets, objective, group,
                               temperature, into_main_grad=unscaled and hasattr(weight, "main_grad"))
        outputs.append(output)
        return output.loss

    def step(iterator, model):
        batch, objective = next(iterator)
        loss = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed, output_processor=head,
                     output_processor_context=(batch, objective))
        return loss, lambda loss: (loss, _count(batch), {})

    _run(model, step, list(zip(batches, objectives, strict=True)), batches[0].tokens.size(1), forward_only)
    return outputs


def value_pass(model, batches: list[DeviceBatch], loss: Callable[[DeviceBatch, Tensor, Tensor], Tensor],
               forward_only: bool = False) -> None:
    """Train the critic. `loss(batch, values [n], last_values [m])` gives a sum over action tokens; it is called on the
    last pipeline stage only."""

    def step(iterator, model):
        batch = next(iterator)
        output = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)

        def loss_of(output):
            values = output[0, :, 0]
            return loss(batch, values[batch.predict], values[batch.last].detach()), _count(batch), {}
        return output, loss_of

    _run(model, step, batches, batches[0].tokens.size(1), forward_only)


def _count(batch: DeviceBatch) -> Tensor:
    return torch.tensor(len(batch.targets), dtype=torch.int, device=runtime.device())


def _run(model, step, items: list, seq_length: int, forward_only: bool) -> None:
    # seq_length matters only where micro-batches are of equal length; otherwise pipeline stages exchange shapes
    with torch.set_grad_enabled(not forward_only):  # Megatron's own switch only leaves out the backward
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(items), model=[model], num_microbatches=len(items),
            seq_length=seq_length, micro_batch_size=1, forward_only=forward_only)


def reports() -> bool:
    """One rank of each last-stage tensor parallel group counts tokens; the others hold the same ones."""
    return ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Detached, on the host; floating point as float32."""
    return tensor.detach().float().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
