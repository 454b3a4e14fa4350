"""What tasks that talk through a model's chat template have in common."""
from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sao_megatron.rollout.chat import ChatTemplate, Continuation
from sao_megatron.rollout.tasks.base import Step
from sao_megatron.sandbox.session import Sandbox
from sao_megatron.trajectory.types import Trajectory

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class ChatTask:
    """`tool_parser` is SGLang's name of the model's format of calls; None finds it by the template. `chat_template` is
    a .jinja file in place of the model's own template, for a model that has none, or none with tools."""

    max_new_tokens = None

    def __init__(self, model_dir: str | Path | None, tool_parser: str | None = None,
                 chat_template: str | None = None):
        self.template = ChatTemplate.load(model_dir, tool_parser, chat_template)
        self.vocab_size = self.template.vocab_size
        self.stop_token_ids = self.template.stop_token_ids

    def check_calls(self, sandbox: Sandbox | None) -> None:
        """Raises UserError where the template knows no tool calls. Not in the learner, which has no sandbox: it must
        not import SGLang, whose parsers read the calls."""
        if sandbox is not None:
            _ = self.template.tool_parser.name

    def ended(self, action: list[int]) -> bool:
        """Whether the model has ended its turn, and no budget has."""
        return action[-1] in self.stop_token_ids

    def demonstrations(self, count: int, seed: int) -> Iterable[Trajectory]:
        raise NotImplementedError(f"task {self.name} has no demonstrations: start from a pretrained model")

    def save_tokenizer(self, folder) -> None:
        self.template.tokenizer.save_pretrained(folder)


def next_turn(more: Continuation, **info) -> Step:
    """The environment's answer where the chat goes on."""
    return Step(more.observation, context=more.context, info={"solved": False} | info)


def fenced_code(text: str) -> str | None:
    """The last block of Python between ``` and ```."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else None
