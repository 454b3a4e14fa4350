"""The engines that episodes sample from: an episode keeps to one, and goes on at another when that one dies."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sao_megatron.errors import EngineGone, RunError

LOOK_SECONDS = 1.0
"""Between two looks at an engine that is gone."""
MOST_TRIES = 5
"""Engines (or lives of one) that may die under one request."""


class Generator(Protocol):
    """What an episode needs of an engine's client."""

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, temperature: float,
                       stop_token_ids: list[int]):
        """Answer with `tokens`, `logprobs`, `versions` (lists of one length) and `finish`: stop, length or abort.

        Raises EngineGone where the engine has died.
        """


class EnginePool:
    """An engine that is gone is left out until it is healthy again and holds published weights."""

    def __init__(self, clients: list[Generator], patience: float):
        """`patience`: seconds that a request waits while no engine lives."""
        self._clients, self._patience = clients, patience
        self._in_flight = [0] * len(clients)
        self._gone: dict[int, asyncio.Task] = {}
        self._last_error: EngineGone | None = None

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """A place at the engine with the fewest episodes, whose prefix cache then holds the episode's earlier turns."""
        seat = Seat(self, self._least_busy())
        try:
            yield seat
        finally:
            self._in_flight[seat.index] -= 1

    def _least_busy(self) -> int:
        """Also counts one more episode there. Any engine, if all are gone."""
        living = [i for i in range(len(self._clients)) if i not in self._gone] or range(len(self._clients))
        index = min(living, key=self._in_flight.__getitem__)
        self._in_flight[index] += 1
        return index

    def move(self, seat: Seat) -> None:
        """To an engine that lives, if the seat's own is gone."""
        if seat.index in self._gone:
            self._in_flight[seat.index] -= 1
            seat.index = self._least_busy()

    async def client(self, seat: Seat) -> Generator:
        """The client of a living engine for `seat`. Waits for one; RunError after `patience` seconds."""
        deadline = time.monotonic() + self._patience
        self.move(seat)
        while seat.index in self._gone:
            if time.monotonic() > deadline:
                raise RunError(f"no engine was alive, with published weights, for {self._patience:.0f} s "
                               f"(engine.start_timeout); the last to die: {self._last_error}")
            await asyncio.sleep(LOOK_SECONDS / 10)
            self.move(seat)
        return self._clients[seat.index]

    def note_gone(self, index: int, error: EngineGone) -> None:
        self._last_error = error
        if index not in self._gone:
            self._gone[index] = asyncio.create_task(self._await_return(index))

    async def _await_return(self, index: int) -> None:
        client = self._clients[index]
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if await client.healthy() and await client.model_version() is not None:
                    break
            except RunError:  # it went away between the two questions
                continue
        del self._gone[index]

    def close(self) -> None:
        """Stop looking at engines that are gone."""
        for task in self._gone.values():
            task.cancel()


class Seat:
    """One episode's Generator."""

    def __init__(self, pool: EnginePool, index: int):
        self._pool, self.index = pool, index

    async def generate(self, input_ids: list[int], **sampling):
        """As the client's, at another engine if this one dies: a request has its whole context with it."""
        for last in [False] * (MOST_TRIES - 1) + [True]:
            client = await self._pool.client(self)
            try:
                return await client.generate(input_ids, **sampling)
            except EngineGone as error:
                if last:
                    raise
                self._pool.note_gone(self.index, error)
