"""Episodes over several engines of which some die, with in-process engines that implement the client's methods."""
import asyncio

import pytest

from sao_megatron.errors import EngineGone, RunError
from sao_megatron.rollout import pool as pools
from sao_megatron.rollout.pool import EnginePool


class Engine:
    """Answers with its name; `alive` and `version` are set by the tests."""

    def __init__(self, name: str):
        self.name, self.alive, self.version, self.requests = name, True, 1, []

    async def generate(self, input_ids, **sampling):
        self.requests.append((input_ids, sampling))
        await asyncio.sleep(0)
        if not self.alive:
            raise EngineGone(f"{self.name} is gone")
        return self.name

    async def healthy(self):
        return self.alive

    async def model_version(self):
        return self.version


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.02)


# If this fails, an episode loses its cached prefix at every turn, or one engine gets all episodes.
async def test_an_episode_stays_and_episodes_spread():
    pool = EnginePool([Engine("a"), Engine("b")], patience=1)
    with pool.seat() as one, pool.seat() as two:
        assert [await one.generate([1]), await two.generate([1]), await one.generate([2])] == ["a", "b", "a"]
    with pool.seat() as one:
        assert await one.generate([1]) == "a"


# If this fails, one dead engine ends the run, or the request that goes on elsewhere is another one.
async def test_a_request_goes_on_at_an_engine_that_lives():
    dead, living = Engine("dead"), Engine("living")
    dead.alive = False
    pool = EnginePool([dead, living], patience=1)
    with pool.seat() as seat:
        assert await seat.generate([1, 2], temperature=0.5) == "living"
        assert dead.requests == living.requests == [([1, 2], {"temperature": 0.5})]
        with pool.seat() as other:
            assert await other.generate([3]) == "living"
    assert len(dead.requests) == 1, "an engine that is known to be gone is asked again"
    pool.close()


# If this fails, an engine that came back stays idle, or samples from weights that nobody published.
async def test_an_engine_returns_when_it_has_weights():
    engine = Engine("a")
    pool = EnginePool([engine], patience=5)
    engine.alive, engine.version = False, None
    with pool.seat() as seat:
        answer = asyncio.create_task(seat.generate([1]))
        await asyncio.sleep(0.1)
        engine.alive = True
        await asyncio.sleep(0.1)
        assert not answer.done() and len(engine.requests) == 1
        engine.version = 7
        assert await answer == "a"


# If this fails, a run whose engines are all gone waits for ever, or hides why.
async def test_no_engine_left_is_an_error():
    engine = Engine("a")
    engine.alive = False
    pool = EnginePool([engine], patience=0.1)
    with pool.seat() as seat, pytest.raises(RunError, match="no engine was alive.*the last to die: a is gone"):
        await seat.generate([1])
    pool.close()


# If this fails, a request that kills every engine it reaches goes on for ever.
async def test_a_request_that_kills_engines_ends():
    class Poisoned(Engine):
        async def generate(self, input_ids, **sampling):
            self.requests.append(input_ids)
            raise EngineGone("poisoned")
    engine = Poisoned("a")
    pool = EnginePool([engine], patience=5)
    with pool.seat() as seat, pytest.raises(EngineGone, match="poisoned"):
        await seat.generate([1])
    assert len(engine.requests) == pools.MOST_TRIES
    pool.close()
