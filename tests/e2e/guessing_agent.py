"""The demo's game, played by a program that knows nothing but OpenAI's API."""
from __future__ import annotations

import tempfile
from pathlib import Path

from openai import AsyncOpenAI

from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.guess_number import GuessNumber

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eot> ' if m.role == 'assistant' else ' ' }}{% endfor %}"


class GuessingAgent(AgentTask):
    """Its chat says what the game's tokens say: <bos>, a guess, higher, a guess …"""

    name = "guessing_agent"

    def __init__(self, model_dir: str | None = None):
        self.game = GuessNumber()
        with tempfile.TemporaryDirectory() as folder:  # a fresh model has no tokenizer
            self.game.save_tokenizer(folder)
            (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
            super().__init__(folder)

    def prompt(self, index: int) -> Prompt:
        return self.game.prompt(index)

    def demonstrations(self, count: int, seed: int):
        return self.game.demonstrations(count, seed)

    async def agent(self, prompt: Prompt, base_url: str, api_key: str) -> Step:
        messages = [{"role": "user", "content": "<bos>"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(self.game.max_turns):
                reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
                guess = reply.choices[0].message.content
                if guess == str(prompt.data):
                    return Step(reward=1.0, info={"solved": True})
                hint = "higher" if guess.isdigit() and int(guess) < prompt.data else "lower"
                messages += [reply.choices[0].message, {"role": "user", "content": hint}]
        return Step(info={"solved": False})
