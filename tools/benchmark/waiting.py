"""A task whose environment makes the policy wait: the number game with long-tailed numbers of turns and seconds a turn.

Turns and seconds are lognormal. Public figures for the shapes: rollouts of reasoning RL with a median of 500 tokens and
a 99th percentile of 5,000 (σ = ln 10 / 2.33 = 0.99), lengths with a coefficient of variation of 1
(σ = √ln 2 = 0.83), as https://jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html gives them.
"""
from __future__ import annotations

import asyncio
import random

from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.guess_number import BOS, FIRST_NUMBER, GuessNumber

TURNS_SIGMA, SECONDS_SIGMA = 0.83, 0.99


class Waiting(GuessNumber):
    """`median_turns` turns and `median_seconds` a turn, with the shapes above; at most `most_turns`. Every turn is a
    guess, whatever came before, and the reward is the share of turns that found the number."""

    name = "waiting"

    def __init__(self, median_turns: float = 3.0, median_seconds: float = 0.3, most_turns: int = 24, seed: int = 0):
        super().__init__(turns=most_turns, action="number", seed=seed)
        self.median_turns, self.median_seconds = median_turns, median_seconds
        self.random = random.Random(f"waiting/{seed}")

    def environment(self, prompt: Prompt) -> _Waits:
        turns = round(self.median_turns * self.random.lognormvariate(0, TURNS_SIGMA))
        return _Waits(self, prompt.data, min(max(turns, 1), self.max_turns))


class _Waits:
    def __init__(self, task: Waiting, secret: int, turns: int):
        self.task, self.secret, self.turns = task, secret, turns
        self.left = turns

    async def reset(self) -> list[int]:
        return [BOS]

    async def step(self, action: list[int]) -> Step:
        task = self.task
        await asyncio.sleep(task.median_seconds * task.random.lognormvariate(0, SECONDS_SIGMA))
        self.left -= 1
        guess = action[0] - FIRST_NUMBER + task.low
        return Step([task.verdict(guess, self.secret)], reward=(guess == self.secret) / self.turns, done=self.left == 0,
                    info={"solved": guess == self.secret})
