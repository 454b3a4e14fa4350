"""What is kept of episodes under way, so that a controller that starts again goes on with them.

Only for tasks that say `replayable = True`: given the same actions, their environments give the same answers, so that
an environment is rebuilt by playing the kept actions to a new one.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from sao_megatron.trajectory.store import Store


class Turn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    cut: bool
    """Whether a budget cut the action off."""
    observation: list[int]
    """The environment's answer, to which a rebuilt environment is held."""


class Diary:
    """One episode's turns."""

    def __init__(self, kept: list[Turn], pending: list[tuple[int, int, Any]], seq: int):
        self.kept, self._pending, self._seq = kept, pending, seq

    def add(self, turn: int, content: Turn) -> None:
        self._pending.append((self._seq, turn, content))


class HalfDone:
    """Writes the turns of all episodes together."""

    def __init__(self, store: Store):
        self._store = store
        self._pending: list[tuple[int, int, Any]] = []
        self._given_up: list[int] = []

    def diary(self, seq: int) -> Diary:
        return Diary([Turn(*turn) for turn in self._store.kept_turns(seq)], self._pending, seq)

    def write(self) -> None:
        if self._pending or self._given_up:
            self._store.keep_turns(self._pending, self._given_up)
            self._pending.clear()
            self._given_up.clear()

    def give_up(self, seq: int) -> None:
        """Of an episode that will have no trajectory: its group is complete without it."""
        self.forget({seq})
        self._given_up.append(seq)

    def forget(self, seqs: set[int]) -> None:
        """Of episodes that ended: the store forgets what it has of them when they are appended."""
        self._pending[:] = [entry for entry in self._pending if entry[0] not in seqs]
