"""Chats, token in token out: what was sampled stays as it is, and a template renders only what comes after it.

Messages are OpenAI's dicts. `Chat` is one conversation and knows the exact tokens of its context. Its first context is
the template's rendering. After a sampled turn S in a context C, new messages N make the next context
C + S + suffix, where the suffix is what the template writes behind an assistant's words: the rest of the turn's end and
the rendering of N. The tokens of C and S are never decoded and encoded again.

That is right as long as the template says of C and S what it said before. Some rewrite history: Qwen3 and GLM-4.5 drop
the thinking of earlier turns when a user speaks again. So the whole chat is rendered at every turn, as text, and
compared: before the sampled turn with the text of C, behind it with the suffix, and in between with the words sampled,
up to white space (a template strips them, and formats calls its own way, which is no reason to sample from other
tokens). If it says anything else, the chat goes on in the template's new rendering: a new segment.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from sao_megatron.errors import UserError
from sao_megatron.rollout.tool_calls import ToolParser

Message = dict[str, Any]
MARK = "\u2042assistant\u2042"
"""Stands for an assistant's words where only what follows them is asked for."""
_SHORT: Message = {"role": "user", "content": "?"}
"""A chat before it."""


class Continuation(NamedTuple):
    """What follows a sampled turn: exactly one of the two, as a task's `Step` takes them."""

    observation: list[int]
    """Tokens behind the context so far."""
    context: list[int] | None
    """The whole new context, where the template has rewritten history."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template. Messages have passed `normal`."""

    tokenizer: Any
    stop_token_ids: list[int]
    """A turn ends when one of these is sampled."""
    tool_parser: ToolParser
    options: dict[str, Any]
    """Variables of the template, such as enable_thinking."""

    @classmethod
    def load(cls, model_dir: str | Path | None, tool_parser: str | None = None,
             chat_template: str | Path | None = None, **options) -> ChatTemplate:
        """Of an HF folder. Raises UserError where it has no tokenizer, no template or no stop token.

        `chat_template`: a .jinja file in place of its own.
        """
        from transformers import AutoTokenizer
        if model_dir is None:
            raise UserError("a chat needs a tokenizer: give model.path a folder that has one")
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if chat_template is not None:
            if not Path(chat_template).is_file():
                raise UserError(f"chat_template {chat_template} does not exist: give a .jinja file")
            tokenizer.chat_template = Path(chat_template).read_text()
        if not isinstance(tokenizer.chat_template, str):
            raise UserError(f"the tokenizer of {model_dir} has no chat template: put a chat_template.jinja beside it")
        stops = _stop_token_ids(Path(model_dir), tokenizer)
        return cls(tokenizer, stops, ToolParser(tokenizer.chat_template, tool_parser), options)

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def text(self, messages: list[Message], tools: list[dict] | None, prompt: bool = True) -> str:
        """The template's rendering; `prompt`: with the beginning of the assistant's next turn."""
        return self.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=prompt,
                                                  tokenize=False, **self.options)

    def try_text(self, messages: list[Message], tools: list[dict] | None, prompt: bool) -> str:
        """Like `text`, but "" where the template refuses them, as some do for a tool's answer without a call."""
        try:
            return self.text(messages, tools, prompt)
        except TemplateError:
            return ""

    @cached_property
    def turn_end(self) -> str:
        """What it writes at the end of an assistant's turn; "" where only the next turn's beginning ends it."""
        closed = self.try_text([_SHORT, {"role": "assistant", "content": MARK}], None, False)
        return closed.split(MARK)[-1] if MARK in closed else ""

    @cached_property
    def stop_texts(self) -> dict[int, str]:
        """Texts of the stop tokens."""
        return {token: self.decode([token]) for token in self.stop_token_ids}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def words(self, action: list[int]) -> str:
        """Text of a sampled turn without its stop token."""
        return self.decode(action[:-1] if action[-1] in self.stop_token_ids else action)

    def reply(self, action: list[int], tools: list[dict] | None, words: str | None = None) -> Message:
        """The assistant's message of a sampled turn; `words`: its text, where that ends before the tokens do."""
        words = self.words(action) if words is None else words
        content, calls = self.tool_parser.parse(words, tools) if tools else (words, [])
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        return message


def _stop_token_ids(model_dir: Path, tokenizer) -> list[int]:
    """The tokenizer's end of text, and those that the model's generation_config.json names (often more)."""
    path = model_dir / "generation_config.json"
    more = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    more = more if isinstance(more, list) else [more]
    found = {token for token in (tokenizer.eos_token_id, *more) if token is not None}
    if not found:
        raise UserError(f"{model_dir} names no stop token: give its tokenizer an eos_token, or its "
                        f"generation_config.json an eos_token_id")
    return sorted(found)


