"""Episodes over several engines of which some die, with in-process engines that implement the client's methods."""
import asyncio
from contextlib import ExitStack

import pytest

from sao_megatron.engine.reply import Generation
from sao_megatron.errors import EngineGone, RunError
from sao_megatron.rollout import pool as pools
from sao_megatron.rollout.pool import EnginePool


class Engine:
    """Samples its `token` over and over; `alive` and `version` are set by the tests."""

    def __init__(self, token: int):
        self.token, self.alive, self.version, self.requests = token, True, 1, []

    async def generate(self, input_ids, *, max_new_tokens, priority, temperature=1.0):
        self.requests.append(input_ids)
        await asyncio.sleep(0)
        if not self.alive:
            raise EngineGone(f"engine {self.token} is gone")
        return Generation([self.token] * max_new_tokens, [-1.0] * max_new_tokens, [self.version] * max_new_tokens,
                          "length")

    async def healthy(self):
        return self.alive

    async def model_version(self):
        return self.version


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "BACKOFF_SECONDS", 0.001)


async def sample(seat, ids=(1,), count: int = 1) -> list[int]:
    return (await seat.generate(list(ids), max_new_tokens=count)).tokens


# If this fails, an episode loses its cached prefix at every turn, or one engine gets all episodes.
async def test_an_episode_stays_and_episodes_spread():
    pool = EnginePool([Engine(5), Engine(6)], patience=1)
    with pool.seat() as one, pool.seat() as two:
        assert [await sample(one), await sample(two), await sample(one)] == [[5], [6], [5]]
    with pool.seat() as one:
        assert await sample(one) == [5]


# If this fails, each rollout of a group computes the prompt anew at another engine, or a group overloads one engine.
async def test_a_group_stays_together_while_its_engine_is_not_crowded():
    pool = EnginePool([Engine(5), Engine(6)], patience=1)
    with ExitStack() as stack:
        def sit(group=None):
            return stack.enter_context(pool.seat(group=group))
        for _ in range(8):
            sit()
        members = [sit("a") for _ in range(3)]  # at one of five, then of six; the third would be one of seven
        assert [await sample(seat) for seat in members] == [[5], [5], [6]]
        assert await sample(sit("b")) == [6]
    with pool.seat(group="b") as later:
        assert await sample(later) == [5], "an engine is still taken to have the prompt of a group that has left it"


# If this fails, one dead engine ends the run, or the request that goes on elsewhere is another one.
async def test_a_request_goes_on_at_an_engine_that_lives():
    dead, living = Engine(5), Engine(6)
    dead.alive = False
    pool = EnginePool([dead, living], patience=1)
    with pool.seat() as seat:
        assert await sample(seat, [1, 2]) == [6]
        assert dead.requests == living.requests == [[1, 2]]
        with pool.seat() as other:
            assert await sample(other, [3]) == [6]
    assert len(dead.requests) == 1, "an engine that is known to be gone is asked again"
    pool.close()


# If this fails, an engine that dies takes a whole long turn with it, or tokens lose the version that sampled them.
async def test_tokens_that_were_sampled_are_held_when_an_engine_dies():
    class Dying(Engine):
        async def generate(self, input_ids, **sampling):
            self.alive = len(self.requests) < 2
            return await super().generate(input_ids, **sampling)
    dying, living = Dying(5), Engine(6)
    living.version = 2
    pool = EnginePool([dying, living], patience=1, request_tokens=3)
    with pool.seat() as seat:
        got = await seat.generate([1], max_new_tokens=10)
    assert got == Generation([5] * 6 + [6] * 4, [-1.0] * 10, [1] * 6 + [2] * 4, "length")
    assert living.requests == [[1] + [5] * 6, [1] + [5] * 6 + [6] * 3]
    pool.close()


# If this fails, an engine that came back stays idle, or samples from weights older than those that are published.
async def test_an_engine_returns_when_it_has_weights():
    engine = Engine(5)
    pool = EnginePool([engine], patience=5, published=lambda: 7)
    engine.alive, engine.version = False, None
    with pool.seat() as seat:
        answer = asyncio.create_task(sample(seat))
        await asyncio.sleep(0.1)
        engine.alive = True
        await asyncio.sleep(0.1)
        engine.version = 6
        await asyncio.sleep(0.1)
        assert not answer.done() and len(engine.requests) == 1
        engine.version = 7
        assert await answer == [5]


# If this fails, an engine that a publication passed by goes on sampling from old weights, so that the bound on the lag
# no longer holds.
async def test_an_engine_that_a_publication_passed_by_is_left_out():
    behind, current = Engine(5), Engine(6)
    current.version = 2
    pool = EnginePool([behind, current], patience=5, published=lambda: 2)
    with pool.seat() as seat:
        assert await sample(seat) == [6] and len(behind.requests) == 1
        behind.version = 2
        await asyncio.sleep(0.1)
        with pool.seat() as other:
            assert await sample(other) == [5]


# If this fails, a new engine stays idle or samples before it has weights, or one that leaves gets further requests.
async def test_engines_join_and_leave():
    old, new = Engine(5), Engine(6)
    new.version = None
    pool = EnginePool([old], patience=5, published=lambda: 1)
    with pool.seat() as seat:
        pool.use([old, new])
        with pool.seat() as other:
            assert await sample(other) == [5]
        new.version = 1
        await asyncio.sleep(0.1)
        with pool.seat() as other:
            assert await sample(other) == [6]
        pool.use([new])
        assert await sample(seat) == [6] and len(old.requests) == 1
    pool.close()


# If this fails, a run whose engines are all gone waits for ever, or hides why.
async def test_no_engine_left_is_an_error():
    engine = Engine(5)
    engine.alive = False
    pool = EnginePool([engine], patience=0.1)
    with pool.seat() as seat, pytest.raises(RunError, match="no engine was alive.*the last to die: engine 5 is gone"):
        await sample(seat)
    pool.close()


# If this fails, a request that kills every engine that it reaches goes on for ever, or those that were under way with
# it are taken for deadly too.
async def test_a_deadly_request_is_convicted_and_no_other():
    class Fragile(Engine):
        """Dies, with all that it does, whenever it is asked about 13; back at once."""
        died = 0

        async def generate(self, input_ids, **sampling):
            self.requests.append(input_ids)
            died = self.died
            await asyncio.sleep(0.03)
            if input_ids == [13]:
                self.died += 1
            if self.died > died:
                raise EngineGone("all at once")
            return Generation([5], [-1.0], [1], "length")
    engine = Fragile(5)
    pool = EnginePool([engine], patience=5)

    async def episode(ids):
        with pool.seat() as seat:
            return await sample(seat, ids)
    results = await asyncio.gather(*(episode([i]) for i in range(8, 18)), return_exceptions=True)
    assert isinstance(results.pop(5), EngineGone) and results == [[5]] * 9
    assert engine.died == pools.MOST_DEATHS
    pool.close()
