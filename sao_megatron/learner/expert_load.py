"""How busy the experts are that a token goes through, from the routers' own choice in the training forward.

An expert's load is the number of tokens that its layer sends to it, in units of the layer's mean: 1 where all experts
are equally busy. Counted are the tokens of one policy update on all ranks, without padding, so that neither layout nor
packing changes it. A token's load is the mean over its layers and its k experts; an action token's is that of the token
before it, whose output predicts it.

A router sees its rank's tokens only (its slice under sequence and context parallelism) but all experts, and a pipeline
stage has only its own layers. So ranks keep which experts their tokens chose, and communicate twice an update: the
counts over all ranks, then the tokens' sums over the ranks that hold parts of the same tokens' way through the model.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.learner import runtime
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from sao_megatron.learner.passes import DeviceBatch


class ExpertLoad:
    """`begin` with an update's micro-batches, `watch` around each one's forward, `finish` after the pass."""

    def __init__(self, chunks: list[GPTModel]):
        """`chunks` are this rank's of a model with experts."""
        self.config = chunks[0].config
        self._batch: DeviceBatch | None = None
        self._places: dict[DeviceBatch, tuple[Tensor, Tensor, Tensor]] = {}
        self._chosen: dict[DeviceBatch, dict[int, Tensor]] = {}
        self.busiest = 0.0
        """Largest load of any expert in the last update."""
        for router in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(router, TopKRouter):
                router.register_forward_hook(lambda router, _, output: self._see(router.layer_number - 1, output[1]))

    def begin(self, batches: list[DeviceBatch]) -> None:
        self._chosen = {batch: {} for batch in batches}
        self._places = {batch: self._slice(batch) for batch in batches}
        self._counts = torch.zeros(self.config.num_layers, self.config.num_moe_experts, dtype=torch.int64,
                                   device=runtime.device())

    def _slice(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows that this rank's routers see: which are no padding (bool), which predict one of the held action
        tokens (int64 [i]), and which of the held ones those are (int64 [i])."""
        parts, part = 1, 0
        if self.config.sequence_parallel:
            parts, part = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        count = len(batch.real) // parts
        rows = batch.predict - part * count
        held = ((rows >= 0) & (rows < count)).nonzero()[:, 0]
        return batch.real[part * count:(part + 1) * count], rows[held], held

    @contextmanager
    def watch(self, batch: DeviceBatch) -> Iterator[None]:
        """Inside is the forward of `batch`; what a backward recomputes comes later."""
        self._batch = batch
        yield
        self._batch = None

    @torch.no_grad()
    def _see(self, layer: int, routing_map: Tensor) -> None:
        """routing_map: bool [rows, experts]."""
        if self._batch is None:
            return
        real, rows, _ = self._places[self._batch]
        self._counts[layer] += (routing_map.bool() & real[:, None]).sum(0)
        chosen = routing_map[rows].to(torch.uint8).topk(self.config.moe_router_topk).indices
        self._chosen[self._batch][layer] = chosen.to(torch.int16)

    def finish(self) -> None:
        """Leave `expert_load`, float32 [k], in each batch's results."""
        dist.all_reduce(self._counts)
        counts = self._counts.double()
        load = (counts / counts.mean(1, keepdim=True).clamp(min=1e-9)).float()
        sums = torch.cat([self._sums(batch, load) for batch in self._chosen])
        dist.all_reduce(sums, group=ps.get_model_parallel_group())
        parts = (sums / (counts.sum(1) > 0).sum()).split([len(batch.held) for batch in self._chosen])
        for batch, part in zip(self._chosen, parts, strict=True):
            batch.results["expert_load"] = part
        self._chosen, self._places = {}, {}
        self.busiest = float(load.max())

    def _sums(self, batch: DeviceBatch, load: Tensor) -> Tensor:
        """float32 [k]: over this rank's layers, of the held action tokens whose rows it has; 0 for the others."""
        _, _, held = self._places[batch]
        sums = load.new_zeros(len(batch.held))
        for layer, chosen in self._chosen[batch].items():
            sums.index_add_(0, held, load[layer][chosen.long()].mean(-1))
        return sums
