"""Publications that go wrong, engines that come and go, and the ways and modes of publication.

One real learner rank and two real engines for all tests, which therefore depend on nothing but their order being kept:
each leaves both engines alive with the learner's weights.
"""
from __future__ import annotations

import asyncio
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from ranks import World
from served import QUICK, START_SECONDS, VOCAB, engine_process, hf_logprobs, make_tiny_model

from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.tasks.base import Prompt, Step

HERE = Path(__file__).parent
PUBLICATION = {"bucket_mib": 0.05, "timeout": 60, "tolerance": 1e-4}  # about ten buckets
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


class Stand:
    """The learner's rank and the two engines."""

    def __init__(self, folder: Path):
        self.folder, self.version, self.commands = folder, 0, 0
        make_tiny_model(folder / "model")
        self.engines = [engine_process(folder / "model") for _ in range(2)]
        self.urls = [engine.url for engine in self.engines]
        recipe = {"name": "t", "task": {"name": "none"},
                  "model": {"path": str(folder / "model"), "dtype": "float32"}}
        (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
        self.learner = World(HERE / "command_worker.py", 1, (str(folder), str(folder / "config.yaml")),
                             folder / "learner.log")

    def start(self) -> None:
        self.learner.start()
        for index in range(2):
            self.start_engine(index)
        self.wait_engines()

    def start_engine(self, index: int) -> None:
        self.engines[index].start(self.folder / f"engine-{index}.log")

    def wait_engines(self) -> None:
        for engine in self.engines:
            engine.wait_healthy(time.monotonic() + START_SECONDS)

    def list(self, *indices: int) -> None:
        """Which engines engines.json would name."""
        (self.folder / "urls.txt").write_text(" ".join(self.urls[i] for i in indices))

    def send(self, **command) -> Path:
        """Give the learner a command; returns where its answer will be."""
        part = self.folder / "command.part"
        part.write_bytes(pickle.dumps(command))
        part.rename(self.folder / f"{self.commands}.pkl")
        self.commands += 1
        return self.folder / f"{self.commands - 1}.answer.pkl"

    def answer(self, path: Path):
        deadline = time.monotonic() + 240
        while not path.exists():
            assert self.learner.runs and time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.02)
        return pickle.loads(path.read_bytes())

    def do(self, **command):
        return self.answer(self.send(**command))

    def publish(self, **more):
        """A publication of new weights as the next version; returns the URLs that serve it, or the error."""
        self.version += 1
        return self.do(shift=self.version, publish=self.version, **more)

    def verified(self) -> None:
        assert self.do(verify=self.version) < 1e-4

    def log(self) -> str:
        return self.learner.output()

    def client(self, index: int) -> EngineClient:
        return EngineClient(self.urls[index], VOCAB, 60)


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    stand = Stand(tmp_path_factory.mktemp("stand"))
    stand.list(0)
    try:
        stand.start()
        yield stand
        (stand.folder / "command.part").write_bytes(pickle.dumps(None))
        (stand.folder / "command.part").rename(stand.folder / f"{stand.commands}.pkl")
        stand.learner.wait(60)
    finally:
        stand.learner.kill()
        for engine in stand.engines:
            engine.stop(QUICK)


# If this fails, an expert that takes another's place in a real checkpoint is not noticed: of a large model, in
# bfloat16, no probe's log-probs would tell. With the probe's default tolerance, before any weight has moved.
def test_an_engine_that_loads_the_checkpoint_by_itself_tells(stand):
    other = EXPERT.replace("experts.3", "experts.5")
    for fault in (("swap", (EXPERT, other)), ("alter twice", "model.norm.weight")):
        stand.version += 1
        answer = stand.do(publication=PUBLICATION | {"tolerance": 0.05}, unchanged=True, publish=stand.version,
                          fault=fault)
        assert isinstance(answer, RunError) and "as engine http" in str(answer) and stand.urls[0] in str(answer)
        assert ("0:model.norm.weight" if fault[0] != "swap" else "experts.w2_weight") in str(answer)
    stand.version += 1
    assert stand.do(publication=PUBLICATION, unchanged=True, publish=stand.version) == {stand.urls[0]}
    stand.verified()


