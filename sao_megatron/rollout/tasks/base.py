"""What a task must provide: prompts, and a multi-turn environment for each (token in, token out)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sao_megatron.config import LimitsSection
from sao_megatron.trajectory.types import Trajectory


@dataclass(frozen=True)
class Prompt:
    """One problem. `id` is stable: the same id is the same problem in every run."""

    id: str
    data: Any = None
    task: Task | None = None
    """Whose it is, where a mixture has dealt it."""
    limits: LimitsSection | None = None
    """Its own, in place of task.limits."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to one action."""

    observation: list[int] = field(default_factory=list)
    """Token ids that the policy sees next (empty where the episode ends)."""
    reward: float = 0.0
    """Goes to the last token of the action."""
    done: bool = False
    context: list[int] | None = None
    """Where the next turn's context is not the one so far and `observation`, because history was rewritten
    (rollout/chat.py): all of it. The trajectory goes on as a new segment."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON-able; the last step's `solved: bool` is the task's success, used for solve rates."""


class Environment(Protocol):
    """One episode. An exception from a method makes the episode an `error`, never a zero reward.

    One that holds something (a sandbox session) has a method `async def close(self)` too, called once, at the end of
    the episode, however it ends.
    """

    async def reset(self) -> list[int]:
        """Token ids of the prompt (at least one)."""

    async def step(self, action: list[int]) -> Step:
        """Answer the sampled token ids of one turn (the stop token included)."""


class Task(Protocol):
    name: str
    vocab_size: int
    """Ids of prompts and observations are in [0, vocab_size)."""
    stop_token_ids: list[int]
    """A turn ends when one of these is sampled."""
    max_turns: int
    max_new_tokens: int | None
    """Most tokens of one turn; None leaves it to `rollout.max_new_tokens`."""

    def prompt(self, index: int) -> Prompt:
        """The index-th training prompt of an endless, deterministic stream."""

    def environment(self, prompt: Prompt) -> Environment: ...

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """A fixed set, the same in every run."""

    def demonstrations(self, count: int, seed: int) -> Iterable[Trajectory]:
        """Scripted episodes for the supervised warm-up (`action_mask` marks the tokens to learn).

        Raises NotImplementedError where a task has none.
        """

    def save_tokenizer(self, folder) -> None:
        """Write the tokenizer that decodes this task's ids, for exported checkpoints."""
