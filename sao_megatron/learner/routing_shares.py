"""Deals a step's recorded routing out from rank 0: each rank gets the rows and layers that it routes, and no others.

Routing is twenty times as large as the rest of a trajectory. So it does not travel with the tokens, which every rank
has of the whole batch; only when a rank has packed its micro-batches does it say what it lacks. Every row of a layer
goes to one rank, so that all of them together hold it once.
"""
from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from sao_megatron.learner import runtime

from sao_megatron.errors import RunError
from sao_megatron.trajectory.packing import MicroBatch
from sao_megatron.trajectory.routing import Routing, pick, runs
from sao_megatron.trajectory.types import Trajectory


def deal(trajectories: list[Trajectory], batches: list[MicroBatch], tokens: list[np.ndarray], columns: list[slice],
         shape: tuple[int, int]) -> list[Routing | None]:
    """This rank's routing of each of its micro-batches (collective).

    `tokens`: of each micro-batch, for each row that this rank routes, which of its trajectories' tokens it is; -1 for
    padding. `columns`: of the (layers · k), `shape`, that a row has, those of this rank's layers. The order of
    `trajectories` and the number of micro-batches are the same on every rank. None of each, if rank 0's trajectories
    have no routing.
    """
    dtype = _agree_on_dtype(trajectories, shape)
    if dtype is None:
        return [None] * len(batches)
    starts = np.cumsum([0, *(len(t) for t in trajectories)])
    wanted = [runs(_in_global_batch(own[own >= 0], batch, trajectories, starts))
              for own, batch in zip(tokens, batches, strict=True)]
    requests: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((columns, wanted), requests, dst=0)
    parts = [t.routing for t in trajectories]
    width = sum(part.stop - part.start for part in columns)
    sizes = torch.tensor([_size(int((own >= 0).sum()), width, dtype) for own in tokens], device=runtime.device())
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    shares = []
    for number, (own, size) in enumerate(zip(tokens, sizes.tolist(), strict=True)):
        sent = [_packed(pick(parts, starts, rows[number], theirs, dtype), size)
                for theirs, rows in requests] if requests else None
        received = torch.empty(size, dtype=torch.uint8, device=runtime.device())
        dist.scatter(received, sent, src=0)
        shares.append(_spread(received.cpu().numpy(), own >= 0, width, dtype))
    return shares


def _agree_on_dtype(trajectories: list[Trajectory], shape: tuple[int, int]) -> np.dtype | None:
    """What ids of experts are sent as; None if there are none to send. RunError, on all ranks, if rows do not fit."""
    message: list = [None, None]
    if dist.get_rank() == 0:
        recorded = [t for t in trajectories if t.routing is not None]
        wrong = [t for t in recorded if t.routing.experts.shape[1] != shape[0] * shape[1]]
        if recorded:
            message[0] = np.result_type(*(t.routing.experts.dtype for t in recorded))
        if wrong:
            message[1] = (f"trajectory {wrong[0].id} has {wrong[0].routing.experts.shape[1]} routed experts a token, "
                          f"this model {shape[0]} layers times {shape[1]}: it was recorded with another model")
    dist.broadcast_object_list(message, src=0)
    if message[1]:
        raise RunError(message[1])
    return message[0]


def _in_global_batch(tokens: np.ndarray, batch: MicroBatch, trajectories: list[Trajectory], starts: np.ndarray
                     ) -> np.ndarray:
    """Of tokens of the micro-batch's trajectories, their numbers in the global batch."""
    begin = {t.id: start for t, start in zip(trajectories, starts, strict=False)}
    lengths = np.array([len(t) for t in batch.trajectories], np.int64)
    shift = np.array([begin[t.id] for t in batch.trajectories], np.int64) - (np.cumsum(lengths) - lengths)
    return tokens + np.repeat(shift, lengths)[tokens]


def _size(rows: int, width: int, dtype: np.dtype) -> int:
    return rows * (1 + width * dtype.itemsize)


def _packed(routing: Routing, size: int) -> torch.Tensor:
    """uint8 [size]: which rows are recorded, then the experts, then nothing."""
    packed = torch.zeros(size, dtype=torch.uint8)
    rows, experts = len(routing), torch.from_numpy(routing.experts.reshape(-1)).view(torch.uint8)
    packed[:rows] = torch.from_numpy(routing.recorded)
    packed[rows:rows + len(experts)] = experts
    return packed.to(runtime.device())


def _spread(packed: np.ndarray, real: np.ndarray, width: int, dtype: np.dtype) -> Routing:
    """Inverse of `_packed`, with rows of padding, which are not recorded, where `real` is false."""
    rows = int(real.sum())
    routing = Routing(np.zeros((len(real), width), dtype), np.zeros(len(real), bool))
    routing.recorded[real] = packed[:rows].astype(bool)
    routing.experts[real] = packed[rows:_size(rows, width, dtype)].view(dtype).reshape(rows, width)
    return routing
