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
    """What one rank holds of the chosen trajectories of a micro-batch."""

    owners: np.ndarray
    """int64 [k]: which trajectory of the global batch each action token belongs to."""
    places: np.ndarray
    """int64 [k]: which of its trajectory's action tokens it is."""
    results: dict[str, np.ndarray]
    """By column of the records, [k] each; fate as a number."""


def gather_records(batches: list[DeviceBatch], trajectories: list[Trajectory], count: int,
                   seed: tuple[int, ...]) -> list[Recorded]:
    """Records of `count` trajectories of the global batch on rank 0, [] elsewhere (collective).

    A sample drawn by `seed`, and in a quarter of the places those beside it with the largest share of dropped tokens:
    the sample stays a fair one. Where fewer than that lost any tokens, fewer are recorded.
    """
    number = {t.id: index for index, t in enumerate(trajectories)}
    chosen = choose(_dropped_shares(batches, trajectories, number), count, seed)
    mine = [_part(batch, number, list(chosen)) for batch in batches] if reports() else []
    gathered: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return []
    results = _joined([part for rank in gathered for part in rank], trajectories, list(chosen))
    return [Recorded(trajectories[index], how, own)
            for (index, how), own in zip(chosen.items(), results, strict=True)]


def choose(dropped: np.ndarray, count: int, seed: tuple[int, ...]) -> dict[int, str]:
    """{index of a trajectory: "sample" or "worst"}, ascending, from each one's share of dropped tokens."""
    count = min(count, len(dropped))
    worst_count = 0 if count == len(dropped) else count // 4
    sample = np.random.default_rng(seed).choice(len(dropped), count - worst_count, replace=False).tolist()
    others = [index for index in np.argsort(-dropped, kind="stable").tolist() if index not in sample]
    worst = [index for index in others[:worst_count] if dropped[index] > 0]
    return dict(sorted([*((index, "sample") for index in sample), *((index, "worst") for index in worst)]))


def _dropped_shares(batches: list[DeviceBatch], trajectories: list[Trajectory], number: dict[str, int]) -> np.ndarray:
    """Of each trajectory's action tokens, float64 [trajectories]; zeros where the policy was not updated."""
    counts = np.zeros(len(trajectories))
    for batch in batches if reports() else ():
        if "tokens" in batch.results:
            fate = to_numpy(batch.results["tokens"].fate)
            dropped = (fate == Fate.DROPPED_LOW) | (fate == Fate.DROPPED_HIGH)
            counts += np.bincount(_numbers(batch, number)[_owners(batch)[dropped]], minlength=len(counts))
    total = torch.from_numpy(counts).to(runtime.device())
    dist.all_reduce(total)
    return total.cpu().numpy() / [t.num_actions for t in trajectories]


def _owners(batch: DeviceBatch) -> np.ndarray:
    """int64 [k]: which of the micro-batch's trajectories each held action token belongs to."""
    return np.searchsorted(np.cumsum(batch.source.lengths), batch.held.cpu().numpy(), side="right")


def _numbers(batch: DeviceBatch, number: dict[str, int]) -> np.ndarray:
    """int64 [m]: the micro-batch's trajectories as numbers of the global batch's."""
    return np.array([number[t.id] for t in batch.source.trajectories], np.int64)


def _part(batch: DeviceBatch, number: dict[str, int], wanted: list[int]) -> Part:
    owners, lengths = _owners(batch), batch.source.lengths
    numbers, places = _numbers(batch, number)[owners], batch.held.cpu().numpy() - (np.cumsum(lengths) - lengths)[owners]
    mine = np.flatnonzero(np.isin(numbers, wanted))
    columns = {column: batch.results[name] for name, column in _COLUMNS.items() if name in batch.results}
    if tokens := batch.results.get("tokens"):
        columns |= {"log_ratio": tokens.log_ratio, "weight": tokens.weight, "fate": tokens.fate}
    return Part(numbers[mine], places[mine], {name: to_numpy(values)[mine] for name, values in columns.items()})


def _joined(parts: list[Part], trajectories: list[Trajectory], chosen: list[int]) -> list[dict[str, np.ndarray]]:
    """The ranks' shares of each chosen trajectory (ascending) in the order of its action tokens."""
    parts = [part for part in parts if len(part.owners)]
    order = np.lexsort([np.concatenate([part.places for part in parts]),
                        np.concatenate([part.owners for part in parts])])
    ends = np.cumsum([trajectories[index].num_actions for index in chosen])[:-1]
    results = {name: np.concatenate([part.results[name] for part in parts])[order] for name in parts[0].results}
    if "fate" in results:
        results["fate"] = _FATES[results["fate"]]
    columns = {name: np.split(values, ends) for name, values in results.items()}
    return [{name: values[index] for name, values in columns.items()} for index in range(len(chosen))]
