"""Episodes, the controller and evaluation, against an in-process engine that implements only `generate`.

The fake answers as a policy function of the ids it was sent. The end-to-end test runs the same code on real SGLang.
"""
import asyncio
import sqlite3

import pytest

from sao_megatron.config import parse
from sao_megatron.engine.reply import Generation
from sao_megatron.errors import RunError
from sao_megatron.rollout.controller import run_controller
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.evaluate import EvaluationSet, evaluate
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.guess_number import EOT, HIGHER, LOWER, WIN, GuessNumber
from sao_megatron.trajectory.store import MAX_LAG, Store, within
from sao_megatron.trajectory.types import Status

SETTINGS = EpisodeSettings(temperature=1.0, max_new_tokens=8, max_tokens=64, environment_retries=2, request_timeout=0.2)


class FakeEngine:
    """Samples `policy(input_ids)` up to max_new_tokens; `cuts` abort the next requests after so many tokens."""

    def __init__(self, policy, cuts=()):
        self.policy, self.cuts, self.version = policy, list(cuts), 0
        self.requests, self.running, self.most_running = [], 0, 0

    async def generate(self, input_ids, *, max_new_tokens, temperature, stop_token_ids, priority=0):
        self.requests.append(list(input_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        tokens = self.policy(input_ids)[:max_new_tokens]
        finish = "stop" if tokens[-1] in stop_token_ids else "length"
        if self.cuts:
            tokens, finish = tokens[:self.cuts.pop(0)], "abort"
        version, self.version = self.version, self.version + (finish == "abort")
        return Generation(tokens, [-0.5] * len(tokens), [version] * len(tokens), finish)

    async def healthy(self):
        return True

    async def model_version(self):
        return self.version


class TalkTask:
    """Turns end with the token 2. `script`: the Steps (or exceptions) that successive calls get, the last for ever."""

    name, vocab_size, stop_token_ids, max_turns, max_new_tokens = "talk", 32, [2], 3, None

    def __init__(self, *script):
        self.script, self.prompt_tokens = list(script), [1]

    def environment(self, prompt):
        return self

    async def reset(self):
        return self.prompt_tokens

    async def step(self, action):
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def prompt(self, index):
        return Prompt(f"talk/{index}")

    def evaluation_prompts(self, count):
        return [self.prompt(index) for index in range(count)]


def binary_search(ids, game=GuessNumber()):  # noqa: B008
    low, high = 1, 15
    for guess, hint in zip(ids[1::3], ids[3::3], strict=True):
        number = guess - game.token(0)
        low, high = (number + 1, high) if hint == HIGHER else (low, number - 1)
    return [game.token((low + high) // 2), EOT]


def two_words(ids):
    return [6, 7, 2]


def episode(engine, task, prompt=Prompt("p"), seq=0, **settings):  # noqa: B008
    return asyncio.run(run_episode(engine, task, prompt, EpisodeSettings(**vars(SETTINGS) | settings), seq))


def test_game_is_token_in_token_out():
    """Fails if what is sent back is not exactly what was sampled and observed, or the outcome sits elsewhere."""
    game, engine = GuessNumber(), FakeEngine(binary_search)
    played = episode(engine, game, Prompt("p", 11))
    t = game.token
    assert played.tokens.tolist() == [1, t(8), EOT, HIGHER, t(12), EOT, LOWER, t(10), EOT, HIGHER, t(11), EOT, WIN]
    assert engine.requests == [played.tokens[:n].tolist() for n in (1, 4, 7, 10)]
    assert played.rewards.tolist() == [0] * 11 + [1.0, 0]
    assert played.status is Status.COMPLETED
    assert (played.info["solved"], played.info["turns"], played.info["retries"]) == (True, 4, 0)


def test_aborted_turn_is_continued_with_both_versions():
    """Fails if tokens sampled before a weight update are lost or carry the later version."""
    engine = FakeEngine(lambda ids: [[6, 7, 2], [7, 2], [2]][len(ids) - 1], cuts=[1, 0])
    played = episode(engine, TalkTask(Step(done=True)))
    assert played.tokens.tolist() == [1, 6, 7, 2]
    assert played.action_versions.tolist() == [0, 2, 2]


def test_engine_that_only_aborts_is_given_up():
    """Fails if an episode waits for ever for an engine that aborts every request."""
    with pytest.raises(RunError, match="kept aborting"):
        episode(FakeEngine(two_words, cuts=[0] * 100), TalkTask(Step(done=True)))


@pytest.mark.parametrize("steps, settings, status, length", [
    ([Step([5]), Step([5]), Step([5], done=True)], {}, Status.COMPLETED, 13),  # done in the last turn
    ([Step([5])], {}, Status.TRUNCATED, 13),  # max_turns
    ([Step([5])], dict(max_new_tokens=2), Status.TRUNCATED, 4),  # the turn was cut
    ([Step([5], done=True)], dict(max_new_tokens=2), Status.COMPLETED, 4),  # cut, but the environment is content
    ([Step([5])], dict(max_tokens=6), Status.TRUNCATED, 6),  # cut by the whole trajectory's budget
    ([Step([5] * 4)], dict(max_tokens=6), Status.TRUNCATED, 4),  # the observation does not fit
    ([Step([5] * 2)], dict(max_tokens=6), Status.TRUNCATED, 6),  # it fits and leaves no room to sample
])
def test_budgets_truncate(steps, settings, status, length):
    """Fails if an episode outgrows a budget or its status misleads the value bootstrap."""
    played = episode(FakeEngine(two_words), TalkTask(*steps), **settings)
    assert (played.status, len(played)) == (status, length)


def test_failing_environment_is_retried_then_an_error():
    """Fails if a tool host's failure is trained on as a zero reward, or a passing one costs the episode."""
    recovered = episode(FakeEngine(two_words), TalkTask(OSError("no host"), Step([5]), TimeoutError(), Step(done=True)))
    assert (recovered.status, recovered.info["retries"], recovered.info["turns"]) == (Status.COMPLETED, 2, 1)
    failed = episode(FakeEngine(two_words), TalkTask(OSError("no\nhost")))
    assert (failed.status, failed.info["error"], failed.info["retries"]) == (Status.ERROR, "OSError: no host", 2)
    assert "in step" in failed.info["traceback"]


@pytest.mark.parametrize("prompt, step, message", [
    ([], Step(), "prompt is empty"), ([32], Step(), "prompt has 32 at position 0"),
    ([1] * 64, Step(), "rollout.max_tokens"), ([1], Step([5, -1]), "observation has -1 at position 1"),
    ([1], Step([5.0]), "observation has 5.0"),
    ([1], Step(reward=float("nan")), "reward is nan"),
])
def test_invalid_environment_output_is_an_error(prompt, step, message):
    """Fails if an id outside the vocabulary reaches the engine, which it would kill, or a NaN reward the learner."""
    task, engine = TalkTask(step), FakeEngine(two_words)
    task.prompt_tokens = prompt
    failed = episode(engine, task)
    assert failed.status is Status.ERROR and message in failed.info["error"]
    assert len(engine.requests) == (3 if prompt == [1] else 0)


def test_engine_failure_is_not_the_environments():
    """Fails if a dead engine is recorded as failed environments instead of ending the run."""
    class DeadEngine:
        async def generate(self, *_, **__):
            raise RunError("engine is gone")
    with pytest.raises(RunError, match="engine is gone"):
        episode(DeadEngine(), TalkTask(Step(done=True)))


SETS = [EvaluationSet("guess_number", GuessNumber(), 15, 1)]


def config(**sections):
    return parse(dict(name="t", model=dict(fresh={}), task=dict(name="guess_number"), batch=dict(trajectories=6),
                      evaluation=dict(episodes=15), rollout=dict(concurrency=8, max_lag=1)) | sections)


async def learn(store: Store, engines: list[FakeEngine], steps: int, batch: int = 6, group: int = 1,
                evaluated: list[int] = ()) -> None:
    """Take `steps` steps through the store as the learner would; wait for the evaluations (of two sets) of some."""
    store.set_published(0, 0)
    for step in range(steps):
        while step in evaluated and sum(row.name == within(step) for row in store.evaluations()) < 2:
            await asyncio.sleep(0.005)
        while not (leased := store.lease(batch, "learner", version=step, group_size=group)):
            await asyncio.sleep(0.005)
        store.mark_trained(step, step + 1, [trajectory.id for trajectory in leased], {}, "learner")
        for engine in engines:
            engine.version = step + 1
        store.set_published(step + 1, step + 1)
    store.set_state("finished", True)


async def until_ready(store: Store, count: int) -> None:
    async with asyncio.timeout(30):
        while store.counts()["ready"] < count:
            await asyncio.sleep(0)


def test_controller_feeds_a_learner_and_evaluates_twice(tmp_path):
    """Fails if admission, group seqs, balancing, restart or either evaluation is wrong."""
    async def run(store, steps):
        engines = [FakeEngine(binary_search), FakeEngine(binary_search)]
        grouped = config(algorithm=dict(preset="grpo_dis", rollouts_per_prompt=3))
        learner = asyncio.create_task(learn(store, engines, steps))
        await asyncio.wait_for(run_controller(grouped, GuessNumber(), store, engines, sets=SETS), 60)
        await learner
        return engines
    with Store(tmp_path / "store.db") as store:
        engines = asyncio.run(run(store, steps=5))
        assert [(e.name, e.version, e.episodes, e.solved) for e in store.evaluations()] == [("start", 0, 15, 15),
                                                                                           ("end", 5, 15, 15)]
        assert store.counts()["trained"] == 30 and sum(store.counts().values()) <= (5 + 1 + 1) * 6
        assert store.sum_of("in_flight") == 0
        assert all(1 < engine.most_running <= 4 for engine in engines)
    database = sqlite3.connect(tmp_path / "store.db")
    seqs, groups = zip(*database.execute("SELECT seq, group_id FROM trajectories ORDER BY seq"), strict=True)
    assert len(set(seqs)) == len(seqs)
    assert groups == tuple(f"group-{seq // 3}" for seq in seqs)
    assert len(set(database.execute("SELECT group_id, prompt_id FROM trajectories"))) == len(set(groups))


def test_restarted_controller_continues_at_the_next_seq(tmp_path):
    """Fails if a restart repeats prompts, or stops producing because of what the first one left behind."""
    async def first_half(store):
        store.set_published(0, 0)
        engines = [FakeEngine(binary_search)]
        controller = asyncio.create_task(run_controller(config(), GuessNumber(), store, engines, sets=SETS))
        await until_ready(store, 5)
        controller.cancel()
        await asyncio.wait([controller])

    async def second_half(store):
        engines = [FakeEngine(binary_search)]
        learner = asyncio.create_task(learn(store, engines, steps=4))
        await asyncio.wait_for(run_controller(config(), GuessNumber(), store, engines, sets=SETS), 60)
        await learner
    with Store(tmp_path / "store.db") as store:
        asyncio.run(first_half(store))
        assert 5 <= sum(store.counts().values()) <= 12
        asyncio.run(second_half(store))
        assert store.counts()["trained"] == 24
        assert [evaluation.name for evaluation in store.evaluations()] == ["start", "end"]
    seqs = [seq for seq, in sqlite3.connect(tmp_path / "store.db").execute("SELECT seq FROM trajectories")]
    assert len(set(seqs)) == len(seqs)


class FlakyGuess(GuessNumber):
    """Every ninth environment fails."""

    made = 0

    def environment(self, prompt):
        self.made += 1
        if self.made % 9 == 0:
            raise OSError("no host")
        return super().environment(prompt)


def test_groups_with_failed_or_lost_members_never_stall(tmp_path):
    """Fails if a failed episode or a killed controller leaves a group that the learner waits for, or trains in part."""
    grouped = config(algorithm=dict(preset="grpo_dis", rollouts_per_prompt=3), evaluation={},
                     rollout=dict(concurrency=8, max_lag=0, environment_retries=0))

    async def first_half(store):
        store.set_published(0, 0)
        controller = asyncio.create_task(run_controller(grouped, FlakyGuess(), store, [FakeEngine(binary_search)]))
        await until_ready(store, 4)
        controller.cancel()
        await asyncio.wait([controller])

    async def second_half(store):
        engines = [FakeEngine(binary_search)]
        learner = asyncio.create_task(learn(store, engines, steps=8, group=3))
        await asyncio.wait_for(run_controller(grouped, FlakyGuess(), store, engines), 60)
        await learner
    with Store(tmp_path / "store.db") as store:
        asyncio.run(first_half(store))
        asyncio.run(second_half(store))
        assert store.counts()["trained"] == 48 and store.counts()["error"] > 0
        assert store.summary_rows().reasons["incomplete group"] > 0  # the members of groups in which one failed
    sizes = sqlite3.connect(tmp_path / "store.db").execute(
        "SELECT COUNT(*) FROM trajectories WHERE state = 'trained' GROUP BY group_id")
    assert {size for size, in sizes} == {3}


@pytest.mark.parametrize(("lowered", "admitted"), [(None, 12), (0, 6), (5, 12)])
def test_controller_stays_within_the_admitted_number(tmp_path, lowered, admitted):
    """Fails if the controller starts more than pacing admits while the learner does nothing, or ignores `stop`; or if
    alarms.on_alarm=slow does not lower the lag, or raises it above the recipe's."""
    async def run(store):
        store.set_published(0, 0)
        if lowered is not None:
            store.set_state(MAX_LAG, lowered)
        plain, engine = config(evaluation={}), FakeEngine(binary_search)
        controller = asyncio.create_task(run_controller(plain, GuessNumber(), store, [engine]))
        await until_ready(store, admitted)
        await asyncio.sleep(0.2)
        assert store.counts()["ready"] == admitted
        store.set_state("stop", True)
        await asyncio.wait_for(controller, 10)
    with Store(tmp_path / "store.db") as store:
        asyncio.run(run(store))
        assert store.evaluations() == []


def test_always_failing_environment_stops_the_run(tmp_path):
    """Fails if a broken task spins for ever, or the message hides what broke it."""
    with Store(tmp_path / "store.db") as store:
        store.set_published(0, 0)
        with pytest.raises(RunError, match="20 episodes of task talk in a row failed; the first .*no host"):
            broken, engine = TalkTask(OSError("no host")), FakeEngine(two_words)
            asyncio.run(run_controller(config(evaluation={}), broken, store, [engine]))
        assert store.counts()["error"] >= 20 and store.counts()["ready"] == 0


def test_silent_learner_is_named(tmp_path):
    """Fails if the controller waits for ever for a learner that never publishes, before or between steps."""
    with Store(tmp_path / "store.db") as store:
        for published, message in ((False, "first publication"), (True, "newer than version 0")):
            if published:
                store.set_published(0, 0)
            with pytest.raises(RunError, match=message):
                asyncio.run(run_controller(config(evaluation={}), GuessNumber(), store, [FakeEngine(binary_search)],
                                           learner_patience=0.2))


def test_evaluation_does_not_count_failed_environments(tmp_path):
    """Fails if failed environments lower the solve rate, or a wholly failed evaluation passes for one."""
    won, lost = Step(reward=1, done=True, info={"solved": True}), Step(done=True, info={"solved": False})
    plain = config(rollout=dict(environment_retries=0, concurrency=1))

    def run(task, name, store):
        pool = EnginePool([FakeEngine(two_words)], 1)
        asyncio.run(evaluate(plain, [EvaluationSet("talk", task, 4, 1)], pool, name, 2, store))
    with Store(tmp_path / "store.db") as store:
        run(TalkTask(won, OSError("no host"), won, lost), "mixed", store)
        assert store.evaluations()[0][:5] == ("mixed", 2, 3, 2, pytest.approx(2 / 3))
        assert store.evaluations()[0].metrics["errors"] == 1
        with pytest.raises(RunError, match="failed in all 4 episodes; the first: OSError: no host"):
            run(TalkTask(OSError("no host")), "broken", store)
