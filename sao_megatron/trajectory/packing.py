"""From trajectories to micro-batches: whole trajectories packed one after the other, balanced over data parallel ranks.

A trajectory's segments are sequences of their own, which attend to nothing outside; they stay together and in order, so
that its action tokens, over all of them, are one consecutive run (the chain of ALGORITHM.md §2). Everything per token
that training needs is per *action* token: the position whose output predicts it (one before it), its id, its rollout
log-prob, its reward. Observation and prompt tokens are only context.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sao_megatron.trajectory.types import Trajectory


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed trajectories. T packed tokens (padding included), n action tokens, m trajectories."""

    trajectories: list[Trajectory]
    tokens: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]: position inside its own sequence."""
    cu_seqlens: np.ndarray
    """int32 [sequences + 1]: cumulative lengths. Padding lies at the end of sequences (where their lengths must be
    multiples of something) and, to fill the micro-batch, in a last sequence of its own."""
    predict: np.ndarray
    """int64 [n]: packed position whose output predicts each action token (the token before it)."""
    targets: np.ndarray
    """int64 [n]: ids of the action tokens."""
    rollout_logprobs: np.ndarray
    """float32 [n]."""
    rewards: np.ndarray
    """float32 [n]."""
    versions: np.ndarray
    """int32 [n]."""
    lengths: np.ndarray
    """int64 [m]: action tokens of each trajectory."""
    last: np.ndarray
    """int64 [m]: packed position of each trajectory's last token, whose value is the one after the end."""

    @property
    def origin(self) -> np.ndarray:
        """int64 [T]: which token each one is, of all its trajectories' tokens one after the other; -1 in padding."""
        origin = np.full(len(self.tokens), -1)
        if self.trajectories:
            places = np.concatenate(_places(self.trajectories, self.cu_seqlens))
            origin[places] = np.arange(len(places))
        return origin

    @property
    def real(self) -> np.ndarray:
        """bool [T]: no padding."""
        return self.origin >= 0


def pack(trajectories: list[Trajectory], packed_length: int, sequence_multiple: int = 1) -> MicroBatch:
    """Concatenate trajectories, each segment padded to a multiple of `sequence_multiple`; pad to `packed_length`."""
    lengths = [size for t in trajectories for size in _padded(t, sequence_multiple)]
    if padding := packed_length - sum(lengths):
        lengths.append(padding)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places = _places(trajectories, starts)
    tokens = np.zeros(packed_length, np.int64)
    for t, place in zip(trajectories, places, strict=True):
        tokens[place] = t.tokens

    def actions(field: str, dtype) -> np.ndarray:
        parts = [getattr(t, field)[t.action_mask] for t in trajectories]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
    predict = [place[t.action_mask] - 1 for t, place in zip(trajectories, places, strict=True)]
    return MicroBatch(
        trajectories=trajectories, tokens=tokens,
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        cu_seqlens=starts,
        predict=np.concatenate(predict).astype(np.int64) if predict else np.zeros(0, np.int64),
        targets=actions("tokens", np.int64), rollout_logprobs=actions("rollout_logprobs", np.float32),
        rewards=actions("rewards", np.float32), versions=actions("versions", np.int32),
        lengths=np.array([t.num_actions for t in trajectories], np.int64),
        last=np.array([place[-1] for place in places], np.int64))


def _padded(trajectory: Trajectory, sequence_multiple: int) -> list[int]:
    """Packed length of each segment."""
    return [_round_up(length, sequence_multiple) for length in trajectory.segment_lengths.tolist()]


def _places(trajectories: list[Trajectory], starts: np.ndarray) -> list[np.ndarray]:
    """Packed position of every token of each trajectory, whose segments begin at `starts` in order."""
    places, first = [], 0
    for t in trajectories:
        shift = starts[first:first + len(t.segments)] - t.segments
        places.append(np.arange(len(t)) + np.repeat(shift, t.segment_lengths))
        first += len(t.segments)
    return places


def mini_batches(trajectories: list[Trajectory], count: int, group_size: int = 1) -> list[list[Trajectory]]:
    """Cut a batch into `count` consecutive parts of whole groups, equal where the number of groups allows."""
    groups = [trajectories[i:i + group_size] for i in range(0, len(trajectories), group_size)]
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [sum(groups[start:end], []) for start, end in zip(bounds, bounds[1:], strict=False)]