# If one fails, engines sample from a model that is not the learner's, and nobody notices: SGLang says success.
@pytest.mark.parametrize(("fault", "message"), [
    (("drop", EXPERT), "its whole model from a publication: 0:model.layers.1.mlp.experts.w2_weight (<rank>"),
    (("rename", EXPERT), "its whole model from a publication: 0:model.layers.1.mlp.experts.w2_weight (<rank>"),
    (("alter", "model.norm.weight"), "its whole model from a publication: 0:model.norm.weight (<rank>"),
    (("alter twice", EXPERT), None),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_a_wrong_tensor_is_detected(stand, fault, message):
    answer = stand.publish(publication=PUBLICATION, fault=fault)
    if message is None:  # the same wrong bytes arrive both times: only what they mean tells
        assert answer == {stand.urls[0]}
        answer, message = stand.do(verify=stand.version), "log-probs of a probe differ by"
    assert isinstance(answer, RunError) and message in str(answer) and stand.urls[0] in str(answer)


# If this fails, an engine that is new, killed in the middle of a publication, or back from the dead stops the run,
# takes another engine with it, or serves other weights.
def test_engines_come_and_go(stand):
    assert stand.publish(publication=PUBLICATION) == {stand.urls[0]}
    stand.list(0, 1)
    assert stand.do(publish=stand.version) == set(stand.urls)  # the same version, for the new one alone
    stand.verified()
    assert stand.publish() == set(stand.urls)  # both together
    stand.verified()
    assert stand.publish(fault=("kill", stand.engines[1].pid)) == {stand.urls[0]}
    assert "a publication failed and is repeated with the engines that live" in stand.log()
    assert f"engine {stand.urls[1]} is gone: the run goes on without it" in stand.log()
    stand.verified()
    assert stand.publish() == {stand.urls[0]}
    stand.engines[1].stop()
    stand.start_engine(1)
    stand.wait_engines()
    assert stand.do(publish=stand.version) == set(stand.urls)
    stand.verified()
    assert stand.publish() == set(stand.urls)


@pytest.fixture(scope="module")
def both(stand):
    """Both engines serve what the learner published, whichever tests were chosen before."""
    stand.list(0, 1)
    assert stand.publish(publication=PUBLICATION) == set(stand.urls)
    return stand


class OneTurn:
    """A task of which an episode is one long turn."""

    name, vocab_size, stop_token_ids, max_turns, max_new_tokens = "one turn", VOCAB, [], 1, None

    def environment(self, prompt):
        self.prompt = prompt.data
        return self

    async def reset(self):
        return self.prompt

    async def step(self, action):
        return Step(done=True)


# If one fails, a mode or the way over the disk loses an episode under way, or gives its tokens wrong versions.
@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(("change", "prompt", "request_tokens"), [
    ({"mode": "in_place"}, [3, 4, 5], 4096),
    ({"mode": "abort"}, [6, 7, 8], 4096),  # another prompt: the cache of the one before holds weights of long ago
    ({"via": "disk"}, [10, 11, 12], 4096),
    ({"mode": "retract"}, [13, 14, 15], 90),  # the turn is asked for in pieces
], ids=str)
def test_partial_turns_go_on_in_every_mode(stand, change, prompt, request_tokens, tmp_path):
    from transformers import AutoModelForCausalLM
    stand.do(save=str(tmp_path / "old"))
    old_version = stand.version

    async def cross():
        async with stand.client(0) as client:
            settings = EpisodeSettings(temperature=1.0, max_new_tokens=700, max_tokens=1000, environment_retries=0,
                                       request_timeout=60)
            pool = EnginePool([client], patience=60, request_tokens=request_tokens)
            with pool.seat() as seat:
                running = asyncio.create_task(run_episode(seat, OneTurn(), Prompt("p", prompt), settings, 0))
                return await during(running, client)

    async def during(running, client):
        await asyncio.sleep(0.5)
        stand.version += 1
        path = stand.send(publication=PUBLICATION | change, shift=stand.version, publish=stand.version,
                          save=str(tmp_path / "new"))
        crossing = await running
        assert await asyncio.to_thread(stand.answer, path) == set(stand.urls)
        return crossing, await client.generate([9, 8, 7, 6], max_new_tokens=30, temperature=1.0, stop_token_ids=[])

    crossing, later = asyncio.run(cross())
    stand.verified()
    old, new = (AutoModelForCausalLM.from_pretrained(tmp_path / name).float().eval() for name in ("old", "new"))
    assert set(later.versions) == {stand.version}
    want = hf_logprobs(new, [9, 8, 7, 6, *later.tokens])[3:]
    assert np.abs(np.array(later.logprobs) - want).max() < 1e-4
    versions, got = crossing.action_versions, crossing.rollout_logprobs[crossing.action_mask]
    before, after = versions == old_version, versions == stand.version
    by_old, by_new = (np.array(hf_logprobs(m, crossing.tokens.tolist())[2:]) for m in (old, new))
    assert len(versions) == 700 and before.any() and after.any() and (before | after).all()
    assert (np.diff(versions) >= 0).all() and np.abs(got - by_old)[before].max() < 1e-4
    if change == {"mode": "in_place"}:  # new weights over the old ones' keys and values: neither model's
        assert np.abs(got - by_old)[after].max() > 1e-3
    else:
        assert np.abs(got - by_new)[after].max() < 1e-4
