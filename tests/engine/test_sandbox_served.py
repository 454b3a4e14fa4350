"""Code that a real engine has sampled, run in the sandbox, whose answer goes back to the engine."""
from __future__ import annotations

import asyncio

import numpy as np
import pytest
from served import VOCAB, hf_logprobs

from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
from sao_megatron.trajectory.types import Status

TURNS = 3
SETTINGS = EpisodeSettings(temperature=1.0, max_new_tokens=8, max_tokens=100, environment_retries=0, request_timeout=60)


class Sums:
    """What is sampled is a program: add these numbers to those before. Its answer is the sum, modulo the vocabulary."""

    name, vocab_size, stop_token_ids, max_turns, max_new_tokens = "sums", VOCAB, [], TURNS, 8

    def __init__(self, sandbox: Pool):
        self.sandbox = sandbox

    def environment(self, prompt: Prompt) -> _Sum:
        return _Sum(self.sandbox, prompt.data)


class _Sum:
    def __init__(self, sandbox: Pool, first: int):
        self.sandbox, self.first, self.turns, self.session = sandbox, first, 0, None

    async def reset(self) -> list[int]:
        self.session = await self.sandbox.open()
        await self.session.run(f"total = {self.first}")
        return [self.first]

    async def step(self, action: list[int]) -> Step:
        self.turns += 1
        result = await self.session.run(f"total += sum({action})\nprint(total % {VOCAB})")
        return Step([int(result.output)], done=self.turns == TURNS)

    async def close(self) -> None:
        await self.session.close()


# If this fails, episodes that run code at the same time get each other's answers, lose their variables, or are trained
# on other tokens than the engine and the sandbox have said.
async def test_code_of_a_real_engine_runs_in_the_sandbox(engine):
    async with engine.client() as client, Pool(Limits(), sessions=4, cells=2, warm=0, modules=[]) as sandbox:
        episodes = [run_episode(client, Sums(sandbox), Prompt(f"sums/{first}", first), SETTINGS, first)
                    for first in range(8)]
        for first, trajectory in enumerate(await asyncio.gather(*episodes)):
            assert trajectory.status is Status.COMPLETED, trajectory.info
            tokens, actions = trajectory.tokens, trajectory.action_mask
            totals = np.cumsum(np.where(actions, tokens, 0)) + first
            answers = np.flatnonzero(~actions)[1:]
            assert len(answers) == TURNS and (tokens[answers] == totals[answers] % VOCAB).all()
            assert trajectory.rollout_logprobs[actions] == pytest.approx(
                np.array(hf_logprobs(engine.model, tokens.tolist()))[actions[1:]], abs=1e-4)
        assert sandbox.open_sessions == 0
