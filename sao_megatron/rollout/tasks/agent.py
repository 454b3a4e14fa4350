"""Tasks whose agent owns its loop: it is given an OpenAI-compatible base URL and key, and returns what it achieved.

    class Ask(AgentTask):                              # task.name: path/to/ask.py:Ask
        name = "ask"

        def prompt(self, index):
            return Prompt(f"ask/{index}", {"a": index % 10})

        async def agent(self, prompt, base_url, api_key):
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                reply = await client.chat.completions.create(model="policy", messages=[…])
            return float(str(prompt.data["a"]) in reply.choices[0].message.content)

Every turn that the agent samples there is recorded with its tokens, log-probs and weight versions (rollout/gateway/).
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from sao_megatron.rollout.chat import ChatTemplate
from sao_megatron.rollout.gateway.server import Gateway
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Trajectory


class AgentTask:
    """A subclass has a `name` and the methods `prompt` and `agent`, and often `evaluation_prompts`.

    `host` and `port` are where the gateway listens and agents reach it (port 0: a free one). `tool_parser` is SGLang's
    name of the model's format of tool calls (found by the chat template otherwise), `template_options` are variables of
    the chat template, such as {enable_thinking: false}. An own constructor calls this one with `model_dir` at least.
    """

    name: str
    max_turns = 1000
    max_new_tokens = None
    max_seconds = 3600.0
    """Of one episode; an agent that is still at work then has a truncated trajectory."""

    def __init__(self, model_dir: str | Path | None, host: str = "127.0.0.1", port: int = 0,
                 tool_parser: str | None = None, template_options: dict | None = None):
        self.template = ChatTemplate.load(model_dir, tool_parser, **template_options or {})
        self.vocab_size, self.stop_token_ids = self.template.vocab_size, self.template.stop_token_ids
        self._address = (host, port)

    @cached_property
    def gateway(self) -> Gateway:
        return Gateway(*self._address)

    def prompt(self, index: int) -> Prompt:
        """The index-th training prompt of an endless, deterministic stream."""
        raise NotImplementedError(f"task {self.name} has no method prompt")

    async def agent(self, prompt: Prompt, base_url: str, api_key: str) -> float | Step:
        """Play one episode with any client of OpenAI's chat completions; any model name will do.

        Returns the outcome's reward (1 or more counts as solved), or a Step with `reward` and `info`. It runs in the
        controller's event loop: what blocks belongs in asyncio.to_thread. An exception makes the episode an `error`,
        which is tried again, unless a budget had refused its last request or cut its last turn: then the trajectory is
        `truncated`.
        """
        raise NotImplementedError(f"task {self.name} has no method agent")

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """A fixed set; here the last of a million training prompts, which no run reaches."""
        return [self.prompt(10**6 - 1 - index) for index in range(count)]

    def demonstrations(self, count: int, seed: int) -> Iterable[Trajectory]:
        raise NotImplementedError(f"task {self.name} has no demonstrations: start from a pretrained model")

    def save_tokenizer(self, folder) -> None:
        self.template.tokenizer.save_pretrained(folder)