class Chat:
    """One conversation: `prompt` once, then `reply` and `add` in turn."""

    messages: list[Message]
    """All so far, in `normal` form."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[dict] | None = None):
        self.template, self.tools = template, tools
        self.messages = [normal(message) for message in messages]
        self._text = ""
        """The template's rendering of the context so far."""
        self._action: list[int] = []
        self._words = ""

    def prompt(self) -> list[int]:
        """The first context."""
        self._text = self.template.text(self.messages, self.tools)
        return self.template.encode(self._text)

    def reply(self, action: list[int], words: str | None = None) -> Message:
        """Take a sampled turn in; returns its message (`words` as in ChatTemplate.reply: what the message leaves out is
        then not said, and the next turn begins a new segment)."""
        self._action, self._words = action, self.template.words(action)
        self.messages.append(self.template.reply(action, self.tools, words))
        return self.messages[-1]

    def add(self, messages: list[Message], tools: list[dict] | None = None) -> Continuation:
        """What follows the sampled turn: the new messages, and the beginning of the assistant's next turn. `tools`:
        those from now on.

        Raises jinja2's TemplateError where the template refuses the messages, and has not taken them in then.
        """
        *earlier, reply = self.messages
        self.tools = self.tools if tools is None else tools
        new, before = [normal(message) for message in messages], self._text
        self._text = self.template.text([*self.messages, *new], self.tools)
        self.messages = [*self.messages, *new]
        suffix = next((s for s in self._suffixes(earlier, reply, new) if self._text.endswith(s)), None)
        if suffix is not None and self._text.startswith(before):
            if self._said(self._text[len(before):len(self._text) - len(suffix)], reply):
                return Continuation(self._behind_action(suffix), None)
        return Continuation([], self.template.encode(self._text))

    def _suffixes(self, earlier: list[Message], reply: Message, new: list[Message]) -> Iterator[str]:
        """Candidates for what the template writes behind the assistant's words, the cheapest first."""
        template, tools = self.template, self.tools
        for history in [_SHORT], earlier:
            marked = template.try_text([*history, {"role": "assistant", "content": MARK}, *new], tools, prompt=True)
            if marked.count(MARK) == 1:
                yield marked.split(MARK)[1]
        closed = template.try_text([*earlier, reply], tools, prompt=False)
        if closed and self._text.startswith(closed):
            yield template.turn_end + self._text[len(closed):]

    def _said(self, rendered: str, reply: Message) -> bool:
        """Whether the template's words for the turn are those sampled."""
        rendered, sampled = _squeezed(rendered), _squeezed(self._words)
        return rendered == sampled or ("tool_calls" in reply and rendered.startswith(_squeezed(reply["content"])))

    def _behind_action(self, suffix: str) -> list[int]:
        """Tokens of the suffix, without what the stop token that was sampled stands for."""
        template, last = self.template, self._action[-1]
        if last not in template.stop_token_ids:
            return template.encode(suffix)
        stop = template.stop_texts[last]
        ended = next((text for text in template.stop_texts.values()
                      if template.turn_end.startswith(text) and suffix.startswith(text)), None)
        # The turn is ended, be it by another of the stop tokens; or the next turn's beginning was its end.
        suffix = suffix.removeprefix(stop if ended is None else ended)
        # With the stop token before it, for tokenizers that treat the beginning of a text in a way of its own.
        tokens = template.encode(stop + suffix)
        return tokens[1:] if tokens[:1] == [last] else template.encode(suffix)


def normal(message: Message) -> Message:
    """The message as templates want it and as two of them are compared: no empty fields, text as one string, a call's
    arguments as a dict. Raises ValueError for what no template can render."""
    if not isinstance(message, dict):
        raise ValueError(f"a message is {message!r}: expected an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"a message's role is {role!r}: expected a string")
    result: Message = {"role": role, "content": _text_of(content)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key):
            result[key] = message[key]
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_normal_call(call) for call in calls]
    return result


def _normal_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": _arguments_of(call["function"].get("arguments"))}
    return {"type": "function", "function": function} | ({"id": call["id"]} if call.get("id") else {})


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ValueError("a message's content is neither text nor a list of text parts")


def _arguments_of(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"a tool call's arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"a tool call's arguments are {arguments!r}: expected a JSON object")
    return arguments


def _squeezed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())
