"""One forward (and backward) pass of a model over a step's micro-batches, through Megatron-Core's pipeline schedule.

Losses are sums over action tokens; Megatron divides the gradients by the number of action tokens of the whole global
batch (`calculate_per_token_loss`), so layout, packing and micro-batching never change them. Under context parallelism
a rank computes its share of every sequence and counts the action tokens that it predicts, so each counts once.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.learner import runtime
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (copy_to_tensor_model_parallel_region,
                                           gather_from_sequence_parallel_region)

from sao_megatron.algorithm.objective import Objective
from sao_megatron.config import RunConfig
from sao_megatron.learner.logprob import HeadOutput, one_pass_head
from sao_megatron.learner.model import varies_in_length
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.trajectory.packing import MicroBatch, context_share, micro_batches
from sao_megatron.trajectory.routing import Routing
from sao_megatron.trajectory.types import Trajectory


@dataclass(eq=False)
class DeviceBatch:
    """This rank's share of a micro-batch, on its device: k of the n action tokens (all of them without context
    parallelism). What needs whole trajectories, advantages above all, is computed on all n by every rank."""

    source: MicroBatch
    """The whole micro-batch, on the host."""
    tokens: Tensor
    """[1, T/cp]."""
    positions: Tensor
    """[1, T/cp]."""
    real: Tensor
    """bool [T/cp]: no padding."""
    packed: PackedSeqParams
    """Lengths of whole sequences with the padding at their ends, which a causal mask keeps out of all real tokens."""
    held: Tensor
    """[k]: which of the n action tokens this rank predicts."""
    predict: Tensor
    """[k]: the rows of `tokens` that predict them."""
    targets: Tensor
    """[k]."""
    rollout_logprobs: Tensor
    """[k]."""
    rewards: Tensor
    """[n]."""
    lengths: Tensor
    """[m]: action tokens of each trajectory."""
    held_last: Tensor
    """[j]: the trajectories whose last token this rank holds."""
    last: Tensor
    """[j]: the rows of `tokens` where those are."""
    routing: Routing | None = None
    """On the host, of the tokens and the layers that this rank routes; None routes them freely."""
    results: dict = field(default_factory=dict)
    """Per-token tensors of the held action tokens, [k] each."""

    @property
    def held_versions(self) -> np.ndarray:
        """int32 [k]."""
        return self.source.versions[self.held.cpu().numpy()]

    def owner(self, action: Tensor) -> str:
        """Id of the trajectory that action token number `action` (of the n) belongs to."""
        return self.source.trajectories[int(torch.searchsorted(self.lengths.cumsum(0), action, right=True))].id

    def whole(self, held: Tensor) -> Tensor:
        """[k] of the held action tokens -> [n] of all; collective over the context parallel group."""
        return _combine(held, self.held, len(self.rewards))

    def whole_last(self, held: Tensor) -> Tensor:
        """[j] of the trajectories whose end is held -> [m] of all; collective over the context parallel group."""
        return _combine(held, self.held_last, len(self.lengths))


def _combine(part: Tensor, places: Tensor, size: int) -> Tensor:
    group = ps.get_context_parallel_group()
    whole = part.new_zeros(size).index_copy(0, places, part.detach())
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    return whole


def local_micro_batches(trajectories: list[Trajectory], config: RunConfig, unit: int = 1) -> list[MicroBatch]:
    """This data parallel rank's share of a global batch (the same list on every rank), packed for the layout."""
    parallel = config.parallel
    return micro_batches(
        trajectories, ps.get_data_parallel_world_size(), ps.get_data_parallel_rank(),
        config.batch.tokens_per_micro_batch, multiple_of=parallel.packed_multiple,
        equal_length=not varies_in_length(parallel), sequence_multiple=parallel.sequence_multiple, unit=unit,
        count_multiple=parallel.pp if parallel.vpp > 1 else 1)


def local_batches(trajectories: list[Trajectory], config: RunConfig) -> list[DeviceBatch]:
    """`local_micro_batches` on the device, routed freely."""
    return [to_device(batch) for batch in local_micro_batches(trajectories, config)]


