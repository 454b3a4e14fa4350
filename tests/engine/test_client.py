"""EngineClient and EngineProcess against a real SGLang server on the CPU."""
from __future__ import annotations

import asyncio
import copy
import random
import time

import psutil
import pytest
import torch
from served import (
    START_SECONDS,
    VOCAB,
    engine_process,
    hf_logprobs,
    hf_tensors,
    join_weight_group,
    make_tiny_model,
    running,
    until_sampling,
)

from sao_megatron.engine.client import SHORT_TURN, EngineClient, Generation
from sao_megatron.engine.process import free_port
from sao_megatron.engine.reply import read_generation, read_metrics
from sao_megatron.errors import RunError

LONG = 600  # tokens of a request that is still running when the test acts on it


def prompts(count: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(VOCAB) for _ in range(source.randint(1, 12))] for _ in range(count)]


def assert_logprobs(model, prompt: list[int], generation: Generation, temperature: float = 1.0):
    expected = hf_logprobs(model, prompt + generation.tokens, temperature)[len(prompt) - 1:]
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def sample(client: EngineClient, prompt: list[int], length: int, **settings):
    return client.generate(prompt, **{"max_new_tokens": length, "temperature": 1.0, "stop_token_ids": []} | settings)


# If this fails, ratios are wrong from the start: the rollout's log-probs are not the model's, or replies are mixed up.
@pytest.mark.parametrize("length", [3, SHORT_TURN + 4], ids=["shared POST", "own POST"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_and_versions(engine, length, temperature):
    async with engine.client() as client:
        asked = prompts(8)
        answers = await asyncio.gather(*(sample(client, p, length, temperature=temperature) for p in asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.finish == "length" and len(answer.tokens) == length
        assert answer.versions == [engine.version] * length
        assert_logprobs(engine.model, prompt, answer, temperature)


# If this fails, short requests of one moment do not share a POST, and short turns cost 1.5 to 2 times the CPU.
async def test_short_requests_share_a_post(engine):
    async with engine.client() as client:
        posts = []
        post = client._post
        client._post = lambda path, body: (posts.append(body), post(path, body))[1]
        await asyncio.gather(*(sample(client, p, 2) for p in prompts(6)), sample(client, [1], SHORT_TURN + 1))
    assert [len(body["input_ids"]) for body in posts if isinstance(body["sampling_params"], list)] == [6]
    assert len(posts) == 2


# If this fails, the stop token is missing from the action, or sampling goes on behind it.
@pytest.mark.parametrize("limit", [SHORT_TURN, 200])
async def test_stop_token_belongs_to_the_action(engine, limit):
    stops = set(range(VOCAB // 2))
    async with engine.client() as client:
        asked = prompts(6)
        answers = await asyncio.gather(*(sample(client, p, limit, stop_token_ids=sorted(stops)) for p in asked))
    stopped = [answer for answer in answers if answer.finish == "stop"]
    assert stopped
    for prompt, answer in zip(asked, answers, strict=True):
        assert_logprobs(engine.model, prompt, answer)
        assert not stops & set(answer.tokens[:-1])
    assert all(answer.tokens[-1] in stops for answer in stopped)


# If this fails, one bad prompt kills the engine and every rollout on it.
@pytest.mark.parametrize("token", [-1, VOCAB])
async def test_id_outside_the_vocabulary_is_not_sent(engine, token):
    async with engine.client() as client:
        with pytest.raises(ValueError, match=f"token id {token} at position 2 is outside the vocabulary of {VOCAB}"):
            await sample(client, [1, 2, token], 2)
        with pytest.raises(ValueError, match="at least one token"):
            await sample(client, [], 2)
        assert len((await sample(client, [1, 2, 3], 2)).tokens) == 2


# If this fails, an aborted rollout loses its tokens, or carries log-probs that are not theirs.
async def test_abort_returns_what_was_sampled(engine):
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, [5, 6, 7], LONG, rid="abort-me"))
        await until_sampling(client)
        await client.abort("somebody-else")
        await client.abort("abort-me")
        answer = await request
    assert answer.finish == "abort" and 0 < len(answer.tokens) < LONG
    assert_logprobs(engine.model, [5, 6, 7], answer)


# If this fails, aborting during a publication hangs a rollout. (SGLang drops what a retracted request had sampled.)
async def test_abort_all_while_retracted(engine):
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, [5, 6, 7], LONG))
        await until_sampling(client)
        await client.pause("retract")
        try:
            await client.abort_all()
            answer = await request
        finally:
            await client.resume()
    assert answer == Generation([], [], [], "abort")


# If this fails, a pause ends rollouts early, or a request that was made during it is lost.
async def test_pause_and_resume(engine):
    async with engine.client() as client:
        before = asyncio.create_task(sample(client, [5, 6, 7], 200))
        await until_sampling(client)
        await client.pause("retract")
        during = asyncio.create_task(sample(client, [8, 9], 3))
        await client.flush_cache()
        assert await client.healthy()
        assert not before.done() and not during.done()
        await client.resume()
        answers = [await before, await during]
    assert [(a.finish, len(a.tokens)) for a in answers] == [("length", 200), ("length", 3)]
    assert_logprobs(engine.model, [5, 6, 7], answers[0])
    assert_logprobs(engine.model, [8, 9], answers[1])


# If this fails, verification after a publication compares with something else than the live model.
async def test_score_is_the_live_model(engine):
    tokens = prompts(1)[0] + list(range(20, 40))
    async with engine.client() as client:
        await sample(client, tokens, 4)  # now the prefix is cached
        for _ in range(2):
            assert await client.score(tokens) == pytest.approx(hf_logprobs(engine.model, tokens), abs=1e-4)
        with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
            await client.score([1])


def buckets(model, count: int):
    tensors = hf_tensors(model)
    size = -(-len(tensors) // count)
    return [tensors[i:i + size] for i in range(0, len(tensors), size)]


async def publish(client: EngineClient, model, version: int, group) -> None:
    parts = buckets(model, 3)
    await client.begin_weight_update()
    for part in parts:
        last = part is parts[-1]
        update = asyncio.create_task(client.update_weights(
            [name for name, _ in part], ["float32"] * len(part), [list(w.shape) for _, w in part], "test-group",
            last=last, weight_version=version if last else None, flush_cache=last))
        flat = torch.cat([weight.flatten().view(torch.uint8) for _, weight in part])
        await asyncio.to_thread(torch.distributed.broadcast, flat, group=group, group_src=0)
        await update
    await client.end_weight_update()


# If this fails, a token's version does not say which weights sampled it, or a publication does not reach the engine.
async def test_publication_under_a_running_request(engine):
    prompt, port = [3, 4, 5, 6], free_port()
    async with engine.client() as client:
        join = asyncio.create_task(client.init_weight_group("127.0.0.1", port, 1, 2, "test-group", "gloo"))
        group = await asyncio.to_thread(join_weight_group, port, "test-group")
        await join
        request = asyncio.create_task(sample(client, prompt, LONG))
        await until_sampling(client)
        await client.pause("retract")
        old_model = copy.deepcopy(engine.model)
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        engine.version += 1
        await publish(client, engine.model, engine.version, group)
        await client.resume()
        answer = await request
        assert await client.model_version() == engine.version
        await client.destroy_weight_group("test-group")
    cut = answer.versions.count(engine.version - 1)
    assert 0 < cut < LONG and answer.versions == [engine.version - 1] * cut + [engine.version] * (LONG - cut)
    before, after = (hf_logprobs(model, prompt + answer.tokens)[len(prompt) - 1:]
                     for model in (old_model, engine.model))
    assert answer.logprobs[:cut] == pytest.approx(before[:cut], abs=1e-4)
    assert answer.logprobs[cut:] == pytest.approx(after[cut:], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01  # else the two would not differ


# If this fails, a bucket that is not the last could make the engine call half-updated weights a version.
async def test_the_version_comes_with_the_last_bucket(engine):
    async with engine.client() as client:
        for wrong in ({"last": True}, {"last": False, "weight_version": 1}, {"last": False, "flush_cache": True}):
            with pytest.raises(ValueError, match="belongs to the last bucket"):
                await client.update_weights([], [], [], "group", **wrong)


# If this fails, a refusal passes for success, or its message does not say who refused what.
async def test_refusals_name_engine_and_endpoint(engine):
    async with engine.client() as client:
        for length in (2, SHORT_TURN + 1):
            with pytest.raises(RunError, match=rf"{engine.url} refused /generate \(HTTP 400\): .*context length"):
                await sample(client, [1] * 2000, length)
        with pytest.raises(RunError, match=rf"{engine.url} refused /destroy_weights_update_group .*does not exist"):
            await client.destroy_weight_group("never-made")
        assert (await client.server_info())["model_path"]


# If this fails, a dead engine is not told apart from a slow one, or a caller waits for ever.
async def test_unreachable_and_silent_engines(engine):
    url = f"http://127.0.0.1:{free_port()}"
    async with EngineClient(url, VOCAB, 5) as client:
        assert not await client.healthy()
        with pytest.raises(RunError, match=f"{url} could not be asked /generate: ClientConnectorError"):
            await sample(client, [1], 2)
    async with engine.client() as control, EngineClient(engine.url, VOCAB, 0.5) as client:
        await control.pause("retract")
        try:
            with pytest.raises(RunError, match=f"{engine.url} did not answer /generate within 0.5 s"):
                await sample(client, [1], 2)
        finally:
            await control.resume()


# If this fails, leaving the client while requests are out leaves their callers waiting.
async def test_leaving_ends_open_requests(engine):
    async with engine.client() as control:
        await control.pause("retract")
        try:
            async with engine.client() as client:
                requests = [asyncio.create_task(sample(client, [1], length)) for length in (2, SHORT_TURN + 1)]
                await asyncio.sleep(0.2)
            for request in requests:
                with pytest.raises(RunError, match="could not be asked /generate"):
                    await asyncio.wait_for(request, 30)
        finally:
            await control.resume()


# If this fails, the learner's publisher, which runs in a thread of its own, cannot use the client.
async def test_client_in_another_thread(engine):
    async def version():
        async with engine.client() as client:
            return await client.model_version()

    assert await asyncio.to_thread(lambda: asyncio.run(version())) == engine.version


# If this fails, the oldest episodes wait behind younger ones, or an evaluation delays training: priorities are ignored.
async def test_waiting_requests_are_taken_by_priority(engine):
    ended = []

    async def ask(client, name: str, length: int, priority: int):
        await sample(client, [3], length, priority=priority, rid=name)
        ended.append(name)
    async with engine.client() as client:
        await client.pause("in_place")  # nothing is taken before all are there
        running = [asyncio.create_task(ask(client, f"filler {i}", 40, 5)) for i in range(64)]  # max_running_requests
        await asyncio.sleep(0.5)
        running += [asyncio.create_task(ask(client, name, 40, priority))
                    for name, priority in (("evaluation", -1), ("young", 0), ("old", 3))]
        await asyncio.sleep(0.5)
        await client.resume()
        await asyncio.gather(*running)
    assert [name for name in ended if not name.startswith("filler")][0] == "old" and ended[-1] == "evaluation"


# If this fails, an answer that lacks a log-prob or a version is taken for a rollout.
def test_odd_replies_are_refused():
    def answer(**changes):
        meta = {"finish_reason": {"type": "length", "length": 2},
                "output_token_logprobs": [[-1.0, 4, None], [-2, 5, None]],
                "weight_versions": [{"version": "7", "start": 0, "end": 2}]}
        return {"output_ids": [4, 5], "meta_info": meta | changes}

    assert read_generation(answer()) == Generation([4, 5], [-1.0, -2.0], [7, 7], "length")
    unpublished = [{"version": "default", "start": 0, "end": 2}]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    assert read_generation(answer(weight_versions=spans)).versions == [7, 8]
    for changes, fault in [({"output_token_logprobs": [[-1.0, 4, None]]}, "1 log-probs do not answer its 2 tokens"),
                           ({"output_token_logprobs": [[-1.0, 4, None], [None, 5, None]]}, "float"),
                           ({"weight_versions": spans[1:]}, "leave a gap"),
                           ({"weight_versions": spans[:1]}, "cover 1 of 2"),
                           ({"weight_versions": unpublished}, "publish a version first"),
                           ({"finish_reason": {"type": "tired"}}, "unknown finish reason 'tired'")]:
        with pytest.raises((TypeError, ValueError), match=fault):
            read_generation(answer(**changes))


@pytest.fixture(scope="module")
def starting(tmp_path_factory):
    """A server whose model nobody knows and one of which there is a config.json alone, started at the same time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("unknown", "random")}
    (folders["unknown"] / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_model"}')
    make_tiny_model(folders["random"])
    (folders["random"] / "model.safetensors").unlink()
    processes = {name: engine_process(folder) for name, folder in folders.items()}
    for name, process in processes.items():
        process.start(folders[name] / "engine.log")
    yield processes
    for process in processes.values():
        process.stop()


# If this fails, an engine seems to run twice the requests that it runs.
def test_metrics_of_all_priorities_are_read_once():
    said = "\n".join(f'sglang:num_running_reqs{{engine_type="unified",priority="{priority}",tp_rank="{rank}"}} {count}'
                     for rank, priority, count in ((0, "", 5.0), (0, "0", 3.0), (0, "-7", 2.0), (1, "", 4.0)))
    said += '\nsglang:gen_throughput{tp_rank="0"} 7.5\n'
    assert read_metrics(said) == {"running": 9.0, "tokens_per_second": 7.5}


# If this fails, a run waits its whole start timeout for a server that is dead, and does not say why it died.
def test_a_server_that_dies_while_starting(starting):
    with pytest.raises(RunError, match=r"died while starting \(exit code .*no_such_model.*engine\.log"):
        starting["unknown"].wait_healthy(time.monotonic() + START_SECONDS)


# If this fails, stopping a run leaves servers behind that hold ports, memory and cores. (config.json alone must serve.)
async def test_random_weights_and_a_clean_stop(starting):
    process = starting["random"]
    process.wait_healthy(time.monotonic() + START_SECONDS)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    async with EngineClient(process.url, VOCAB, 60) as client:
        assert await client.model_version() is None
        with pytest.raises(RunError, match="publish a version first"):
            await sample(client, [1, 2], 2)
    process.stop()
    assert len(family) > 1 and process.poll() is not None
    deadline = time.monotonic() + 10  # a killed process takes a moment to go
    while running(family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(family) == []
