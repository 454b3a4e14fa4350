"""From the results on the ranks to a step's token records on rank 0: which trajectories, and one gather of those.

Per-token results live on the last pipeline stage: each data parallel rank has those of its own trajectories, each
context parallel rank those of the tokens that it predicts, and tensor parallel ranks all hold the same.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from sao_megatron.learner import runtime

from sao_megatron.algorithm.dis import Fate
from sao_megatron.learner.passes import DeviceBatch, reports, to_numpy
from sao_megatron.telemetry.records import Recorded
from sao_megatron.trajectory.types import Trajectory

_COLUMNS = {"logprobs": "policy_logprob", "entropy": "entropy", "expert_load": "expert_load",
            "advantages": "advantage", "values": "value", "returns": "return"}
_FATES = np.array([fate.name.lower() for fate in Fate])


class Part(NamedTuple):
    """What one rank holds of one trajectory."""

    trajectory: str
    places: np.ndarray
    """int64 [k]: which of its action tokens."""
    results: dict[str, np.ndarray]
    """By column of the records, [k] each."""


def gather_records(batches: list[DeviceBatch], trajectories: list[Trajectory], count: int,
                   seed: tuple[int, ...]) -> list[Recorded]:
    """Records of `count` trajectories of the global batch on rank 0, [] elsewhere (collective).

    A sample drawn by `seed`, and in a quarter of the places those beside it with the largest share of dropped tokens:
    the sample stays a fair one. Where fewer than that lost any tokens, fewer are recorded.
    """
    chosen = choose(_dropped_shares(batches, trajectories), count, seed)
    wanted = {trajectories[index].id for index in chosen}
    mine = [part for batch in batches for part in _parts(batch, wanted)] if reports() else []
    gathered: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return []
    parts = [part for rank in gathered for part in rank]
    return [Recorded(trajectories[index], how, _joined(trajectories[index], parts)) for index, how in chosen.items()]


def choose(dropped: np.ndarray, count: int, seed: tuple[int, ...]) -> dict[int, str]:
    """{index of a trajectory: "sample" or "worst"}, ascending, from each one's share of dropped tokens."""
    count = min(count, len(dropped))
    worst_count = 0 if count == len(dropped) else count // 4
    sample = np.random.default_rng(seed).choice(len(dropped), count - worst_count, replace=False).tolist()
    others = [index for index in np.argsort(-dropped, kind="stable").tolist() if index not in sample]
    worst = [index for index in others[:worst_count] if dropped[index] > 0]
    return dict(sorted([*((index, "sample") for index in sample), *((index, "worst") for index in worst)]))


def _dropped_shares(batches: list[DeviceBatch], trajectories: list[Trajectory]) -> np.ndarray:
    """Of each trajectory's action tokens, float64 [trajectories]; zeros where the policy was not updated."""
    number = {t.id: index for index, t in enumerate(trajectories)}
    counts = np.zeros(len(trajectories))
    for batch in batches if reports() else ():
        if "tokens" in batch.results:
            fate = to_numpy(batch.results["tokens"].fate)
            dropped = (fate == Fate.DROPPED_LOW) | (fate == Fate.DROPPED_HIGH)
            numbers = np.array([number[t.id] for t in batch.source.trajectories], np.int64)
            np.add.at(counts, numbers[_owners(batch)[dropped]], 1)
    total = torch.from_numpy(counts).to(runtime.device())
    dist.all_reduce(total)
    return total.cpu().numpy() / [t.num_actions for t in trajectories]


def _owners(batch: DeviceBatch) -> np.ndarray:
    """int64 [k]: which of the micro-batch's trajectories each held action token belongs to."""
    return np.searchsorted(np.cumsum(batch.source.lengths), batch.held.cpu().numpy(), side="right")


def _parts(batch: DeviceBatch, wanted: set[str]) -> list[Part]:
    held, owners, lengths = batch.held.cpu().numpy(), _owners(batch), batch.source.lengths
    starts = np.cumsum(lengths) - lengths
    columns = {column: to_numpy(batch.results[name]) for name, column in _COLUMNS.items() if name in batch.results}
    if tokens := batch.results.get("tokens"):
        columns |= {"log_ratio": to_numpy(tokens.log_ratio), "weight": to_numpy(tokens.weight),
                    "fate": _FATES[to_numpy(tokens.fate)]}
    return [Part(t.id, held[owners == index] - starts[index],
                 {name: values[owners == index] for name, values in columns.items()})
            for index, t in enumerate(batch.source.trajectories) if t.id in wanted]


def _joined(trajectory: Trajectory, parts: list[Part]) -> dict[str, np.ndarray]:
    """The ranks' shares of one trajectory in the order of its action tokens."""
    mine = [part for part in parts if part.trajectory == trajectory.id]
    order = np.argsort(np.concatenate([part.places for part in mine]))
    return {name: np.concatenate([part.results[name] for part in mine])[order] for name in mine[0].results}