def micro_batches(trajectories: list[Trajectory], dp_size: int, dp_rank: int, token_budget: int,
                  multiple_of: int = 1, equal_length: bool = False, sequence_multiple: int = 1,
                  unit: int = 1, count_multiple: int = 1) -> list[MicroBatch]:
    """This data parallel rank's share of a global batch, the same number of micro-batches on every rank.

    Deterministic: every rank calls it with the same list. A micro-batch exceeds `token_budget` only when one
    trajectory does; a rank with too few trajectories gets empty micro-batches (padding only). Packed lengths are
    multiples of `multiple_of` (sequence parallelism splits them evenly), and one and the same over all micro-batches
    and ranks with `equal_length` (the allgather dispatcher exchanges equal shapes). Every sequence, padding included,
    is a multiple of `sequence_multiple`, which must divide `multiple_of` (context parallelism cuts sequences up). Each
    `unit` consecutive trajectories stay together, in order (the pairs of a preference). Their number is a multiple of
    `count_multiple` (a virtual pipeline takes as many at a time as it has stages).
    """
    units = [range(i, min(i + unit, len(trajectories))) for i in range(0, len(trajectories), unit)]
    sizes = [sum(sum(_padded(trajectories[i], sequence_multiple)) for i in members) for members in units]
    ranks = []  # per rank: micro-batches of unit indices
    for share in _balance(sizes, dp_size):
        ranks.append([[share[i] for i in bin] for bin in _fill([sizes[i] for i in share], token_budget)])
    count = _round_up(max(len(bins) for bins in ranks), count_multiple)

    def packed_length(members: list[int]) -> int:
        return _round_up(max(sum(sizes[u] for u in members), 1), multiple_of)
    longest = max(packed_length(members) for bins in ranks for members in bins)
    mine = ranks[dp_rank] + [[]] * (count - len(ranks[dp_rank]))
    return [pack([trajectories[i] for u in members for i in units[u]],
                 longest if equal_length else packed_length(members), sequence_multiple) for members in mine]


@dataclass(frozen=True, eq=False)
class ContextShare:
    """The part of a micro-batch that one context parallel rank computes: its tokens, and the action tokens whose
    predicting position is among them. Every action token is held by exactly one rank."""

    rows: np.ndarray
    """int64 [T/cp]: packed positions of this rank's tokens, in its order."""
    held: np.ndarray
    """int64 [k]: which of the micro-batch's n action tokens this rank predicts."""
    predict: np.ndarray
    """int64 [k]: where in `rows` each of them is predicted."""
    held_last: np.ndarray
    """int64 [j]: the trajectories whose last token this rank holds."""
    last: np.ndarray
    """int64 [j]: where in `rows` those tokens are."""


def context_share(batch: MicroBatch, size: int, rank: int) -> ContextShare:
    """The share of context parallel rank `rank` of `size`."""
    rows = zigzag_rows(batch.cu_seqlens, size, rank)
    place = np.full(len(batch.tokens), -1)
    place[rows] = np.arange(len(rows))
    held, held_last = np.flatnonzero(place[batch.predict] >= 0), np.flatnonzero(place[batch.last] >= 0)
    return ContextShare(rows, held, place[batch.predict[held]], held_last, place[batch.last[held_last]])


def zigzag_rows(cu_seqlens: np.ndarray, size: int, rank: int) -> np.ndarray:
    """Packed positions that a context parallel rank holds, int64 [T/size], in Megatron's order.

    Each sequence is cut into 2·size chunks and rank r takes chunks r and 2·size − 1 − r: under a causal mask an early
    chunk is cheap and a late one dear, so that all ranks do the same work. All lengths are multiples of 2·size.
    """
    if size == 1:
        return np.arange(cu_seqlens[-1], dtype=np.int64)
    parts = []
    for start, length in zip(cu_seqlens[:-1], np.diff(cu_seqlens), strict=True):
        chunks = np.arange(start, start + length, dtype=np.int64).reshape(2 * size, -1)
        parts += [chunks[rank], chunks[-1 - rank]]
    return np.concatenate(parts)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _balance(sizes: list[int], shares: int) -> list[list[int]]:
    """Longest first, each to the share with the fewest tokens so far (and then the fewest trajectories)."""
    loads, result = [(0, 0, i) for i in range(shares)], [[] for _ in range(shares)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        tokens, members, share = min(loads)
        result[share].append(index)
        loads[loads.index((tokens, members, share))] = (tokens + sizes[index], members + 1, share)
    return [sorted(members) for members in result]


def _fill(sizes: list[int], budget: int) -> list[list[int]]:
    """First-fit in decreasing size: few bins of at most `budget` (a larger item has a bin of its own)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for b, space in enumerate(room):
            if sizes[index] <= space:
                bins[b].append(index)
                room[b] -= sizes[index]
                break
        else:
            bins.append([index])
            room.append(budget - sizes[index])
    return bins or [[]]