def to_device(batch: MicroBatch, routing: Routing | None = None) -> DeviceBatch:
    """This rank's share of a micro-batch. `routing`: its share of that (RoutingReplay.deal)."""
    share = context_share(batch, ps.get_context_parallel_world_size(), ps.get_context_parallel_rank())

    def move(array):
        return torch.from_numpy(array).to(runtime.device(), non_blocking=True)
    cu_seqlens, longest = move(batch.cu_seqlens), int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                             max_seqlen_q=longest, max_seqlen_kv=longest)
    return DeviceBatch(
        source=batch, tokens=move(batch.tokens[share.rows])[None], positions=move(batch.positions[share.rows])[None],
        real=move(batch.real[share.rows]), packed=packed,
        held=move(share.held), predict=move(share.predict), targets=move(batch.targets[share.held]),
        rollout_logprobs=move(batch.rollout_logprobs[share.held]), rewards=move(batch.rewards),
        lengths=move(batch.lengths), held_last=move(share.held_last), last=move(share.last),
        routing=routing)


def policy_pass(chunks: list, batches: list[DeviceBatch], objectives: list[Objective], temperature: float,
                forward_only: bool = False, around: Callable[[DeviceBatch], AbstractContextManager] = nullcontext
                ) -> list[HeadOutput]:
    """Train (or only evaluate) the policy. Outputs per micro-batch on the last pipeline stage, [] elsewhere.

    `around` gives a context for each forward of a micro-batch (of a chunk); no backward runs inside it.
    """
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
        with around(batch):
            loss = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed, output_processor=head,
                         output_processor_context=(batch, objective))
        return loss, lambda loss: (loss, _count(batch), {})

    run_schedule(chunks, step, list(zip(batches, objectives, strict=True)), batches[0], forward_only)
    return outputs


def value_pass(chunks: list, batches: list[DeviceBatch], loss: Callable[[DeviceBatch, Tensor, Tensor], Tensor],
               forward_only: bool = False) -> None:
    """Train the critic. `loss(batch, outputs [k, width], last_outputs [j, width])` gives a sum over the held action
    tokens from the head's outputs for them and at the ends of trajectories (last pipeline stage only)."""

    def step(iterator, model):
        batch = next(iterator)
        output = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)

        def loss_of(output):
            outputs = output[0]
            return loss(batch, outputs[batch.predict], outputs[batch.last].detach()), _count(batch), {}
        return output, loss_of

    run_schedule(chunks, step, batches, batches[0], forward_only)


def _count(batch: DeviceBatch) -> Tensor:
    return torch.tensor(len(batch.targets), dtype=torch.int, device=runtime.device())


def run_schedule(chunks: list, step, items: list, first: DeviceBatch, forward_only: bool) -> None:
    """Megatron's pipeline schedule over `items`, one for each micro-batch; `first` is the first one. `step` is its
    forward step: (iterator, chunk) -> (output, function of the last stage's output)."""
    # seq_length matters only where micro-batches are of equal length; otherwise pipeline stages exchange shapes
    seq_length = len(first.source.tokens)  # whole: Megatron divides it by the context parallel size
    with torch.set_grad_enabled(not forward_only):  # Megatron's own switch only leaves out the backward
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=[iter(items) for _ in chunks], model=chunks,
            num_microbatches=len(items), seq_length=seq_length, micro_batch_size=1, forward_only=forward_only)


def reports() -> bool:
    """One rank of each last-stage tensor parallel group counts its held tokens; the others hold the same ones."""
    return ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0


def reduce_statistics(statistics: Statistics) -> Statistics:
    """Sums over all ranks, on every rank."""
    vector = torch.from_numpy(statistics.to_vector()).to(runtime.device())
    dist.all_reduce(vector)
    return statistics.load_vector(vector.cpu().numpy())


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Detached, on the host; floating point as float32."""
    return tensor.detach().float().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
