"""Prompts that always fail, controllers that start again, evaluations beside training, with an in-process engine."""
from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from test_episode import SETS, SETTINGS, FakeEngine, TalkTask, binary_search, config, learn, two_words, until_ready

from sao_megatron.errors import EngineGone
from sao_megatron.rollout import pool as pools
from sao_megatron.rollout.controller import run_controller
from sao_megatron.rollout.evaluate import EvaluationSet, pass_at_k, results
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.guess_number import GuessNumber
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status


class Poisoned(GuessNumber):
    """Of its prompts, the secret 7 breaks the environment."""

    def environment(self, prompt):
        if prompt.data == 7:
            raise OSError("no host")
        return super().environment(prompt)


def train(path, task, *engines, steps: int = 12, **sections):
    """A run of the controller and of a learner that only takes from the store; returns the store."""
    async def run(store):
        learner = asyncio.create_task(learn(store, engines, steps))
        await asyncio.wait_for(run_controller(config(evaluation={}, **sections), task, store, engines), 60)
        await learner
    store = Store(path)
    asyncio.run(run(store))
    return store


# If this fails, one bad prompt is played for ever, or a good one that failed once is given up.
def test_a_prompt_that_always_fails_is_quarantined(tmp_path):
    store = train(tmp_path / "store.db", Poisoned(), FakeEngine(binary_search), steps=30,
                  rollout=dict(environment_retries=0, concurrency=8, quarantine_after=2))
    assert store.get_state("quarantined") == ["guess_number/7"]
    assert 2 <= store.counts()["error"] <= 8  # those that were under way when the second one failed still end
    assert store.counts()["trained"] == 180


# If this fails, old episodes wait behind young ones at a busy engine, or an engine's metrics grow with every episode.
def test_priority_is_an_age(tmp_path):
    class Asked(FakeEngine):
        def __init__(self, policy):
            super().__init__(policy)
            self.priorities = []

        async def generate(self, input_ids, *, priority, **sampling):
            self.priorities.append(priority)
            return await super().generate(input_ids, **sampling)
    engine = Asked(binary_search)
    train(tmp_path / "store.db", GuessNumber(), engine, steps=40, rollout=dict(concurrency=40))
    assert {0, 1, 2} < set(engine.priorities) < set(range(16))


# If this fails, a controller that starts again ends, since an engine that did so too has no weights yet.
def test_an_engine_without_weights_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.01)

    class Late(FakeEngine):
        looks = 0

        async def generate(self, input_ids, **sampling):
            assert self.looks > 5
            return await super().generate(input_ids, **sampling)

        async def model_version(self):
            self.looks += 1
            return self.version if self.looks > 5 else None
    assert train(tmp_path / "store.db", GuessNumber(), Late(binary_search)).counts()["trained"] == 72


# If this fails, a request that kills engines takes the whole run with it, although others are well.
def test_a_deadly_prompt_costs_its_own_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(pools, "BACKOFF_SECONDS", 0.0001)

    class Fragile(FakeEngine):
        async def generate(self, input_ids, **sampling):
            if input_ids[0] == 13:
                raise EngineGone("it died")
            return await super().generate(input_ids, **sampling)

    class Deadly(TalkTask):
        def environment(self, prompt):
            fresh = TalkTask(Step(done=True))
            fresh.prompt_tokens = [13] if prompt.id == "talk/4" else [1]
            return fresh
    store = train(tmp_path / "store.db", Deadly(Step(done=True)), Fragile(two_words), steps=3)
    assert store.summary_rows().reasons == {"EngineGone: it died": 1} and store.counts()["trained"] == 18


class Steady(GuessNumber):
    """Says that it can be replayed, and counts its environments' steps."""

    replayable, steps = True, 0

    def environment(self, prompt):
        self.environments = getattr(self, "environments", 0) + 1
        return super().environment(prompt)


# If this fails, a controller that starts again plays finished turns of half-done episodes anew, or other ones.
def test_half_done_episodes_go_on_where_they_were(tmp_path):
    class Stopping(FakeEngine):
        """Answers the first two turns of an episode; the third only when it may."""
        may = False

        async def generate(self, input_ids, **sampling):
            while len(input_ids) > 6 and not self.may:
                await asyncio.sleep(0.001)
            return await super().generate(input_ids, **sampling)
    plain = config(evaluation={}, rollout=dict(max_lag=0, concurrency=6))

    async def first_half(store, engine):
        store.set_published(0, 0)
        controller = asyncio.create_task(run_controller(plain, Steady(), store, [engine]))
        await asyncio.sleep(0.3)
        controller.cancel()
        await asyncio.wait([controller])

    async def second_half(store, engine):
        controller = asyncio.create_task(run_controller(plain, Steady(), store, [engine]))
        await until_ready(store, 6)
        controller.cancel()
        await asyncio.wait([controller])
    with Store(tmp_path / "store.db") as store:
        old, new = Stopping(binary_search), FakeEngine(binary_search)
        new.version = 1
        asyncio.run(first_half(store, old))
        ended, kept = store.counts()["ready"], [len(store.kept_turns(seq)) for seq in range(6)]
        assert ended < 6 and kept.count(2) == 6 - ended
        asyncio.run(second_half(store, new))
        assert all(len(request) > 6 for request in new.requests), "finished turns were sampled again"
        trajectories = store.read(store.recorded())
        assert len(trajectories) == 6 and not any(store.kept_turns(seq) for seq in range(6))
    for trajectory in trajectories:
        assert trajectory.status is Status.COMPLETED and trajectory.info["solved"]
        assert set(trajectory.action_versions[:4]) == {0}
        assert set(trajectory.action_versions[4:]) <= {1}


