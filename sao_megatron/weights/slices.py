"""Which rows of each HF tensor a rank's parameter is made of, so that no rank reads more than its own shard.

Nothing here knows how q, k and v are fused: row *numbers* are sent through the rule's own `join`, and what comes out
says where each row of the parameter comes from.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sao_megatron.weights.hf import TensorSource
from sao_megatron.weights.rules import Geometry, Rule, join


@dataclass(frozen=True)
class Run:
    """Rows `start` … `stop` of one HF tensor (number `tensor` of the rule's), which begin at row `at` here."""

    tensor: int
    start: int
    stop: int
    at: int


def fill(target: Tensor, rule: Rule, names: tuple[str, ...], shapes: list[tuple[int, ...]], geometry: Geometry,
         parts: int, part: int, source: TensorSource) -> None:
    """Set `target`, part `part` of `parts` of a parameter, from HF tensors of `names` and full `shapes`.

    One read per HF tensor: from its first to its last row that is needed here (columns, if the rule splits those).
    """
    dim = rule.split_dim or 0
    runs = _runs(rule, shapes, geometry, parts, part)
    for tensor, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        mine = [run for run in runs if run.tensor == tensor]
        if not mine:
            continue
        low, high = min(run.start for run in mine), max(run.stop for run in mine)
        rows = source.get(name, shape, (slice(None),) * dim + (slice(low, high),)).to(target.dtype)
        for run in mine:
            length = run.stop - run.start
            target.narrow(dim, run.at, length).copy_(rows.narrow(dim, run.start - low, length))


def _runs(rule: Rule, shapes: list[tuple[int, ...]], geometry: Geometry, parts: int, part: int) -> list[Run]:
    dim = rule.split_dim or 0
    sizes = [shape[dim] for shape in shapes]
    numbers = torch.arange(sum(sizes)).split(sizes)
    narrow = [-1 if d == dim else 1 for d in range(len(shapes[0]))]
    mine = join(rule, [n.view(narrow) for n in numbers], geometry, parts, part).flatten()
    first = torch.tensor([int(n[0]) for n in numbers])
    owner = torch.searchsorted(first, mine, right=True) - 1
    breaks = ((mine.diff() != 1) | (owner.diff() != 0)).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(mine)]
    runs = []
    for begin, end in zip(edges, edges[1:], strict=False):
        tensor = int(owner[begin])
        start = int(mine[begin] - first[tensor])
        runs.append(Run(tensor, start, start + end - begin, begin))
    return runs
