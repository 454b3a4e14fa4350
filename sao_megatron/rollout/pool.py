"""The engines that episodes sample from: an episode keeps to one, where possible the one that has its group's prompt in
its prefix cache, and goes on at another when that one dies."""
from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from sao_megatron.engine.reply import Generation
from sao_megatron.errors import EngineGone, RunError
from sao_megatron.trajectory.routing import concatenate

LOOK_SECONDS = 1.0
"""Between two looks at an engine that is gone."""
MOST_DEATHS = 3
"""Engines (or lives of one) that may die under one request. From the second on it is a suspect."""
BACKOFF_SECONDS = 0.2
"""Mean pause before the first repetition of a request; each later one is twice as long."""
CROWDED = 1.25
"""An engine with more than this many times the fewest episodes gets no further ones because of their group."""


class Generator(Protocol):
    """What an episode needs of an engine's client."""

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, temperature: float,
                       stop_token_ids: list[int]) -> Generation:
        """Raises EngineGone where the engine has died, fails or does not answer in time."""


class _Engine:
    def __init__(self, client):
        self.client, self.seats = client, 0
        self.groups: Counter[Hashable] = Counter()
        """Seats here, by group."""
        self.return_: asyncio.Task | None = None
        """While it is gone: ends when it is back."""


class EnginePool:
    """An engine that is gone is left out until it is healthy again and holds the weights that are published."""

    def __init__(self, clients: list, patience: float, request_tokens: int = 4096,
                 published: Callable[[], int | None] = lambda: None):
        """`clients`: EngineClients of engines that serve already. `patience`: seconds that a request waits while no
        engine lives. `request_tokens`: most tokens of one request. `published()`: the version that engines should
        serve, None if any will do."""
        self.patience, self.request_tokens, self.published = patience, request_tokens, published
        self.suspects = asyncio.Lock()
        self.convictions = 0
        """Requests that killed engines on their own."""
        self._engines = [_Engine(client) for client in clients]
        self._last_error: EngineGone | None = None

    def use(self, clients: list) -> None:
        """From now on these. A new one serves once it has the published weights; one that is not named any more gets no
        further request, and what it samples now is awaited."""
        known = {id(engine.client): engine for engine in self._engines}
        if known.keys() == {id(client) for client in clients}:
            return
        for client in clients:
            if id(client) not in known:
                known[id(client)] = engine = _Engine(client)
                engine.return_ = asyncio.create_task(self._await_return(engine, 0.0))
        for engine in self._engines:
            if all(engine.client is not client for client in clients) and engine.return_:
                engine.return_.cancel()
        self._engines = [known[id(client)] for client in clients]

    @contextmanager
    def seat(self, priority: Callable[[], int] = lambda: 0, group: Hashable = None) -> Iterator[Seat]:
        """A place at the engine with the fewest episodes, whose prefix cache then holds the episode's earlier turns;
        rather at one with others of its `group`, the rollouts of one prompt, unless that is crowded. `priority()` is
        asked at each request; engines take those of a higher one first."""
        seat = Seat(self, priority, group)
        self._settle(seat)
        try:
            yield seat
        finally:
            self._leave(seat)

    def _settle(self, seat: Seat) -> None:
        """At the living engine that is best for it, rather not at one that failed it. At any, if all are gone; at
        none, if there is none."""
        living = [engine for engine in self._engines if not engine.return_] or self._engines
        most = CROWDED * min((engine.seats for engine in living), default=0)

        def order(engine: _Engine) -> tuple[bool, bool, int]:
            has_prompt = seat.group in engine.groups and engine.seats <= most
            return engine is seat.failed_at, not has_prompt, engine.seats
        seat.engine = min(living, key=order, default=None)
        if seat.engine:
            seat.engine.seats += 1
            if seat.group is not None:
                seat.engine.groups[seat.group] += 1

    def _leave(self, seat: Seat) -> None:
        if seat.engine:
            seat.engine.seats -= 1
            if seat.group is not None:
                seat.engine.groups[seat.group] -= 1
                if not seat.engine.groups[seat.group]:
                    del seat.engine.groups[seat.group]
        seat.engine = None

    def _serves(self, engine: _Engine | None) -> bool:
        return engine in self._engines and not engine.return_

    async def client(self, seat: Seat):
        """The client of a living engine for `seat`, which moves if its own is gone. Waits for one; RunError after
        `patience` seconds."""
        deadline = time.monotonic() + self.patience
        while not self._serves(seat.engine):
            self._leave(seat)
            self._settle(seat)
            if self._serves(seat.engine):
                break
            if time.monotonic() > deadline:
                raise RunError(f"no engine was alive, with published weights, for {self.patience:.0f} s "
                               f"(engine.start_timeout); the last to die: {self._last_error}")
            await asyncio.sleep(LOOK_SECONDS / 10)
        return seat.engine.client

    def note_gone(self, seat: Seat, error: EngineGone | None = None) -> None:
        """The seat's engine died, or serves older weights than are published: the seat leaves it."""
        engine, self._last_error = seat.engine, error or self._last_error
        if not engine.return_ and engine in self._engines:
            engine.return_ = asyncio.create_task(self._await_return(engine, LOOK_SECONDS))
        seat.failed_at = engine
        self._leave(seat)

    async def _await_return(self, engine: _Engine, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            pause = LOOK_SECONDS
            try:
                if await engine.client.healthy():
                    version, wanted = await engine.client.model_version(), self.published()
                    if version is not None and (wanted is None or version >= wanted):
                        break
            except RunError:  # it went away between the two questions
                continue
        engine.return_ = None

    def close(self) -> None:
        """Stop looking at engines that are gone."""
        for engine in self._engines:
            if engine.return_:
                engine.return_.cancel()


class Seat:
    """One episode's Generator."""

    def __init__(self, pool: EnginePool, priority: Callable[[], int], group: Hashable):
        self._pool, self._priority, self.group = pool, priority, group
        self.engine: _Engine | None = None
        self.failed_at: _Engine | None = None

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, **sampling) -> Generation:
        """As the client's, in requests of at most `request_tokens`, so that an engine that dies takes no more with it:
        what was sampled before is held, and goes on elsewhere.

        Raises EngineGone where MOST_DEATHS engines died under one request.
        """
        held: Generation | None = None
        while True:
            left = max_new_tokens - (len(held.tokens) if held else 0)
            if held and "routing_from" in sampling:
                sampling["routing_from"] = len(input_ids) + len(held.tokens) - 1
            piece = await self._request([*input_ids, *(held.tokens if held else [])], priority=self._priority(),
                                        max_new_tokens=min(left, self._pool.request_tokens), **sampling)
            held = joined(held, piece) if held else piece
            if piece.finish != "length" or len(held.tokens) >= max_new_tokens:
                return held

    async def _request(self, input_ids: list[int], **sampling) -> Generation:
        """One request, repeated (with growing pauses) while engines die under it.

        Requests that died together with a deadly one cannot be told from it; so those under which two engines died are
        tried one at a time, and the deadly one convicts itself. The others then start with a clean sheet.
        """
        pool, deaths, convictions = self._pool, 0, self._pool.convictions
        while True:
            async with pool.suspects if deaths >= MOST_DEATHS - 1 else nullcontext():
                if convictions != pool.convictions:
                    deaths, convictions = 0, pool.convictions
                client, wanted = await pool.client(self), pool.published()
                try:
                    answer = await client.generate(input_ids, **sampling)
                    if wanted is None or not answer.versions or answer.versions[-1] >= wanted:
                        return answer
                    # A publication passed the engine by. Older tokens than pacing reckons with: sample them elsewhere.
                    pool.note_gone(self)
                except EngineGone as error:
                    pool.note_gone(self, error)
                    deaths += 1
                    if deaths == MOST_DEATHS:
                        pool.convictions += 1
                        raise
            if deaths:
                await asyncio.sleep(BACKOFF_SECONDS * 2**(deaths - 1) * random.uniform(0.5, 1.5))


def joined(before: Generation, after: Generation) -> Generation:
    """The generation of two requests, of which the second went on where the first ended."""
    return replace(after, tokens=before.tokens + after.tokens, logprobs=before.logprobs + after.logprobs,
                   versions=before.versions + after.versions, routing=concatenate(before.routing, after.routing))