# If this fails, an episode of a task that wrongly says it can be replayed becomes a trajectory that was never played.
def test_a_task_that_answers_otherwise_is_played_anew(tmp_path):
    from sao_megatron.rollout.episode import run_episode
    from sao_megatron.rollout.half_done import HalfDone, Turn
    with Store(tmp_path / "store.db") as store:
        store.keep_turns([(0, 0, Turn([6, 2], [-0.5, -0.5], [0, 0], False, [9]))])
        task = TalkTask(Step([5]), Step([5]), Step(done=True))
        played = asyncio.run(run_episode(FakeEngine(two_words), task, Prompt("p"), SETTINGS, 0,
                                         HalfDone(store).diary(0)))
    assert played.info["retries"] == 1 and played.tokens.tolist() == [1, 6, 7, 2, 5, 6, 7, 2]


# If this fails, a solve rate over several samples is biased (Chen et al. 2021: 1 − C(n−c, k)/C(n, k)).
def test_pass_at_k_is_the_unbiased_estimator():
    from itertools import combinations
    for samples, solved in ((4, 0), (4, 1), (5, 2), (5, 5)):
        for k in range(1, samples + 1):
            drawn = [any(i < solved for i in chosen) for chosen in combinations(range(samples), k)]
            assert pass_at_k(samples, solved, k) == pytest.approx(sum(drawn) / len(drawn))


def outcome(solved: bool | None, version: int = 0):
    return SimpleNamespace(status=Status.ERROR if solved is None else Status.COMPLETED, info={"solved": solved},
                           action_versions=SimpleNamespace(min=lambda: version, max=lambda: version))


# If this fails, samples of different prompts are mixed, or failed environments count as unsolved.
def test_results_by_prompt():
    played = [*map(outcome, (True, False, False, False)), *map(outcome, (True, True, None, True)), outcome(True, 3),
              *map(outcome, (None, None, None))]
    found = results(played, 4)
    assert found["avg@4"] == pytest.approx((0.25 + 1 + 1) / 3) == found["pass@1"]
    assert found["pass@2"] == pytest.approx((0.5 + 1) / 2) and found["pass@4"] == 1.0
    assert (found["errors"], found["first_version"], found["last_version"]) == (4, 0, 3)


# If this fails, evaluations within a run are left out, repeated, mixed into the training data, or lost to TensorBoard.
def test_evaluations_while_training(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    sections = config(evaluation=dict(episodes=15, every=3), runs_dir=tmp_path, steps=8)

    async def run(store):
        engines = [FakeEngine(binary_search)]
        learner = asyncio.create_task(learn(store, engines, 8, evaluated=[3, 6]))
        sets = [*SETS, EvaluationSet("hard", GuessNumber(turns=2), 15, 4, weight=3.0)]
        await asyncio.wait_for(run_controller(sections, GuessNumber(), store, engines, sets=sets), 60)
        await learner
    with Store(tmp_path / "store.db") as store:
        asyncio.run(run(store))
        rows = store.evaluations()
        assert {(row.name, row.task_set) for row in rows} == {
            (name, chosen) for name in ("start", "update 3", "update 6", "end") for chosen in ("guess_number", "hard")}
        assert len(rows) == 8 and store.counts()["trained"] == 48
        assert all(row.version == int(row.name.split()[1]) for row in rows if row.name.startswith("update"))
        assert all(row.metrics["pass@4"] == row.solved / row.episodes == 0.2 for row in rows if row.task_set == "hard")
    events = EventAccumulator(str(tmp_path / "t" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("evaluation/hard/pass@4")] == [0, 3, 6, 8]
    assert events.Scalars("evaluation/solve_rate")[0].value == pytest.approx((1.0 + 3 * 0.2) / 4)


# If this fails, a controller that died between two sets of an evaluation leaves a learner that waits for the second one
# for ever (evaluation.pinned).
def test_half_an_evaluation_is_completed(tmp_path):
    sections = config(evaluation=dict(episodes=15, every=2), runs_dir=tmp_path, steps=8)
    sets = [*SETS, EvaluationSet("hard", GuessNumber(turns=2), 15, 1)]
    with Store(tmp_path / "store.db") as store:
        engine = FakeEngine(binary_search)
        engine.version = 2
        store.set_published(2, 2)
        for name in ("start", "update 2"):
            store.add_evaluation(name, 2, 15, 15, 1.0, "guess_number", {"weight": 1.0})
        store.add_evaluation("start", 2, 15, 15, 1.0, "hard", {"weight": 1.0})

        async def run():
            controller = asyncio.create_task(run_controller(sections, GuessNumber(), store, [engine], sets=sets))
            async with asyncio.timeout(30):
                while len(store.evaluations()) < 4:
                    await asyncio.sleep(0.01)
            controller.cancel()
            await asyncio.wait([controller])
        asyncio.run(run())
        assert (store.evaluations()[-1].name, store.evaluations()[-1].task_set) == ("update 2", "hard")


# If this fails, the store fills with turns of redundant episodes that were cancelled.
def test_cancelled_episodes_leave_no_turns(tmp_path):
    grouped = config(evaluation={}, algorithm=dict(preset="grpo_dis", rollouts_per_prompt=3),
                     rollout=dict(concurrency=10, redundancy=2))

    async def run(store):
        engines = [FakeEngine(binary_search)]
        learner = asyncio.create_task(learn(store, engines, 6, group=3))
        await asyncio.wait_for(run_controller(grouped, Steady(), store, engines), 60)
        await learner
    with Store(tmp_path / "store.db") as store:
        asyncio.run(run(store))
        assert store.sum_of("redundant") > 0
        complete = [number for number, group in store.groups(5).items() if group[1] == 3]
        assert complete and not any(store.kept_turns(5 * number + place) for number in complete for place in range(5))
