"""Which experts an engine chose for each token, so that the learner can choose the same ones (docs/routing-replay.md).

A row belongs to the forward pass of one token, the pass that predicts the next token: a trajectory's last token has
none. A row that is not recorded is routed freely by the learner.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Routing:
    """Rows of consecutive tokens. Raises ValueError where the two arrays do not fit."""

    experts: np.ndarray
    """uint8, or int16 where an id exceeds 255: [rows, layers·k], layer by layer the k experts of each. Every layer has
    its columns, those of layers without experts mean nothing."""
    recorded: np.ndarray
    """bool [rows]: false where `experts` means nothing."""

    def __post_init__(self):
        if self.experts.ndim != 2 or self.recorded.shape != self.experts.shape[:1]:
            raise ValueError(f"routing: experts has shape {self.experts.shape} and recorded {self.recorded.shape}, "
                             f"expected (rows, layers·k) and (rows,)")

    def __len__(self) -> int:
        return len(self.recorded)


def narrow(experts: np.ndarray) -> np.ndarray:
    """uint8 if all ids fit, else int16."""
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.int16)


def concatenate(first: Routing | None, second: Routing | None) -> Routing | None:
    """Rows of `first`, then those of `second`."""
    if first is None or second is None:
        return second if first is None else first
    return Routing(np.concatenate([first.experts, second.experts]), np.concatenate([first.recorded, second.recorded]))


def runs(numbers: np.ndarray) -> np.ndarray:
    """int64 [r, 2]: first and end (not included) of each run of consecutive ascending `numbers`, in their order."""
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    ends = np.append(begins[1:], len(numbers))[:len(begins)]
    return np.stack([numbers[begins], numbers[ends - 1] + 1], 1)


def pick(parts: list[Routing | None], starts: np.ndarray, rows: np.ndarray, columns: list[slice],
         dtype) -> Routing:
    """`rows` (int64 [r, 2], as of `runs`) and `columns` of `parts` laid one after the other; part i begins at row
    `starts[i]` (int64 [parts + 1], the last one is the end). What a part of None has is not recorded."""
    count, place = int((rows[:, 1] - rows[:, 0]).sum()), 0
    ends = np.cumsum([0, *(part.stop - part.start for part in columns)])
    picked = Routing(np.zeros((count, ends[-1]), dtype), np.zeros(count, bool))
    for first, end in rows.tolist():
        while first < end:
            index = int(np.searchsorted(starts, first, side="right")) - 1
            stop = min(end, int(starts[index + 1]))
            here, there = slice(first - starts[index], stop - starts[index]), slice(place, place + stop - first)
            if part := parts[index]:
                picked.recorded[there] = part.recorded[here]
                for left, right, wanted in zip(ends[:-1], ends[1:], columns, strict=True):
                    picked.experts[there, left:right] = part.experts[here, wanted]
            first, place = stop, there.stop
    return picked


def merge(parts: list[tuple[np.ndarray | slice, Routing]], length: int) -> Routing | None:
    """One Routing of `length` rows: each part at its place, the rest not recorded. None of no parts."""
    if not parts:
        return None
    kinds = [part.experts.dtype for _, part in parts]
    experts = np.zeros((length, parts[0][1].experts.shape[1]), np.result_type(*kinds))
    recorded = np.zeros(length, bool)
    for where, part in parts:
        experts[where], recorded[where] = part.experts, part.recorded
    return Routing(experts, recorded)
