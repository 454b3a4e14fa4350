"""Replays the engine's routing in the policy: each token goes to the experts that the engine had sent it to (R3).

Only the choice is replayed: the weights of the chosen experts are the learner's own router's, so gradients reach it as
ever. Tokens without a recorded choice, padding too, are routed freely. Megatron-Core's routers ask an object in
`router_replay` for their top-k; its own (transformer/moe/router_replay.py) cannot leave a token free, is one list for
the whole process, and needs to be told when a layer is computed again, so the object here takes its place.
"""
from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sao_megatron.learner import runtime  # noqa: F401  (before Megatron)
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from sao_megatron.errors import RunError
from sao_megatron.learner.passes import DeviceBatch
from sao_megatron.learner.routing_shares import deal
from sao_megatron.trajectory.packing import MicroBatch, zigzag_rows
from sao_megatron.trajectory.routing import Routing
from sao_megatron.trajectory.types import Trajectory


class Choice(NamedTuple):
    """One layer's part of a micro-batch, for the tokens that this rank routes."""

    experts: Tensor
    """[rows, k]."""
    recorded: Tensor
    """bool [rows, 1]: false where `experts` means nothing."""


class ReplayedRouter:
    """What one router asks for its top-k."""

    def __init__(self):
        self.choice: Choice | None = None
        """Of the micro-batch in the forward pass; None routes it freely."""
        self.training = False
        self._again: deque[Choice | None] = deque()
        """Of the micro-batches whose layer is computed again in the backward pass (activation recomputation), which
        comes in the order of the forward passes."""

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups=None, group_topk=None, default_compute_topk=None
                        ) -> tuple[Tensor, Tensor]:
        """The interface of Megatron's RouterReplay: scores [rows, experts] -> (scores [rows, k], experts [rows, k])."""
        choice = self._this_choice()
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if choice is None:
            return values, experts
        experts = torch.where(choice.recorded, choice.experts.to(experts.dtype), experts)
        return scores.gather(1, experts), experts

    def _this_choice(self) -> Choice | None:
        if not self.training:
            return self.choice
        if torch.is_grad_enabled():
            return self._again.popleft() if self._again else self.choice
        self._again.append(self.choice)  # a first pass without a graph: this layer will be computed again
        return self.choice


class _Chunk:
    """The routers of one chunk of the model."""

    def __init__(self, model: GPTModel, before: int):
        """`before`: numbers that this rank's rows hold of the chunks before this one."""
        layers = [layer for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)]
        self.layers = [layer.layer_number - 1 for layer in layers]
        self.routers = [ReplayedRouter() for _ in layers]
        for layer, router in zip(layers, self.routers, strict=True):
            layer.mlp.router.router_replay = router
        k = model.config.moe_router_topk
        self.first_layer = min(self.layers, default=0)
        self.columns = slice(self.first_layer * k, (max(self.layers, default=-1) + 1) * k)
        """Of a recorded row, what is this chunk's."""
        self.held = slice(before, before + self.columns.stop - self.columns.start)
        """Where that is in this rank's rows."""


class RoutingReplay:
    """All routers of this rank's part of a policy. From now on every micro-batch that goes through it is routed as
    recorded. Raises RunError at a choice that the model cannot make."""

    def __init__(self, chunks: list[GPTModel]):
        self.config = chunks[0].config
        if self.config.moe_router_fusion:
            raise ValueError("moe_router_fusion: Megatron-Core's fused router asks nobody for its top-k")
        self._chunks: dict[GPTModel, _Chunk] = {}
        for chunk in chunks:
            self._chunks[chunk] = _Chunk(chunk, sum(c.held.stop - c.held.start for c in self._chunks.values()))
            chunk.register_forward_pre_hook(self._begin, with_kwargs=True)

    @property
    def columns(self) -> list[slice]:
        """Of a recorded row, what is this pipeline stage's."""
        return [chunk.columns for chunk in self._chunks.values()]

    def deal(self, batches: list[MicroBatch], trajectories: list[Trajectory]) -> list[Routing | None]:
        """Of each of this rank's micro-batches the recorded routing of the tokens and layers that it routes, for
        to_device; None where nothing was recorded. Collective: `trajectories` is the global batch, and rank 0's have
        their routing. Raises RunError, on all ranks, where that was recorded with another model."""
        return deal(trajectories, batches, [batch.origin[self._rows(batch)] for batch in batches], self.columns,
                    (self.config.num_layers, self.config.moe_router_topk))

    def _begin(self, model: GPTModel, arguments: tuple, keywords: dict) -> None:
        batch, _ = keywords["output_processor_context"]  # learner/passes.py: (DeviceBatch, Objective)
        chunk = self._chunks[model]
        choices = self._choices(chunk, batch) if batch.routing is not None else [None] * len(chunk.routers)
        for router, choice in zip(chunk.routers, choices, strict=True):
            router.choice, router.training = choice, torch.is_grad_enabled()

    def _choices(self, chunk: _Chunk, batch: DeviceBatch) -> list[Choice]:
        """Each layer's, for this rank's tokens."""
        experts, recorded = (torch.from_numpy(array).to(batch.tokens.device)
                             for array in (batch.routing.experts[:, chunk.held], batch.routing.recorded))
        k = self.config.moe_router_topk
        by_layer = experts.unflatten(1, (experts.shape[1] // k, k)).transpose(0, 1)
        mine = [layer - chunk.first_layer for layer in chunk.layers]  # between them may be dense ones
        experts = by_layer[mine].contiguous()  # [layers, rows, k]
        self._check(chunk, experts, recorded, batch.source)
        return [Choice(part, recorded[:, None]) for part in experts]

    def _rows(self, batch: MicroBatch) -> np.ndarray:
        """int64 [T/cp/tp]: packed positions of the tokens that this rank routes: sequence parallelism cuts a context
        parallel rank's share into tp consecutive parts."""
        rows = zigzag_rows(batch.cu_seqlens, ps.get_context_parallel_world_size(), ps.get_context_parallel_rank())
        if not self.config.sequence_parallel:
            return rows
        return np.split(rows, ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]

    def _check(self, chunk: _Chunk, experts: Tensor, recorded: Tensor, batch: MicroBatch) -> None:
        """k different experts of the model in every layer: a dispatcher would lose count of anything else."""
        ordered = experts.sort(-1).values
        wrong = ((ordered[..., 1:] == ordered[..., :-1]).any(-1) | (ordered[..., -1] >= self.config.num_moe_experts)
                 | (ordered[..., 0] < 0)) & recorded
        if wrong.any():
            layer, row = wrong.nonzero()[0].tolist()
            place = self._rows(batch)[row]
            owner, token = batch.trajectories[int(np.searchsorted(batch.last, place))], batch.positions[place]
            raise RunError(f"trajectory {owner.id}: the engine recorded experts {experts[layer, row].tolist()} for its "
                           f"token {token} in layer {chunk.layers[layer]}, expected "
                           f"{experts.shape[-1]} different ones of "
                           f"{self.config.num_moe_experts}: set rollout.routing_replay=false if its SGLang does not "
                           f"report the routing of this architecture")
