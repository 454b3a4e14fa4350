"""Several tasks in one run, in shares that hold exactly: in every block of prompts each task has its places."""
from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from sao_megatron.config import TaskSection
from sao_megatron.errors import UserError
from sao_megatron.rollout.tasks.base import Environment, Prompt
from sao_megatron.sandbox.session import Sandbox
from sao_megatron.trajectory.types import Trajectory

LONGEST_BLOCK = 10_000


class Part(TaskSection):
    weight: float = Field(1.0, gt=0)
    """Its share of the prompts, relative to the others'."""


_PARTS = TypeAdapter(dict[str, Part])


class Mixture:
    """`tasks` maps a label to name, options, limits and weight of a task; `seed` orders the tasks within a block.

    A block is the fewest prompts in which the shares come out even, and which prompt is whose depends on its index
    alone: a restart goes on as if there had been none. Trajectories are counted under the labels. A task in a mixture
    gets its prompts 0, 1, 2 …, however often it is dealt.
    """

    name = "mixture"

    def __init__(self, tasks: dict[str, Any], model_dir: str | Path | None, sandbox: Sandbox | None, seed: int = 0):
        from sao_megatron.rollout.tasks import load_task
        self.parts = _checked(tasks)
        self.seed = seed
        self.tasks = {}
        for label, part in self.parts.items():
            self.tasks[label] = task = load_task(part.name, part.options, model_dir, sandbox)
            task.name = label
        self.replayable = all(getattr(task, "replayable", False) for task in self.tasks.values())
        self.vocab_size = max(task.vocab_size for task in self.tasks.values())
        self.block = _block({label: part.weight for label, part in self.parts.items()})

    @staticmethod
    def parts_of(options: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Names and options of the tasks in these options of a mixture."""
        return [(part.name, part.options) for part in _checked(options.get("tasks", {})).values()]

    def prompt(self, index: int) -> Prompt:
        block, place = divmod(index, len(self.block))
        order = _shuffled(tuple(self.block), f"{self.seed}/{block}")
        label = order[place]
        number = block * self.block.count(label) + order[:place].count(label)
        return self._own(label, self.tasks[label].prompt(number))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """In the same shares, those of the unfinished block in the order of the labels."""
        labels = [self.block[index % len(self.block)] for index in range(count)]
        return [self._own(label, prompt) for label in self.tasks
                for prompt in self.tasks[label].evaluation_prompts(labels.count(label))]

    def _own(self, label: str, prompt: Prompt) -> Prompt:
        limits = self.parts[label].limits
        return Prompt(f"{label}:{prompt.id}", prompt.data, prompt.task or self.tasks[label], prompt.limits or limits)

    def environment(self, prompt: Prompt) -> Environment:
        return prompt.task.environment(prompt)

    def demonstrations(self, count: int, seed: int) -> Iterator[Trajectory]:
        """Each task's in turn."""
        each = -(-count // len(self.tasks))
        streams: list[Iterable[Trajectory]] = [task.demonstrations(each, seed) for task in self.tasks.values()]
        for trajectories in zip_longest(*streams):
            yield from trajectories[:count]
            count -= len(trajectories)

    def save_tokenizer(self, folder) -> None:
        next(iter(self.tasks.values())).save_tokenizer(folder)


def _checked(tasks: dict[str, Any]) -> dict[str, Part]:
    try:
        parts = _PARTS.validate_python(tasks)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"task.options.tasks.{'.'.join(str(key) for key in first['loc'])}: {first['msg']}") from None
    if not parts:
        raise UserError("task.options.tasks: a mixture needs at least one task")
    return parts


def _block(weights: dict[str, float]) -> list[str]:
    """Labels, each as often as its share of the shortest block asks for."""
    shares = {label: Fraction(str(weight)) for label, weight in weights.items()}
    whole = math.lcm(*(share.denominator for share in shares.values()))
    counts = {label: int(share * whole) for label, share in shares.items()}
    divisor = math.gcd(*counts.values())
    if sum(counts.values()) // divisor > LONGEST_BLOCK:
        raise UserError(f"task.options.tasks: the weights {list(weights.values())} come out even only after "
                        f"{sum(counts.values()) // divisor} prompts: give rounder ones")
    return [label for label, count in counts.items() for _ in range(count // divisor)]


@lru_cache(16)
def _shuffled(block: tuple[str, ...], seed: str) -> list[str]:
    order = list(block)
    random.Random(f"mixture/{seed}").shuffle(order)
    return order
