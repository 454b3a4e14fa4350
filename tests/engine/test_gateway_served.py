"""The gateway on a real engine: an agent with the openai client, and its trajectory against Transformers."""
from __future__ import annotations

import asyncio
import json
import string
from pathlib import Path

import numpy as np
import openai
import pytest
from served import VOCAB, hf_logprobs
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Prompt
from sao_megatron.trajectory.types import Status

TEMPLATE = Path(__file__).parents[1] / "unit" / "chat_templates" / "chatml.jinja"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
SETTINGS = EpisodeSettings(temperature=0.8, max_new_tokens=40, max_tokens=1000, environment_retries=0,
                           request_timeout=60)


def save_tokenizer(folder: Path) -> Path:
    """A token per character, of as many as the test's model knows, with ChatML's template."""
    characters = list(string.ascii_lowercase + " \n?.,/_" + string.digits)
    unused = [f"<unused{index}>" for index in range(VOCAB - len(characters) - len(SPECIAL))]
    vocabulary = {word: index for index, word in enumerate([*characters, *SPECIAL, *unused])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *unused])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = TEMPLATE.read_text()
    wrapped.save_pretrained(folder)
    return folder


class Chatter(AgentTask):
    """Talks for four turns, asks for two second opinions at once and cuts one turn with stop strings."""

    name = "chatter"
    messages: list = []

    async def agent(self, prompt, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            async def ask(messages, **options):
                reply = await client.chat.completions.create(model="policy", messages=messages, **options)
                return reply.choices[0].message
            messages = [{"role": "user", "content": "hi"}]
            for turn in range(4):
                messages += [await ask(messages, max_tokens=30), {"role": "user", "content": f"more {turn}"}]
            await asyncio.gather(*(ask([{"role": "user", "content": text}]) for text in ("why", "how")))
            await ask([{"role": "user", "content": "stop"}], stop=list("abcdefgh"))
            self.messages = [*messages, await ask(messages)]
        return 1.0


@pytest.fixture
def task(tmp_path):
    return Chatter(save_tokenizer(tmp_path))


# If this fails, what an agent's turns are trained on is not what the engine sampled them from: tokens, log-probs or
# weight versions are of something else.
async def test_an_agent_on_a_real_engine(engine, task):
    async with engine.client() as client:
        trajectory = await run_episode(client, task, Prompt("p"), SETTINGS, 0)
    assert trajectory.status is Status.COMPLETED, json.dumps(trajectory.info)
    assert trajectory.info["turns"] == 8 and set(trajectory.action_versions.tolist()) == {engine.version}
    starts = trajectory.segments[1:]
    assert len(starts) == 3
    for tokens, mask, logprobs in zip(*(np.split(getattr(trajectory, name), starts)
                                        for name in ("tokens", "action_mask", "rollout_logprobs")), strict=True):
        expected = np.array(hf_logprobs(engine.model, tokens.tolist(), SETTINGS.temperature))[mask[1:]]
        assert logprobs[mask] == pytest.approx(expected, abs=1e-4)
    # The conversation itself, as the template writes it whole: no token of it was rewritten on the way.
    whole = task.template.text([dict(role=m["role"], content=m["content"]) if isinstance(m, dict) else
                                dict(role=m.role, content=m.content) for m in task.messages], None, prompt=False)
    mine = trajectory.tokens[starts[-1]:].tolist()
    assert mine == task.template.encode(whole)[:len(mine)] and trajectory.rewards[-1] == 1.0
