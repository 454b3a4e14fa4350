"""The routed experts that a real SGLang server returns, held to Transformers' routing of the same tokens."""
from __future__ import annotations

import asyncio
import copy

import numpy as np
import torch
from served import VOCAB, until_sampling

from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.routing import Routing

LONG = 400  # tokens of a request that still runs when the test acts on it


def hf_routing(model, tokens: list[int]) -> np.ndarray:
    """[tokens, layers, 2]: each layer's experts by Transformers, in ascending order."""
    chosen = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _gate, _input, output: chosen.append(output[2]))
             for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()


def assert_routing(model, tokens: list[int], routing: Routing, first: int = 0, rows: slice = slice(None)):
    """The rows, of positions from `first` on, are the model's."""
    wanted = hf_routing(model, tokens)[first:first + len(routing)]
    got = np.sort(routing.experts.reshape(wanted.shape), -1)
    np.testing.assert_array_equal(got[rows], wanted[rows])


def sample(client, prompt, length, start=0, **settings):
    return client.generate(prompt, max_new_tokens=length, temperature=1.0, stop_token_ids=[], routing_from=start,
                           **settings)


# If this fails, the learner replays choices that the engine did not make, or those of other tokens or requests.
async def test_routing_of_every_token(engine):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 30)]
    starts = [0, 2, 9, 11]
    async with engine.client() as client:
        answers = await asyncio.gather(*(sample(client, p, 3 + 20 * (i % 2), starts[i]) for i, p in enumerate(prompts)))
    for prompt, start, answer in zip(prompts, starts, answers, strict=True):
        tokens = prompt + answer.tokens
        assert len(answer.routing) == len(tokens) - 1 - start and answer.routing.recorded.all()
        assert answer.routing.experts.dtype == np.uint8
        assert_routing(engine.model, tokens, answer.routing, start)


class ThreeTurns:
    """Turns of at most six tokens, each answered by two of the environment's."""

    name, vocab_size, stop_token_ids, max_turns, max_new_tokens = "three", VOCAB, [1, 2, 3, 4, 5], 3, 6

    def environment(self, prompt):
        return self

    async def reset(self):
        return [7, 8, 9]

    async def step(self, action):
        return Step([11, 12])


# If this fails, rows are lost or shifted where a turn, or a piece of one, ends.
async def test_routing_of_an_episode(engine):
    settings = EpisodeSettings(temperature=1.0, max_new_tokens=8, max_tokens=64, environment_retries=0,
                               request_timeout=60, routing_replay=True)
    async with engine.client() as client:
        pool = EnginePool([client], patience=60, request_tokens=4)
        with pool.seat() as seat:
            played = await run_episode(seat, ThreeTurns(), Prompt("p"), settings, 0)
        pool.close()
    last_action = int(np.flatnonzero(played.action_mask)[-1])
    assert played.turns.max() == 2 and last_action < len(played) - 1
    assert played.routing.recorded.tolist() == [row < last_action for row in range(len(played))]
    assert_routing(engine.model, played.tokens.tolist(), played.routing, rows=slice(last_action))


async def change_weights(engine, client, folder, mode: str):
    """Under the one request that runs; returns the old model."""
    old = copy.deepcopy(engine.model)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.model.save_pretrained(folder)
    await until_sampling(client)
    await client.pause(mode)
    engine.version += 1
    await client.load_weights(str(folder), engine.version, flush_cache=mode == "retract")
    await client.resume()
    return old


# If this fails, tokens that older weights sampled are trained with the routing of newer ones.
async def test_retracted_tokens_are_not_recorded(engine, tmp_path):
    prompt = [3, 4, 5, 6]
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, prompt, LONG))
        await change_weights(engine, client, tmp_path / "new", "retract")
        answer = await request
    cut = answer.versions.count(engine.version - 1)
    assert 0 < cut < LONG
    known = len(prompt) + cut - 1  # the pass over this token sampled the first one of the new version
    assert answer.routing.recorded.tolist() == [row >= known for row in range(len(answer.routing))]
    assert_routing(engine.model, prompt + answer.tokens, answer.routing, rows=slice(known, None))


# If this fails, a request that was computed again for lack of memory, or by a pause, passes for one that was not.
async def test_retraction_within_one_version(engine):
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, [5, 6, 7], LONG))
        await until_sampling(client)
        await client.pause("retract")
        await client.resume()
        answer = await request
    assert len(answer.routing) == LONG + 2 and not answer.routing.recorded.any()


# If this fails, what is recorded in the mode in_place is not what sampled the tokens.
async def test_in_place_keeps_what_sampled(engine, tmp_path):
    prompt = [13, 14, 15]
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, prompt, LONG))
        old = await change_weights(engine, client, tmp_path / "new", "in_place")
        answer = await request
        await client.flush_cache()
    cut = answer.versions.count(engine.version - 1)
    assert 0 < cut < LONG and answer.routing.recorded.all()
    assert_routing(old, prompt + answer.tokens, answer.routing, rows=slice(len(prompt) + cut - 1))
    new = hf_routing(engine.model, prompt + answer.tokens)[:len(prompt) + cut - 1]
    assert (new != hf_routing(old, prompt + answer.tokens)[:len(new)]).any(), "the update must change the routing"


# If this fails, an aborted rollout goes on with rows that are missing or another request's.
async def test_aborted_request(engine):
    async with engine.client() as client:
        request = asyncio.create_task(sample(client, [5, 6, 7], LONG, rid="abort-routing"))
        await until_sampling(client)
        await client.abort("abort-routing")
        answer = await request
    assert answer.finish == "abort" and 0 < len(answer.tokens) < LONG and answer.routing.recorded.all()
    assert_routing(engine.model, [5, 6, 7, *answer.tokens], answer.routing)
