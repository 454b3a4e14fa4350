"""An agent of your own: it asks for a sum, says whether the answer is right, and lets the model try again.

It is an ordinary program over the openai client. The gateway records what it samples (docs/agents.md).
"""
from __future__ import annotations

import random
import re

from openai import AsyncOpenAI

from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Prompt, Step


class Arithmetic(AgentTask):
    """The right number at the first try has reward 1, at the second 1/2, and so on; 0 after `tries`."""

    name = "arithmetic"

    def __init__(self, model_dir, tries: int = 3, seed: int = 0, **options):
        super().__init__(model_dir, **options)
        self.tries, self.seed = tries, seed

    def prompt(self, index: int) -> Prompt:
        numbers = random.Random(f"{self.seed}/{index}")
        a, b = numbers.randint(1, 9), numbers.randint(1, 9)
        return Prompt(f"{self.name}/{a}+{b}", (a, b))

    async def agent(self, prompt: Prompt, base_url: str, api_key: str) -> Step:
        a, b = prompt.data
        messages = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for attempt in range(1, self.tries + 1):
                reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
                numbers = re.findall(r"\d+", reply.choices[0].message.content)
                if numbers[-1:] == [str(a + b)]:
                    return Step(reward=1 / attempt, info={"solved": True, "tries": attempt})
                messages += [reply.choices[0].message, {"role": "user", "content": "That is wrong. Try again."}]
        return Step(info={"solved": False, "tries": self.tries})
