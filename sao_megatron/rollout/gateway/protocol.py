"""OpenAI's chat completions as JSON: what a request asks, and the bodies, chunks and errors that answer it.

Sampling is the run's: temperature, top_p, seed, penalties and whatever else shapes the distribution are read over, for
the learner's log-probs are those of its own temperature. What would change the answer's form and is not offered is
refused.
"""
from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sao_megatron.rollout.chat import Message, normal

_REFUSED = {"n": (None, 1), "logprobs": (None, False), "top_logprobs": (None, 0), "functions": (None, []),
            "function_call": (None, "none"), "tool_choice": (None, "auto", "none"), "parallel_tool_calls": (None, True),
            "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]), "audio": (None,)}
"""Parameters of which only these values are offered."""


class RequestError(Exception):
    """A request that is refused: HTTP status, message, and OpenAI's code and parameter."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status

    def body(self) -> dict[str, Any]:
        return error_body(self.message, "invalid_request_error", self.code, self.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Request:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    limit: int | None
    """Most tokens of the answer."""
    stops: list[str]
    stream: bool
    include_usage: bool
    model: str

    @classmethod
    def read(cls, body: Any) -> Request:
        """Raises RequestError."""
        if not isinstance(body, dict):
            raise RequestError("the body is not a JSON object")
        for name, offered in _REFUSED.items():
            if body.get(name) not in offered:
                raise RequestError(f"{name}={json.dumps(body[name])} is not offered here", "unsupported_value", name)
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        return cls(_messages(body), tools, _limit(body), _stops(body), bool(body.get("stream")),
                   bool((body.get("stream_options") or {}).get("include_usage")), str(body.get("model", "")))


def _messages(body: dict) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    try:
        return [normal(message) for message in messages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"messages: {error}", "invalid_value", "messages") from None


def _limit(body: dict) -> int | None:
    given = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(not isinstance(value, int) or value < 1 for value in given):
        raise RequestError("max_tokens must be a positive integer", "invalid_value", "max_tokens")
    return min(given, default=None)


def _stops(body: dict) -> list[str]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError("stop must be a string or a list of strings", "invalid_value", "stop")
    return stops


@dataclass(frozen=True)
class Reply:
    """One sampled turn, as the client gets it."""

    message: Message
    """In `normal` form, its calls with ids."""
    finish: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    completion_tokens: int

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens}

    def _message(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.message["content"]}
        if calls := self.message.get("tool_calls"):
            message |= {"content": message["content"] or None, "tool_calls": [_sent(call) for call in calls]}
        return message

    def body(self, model: str) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message(), "logprobs": None, "finish_reason": self.finish}
        return _envelope("chat.completion", model) | {"choices": [choice], "usage": self.usage()}

    def rest(self, sent: int) -> Iterator[dict[str, Any]]:
        """Deltas of a stream that has sent the first `sent` characters of the content."""
        message = self._message()
        if words := (message["content"] or "")[sent:]:
            yield {"content": words}
        for index, call in enumerate(message.get("tool_calls", [])):
            yield {"tool_calls": [{"index": index} | call]}


class Chunks:
    """A reply as the chunks of a stream: its words while they are sampled, then what is left of it."""

    def __init__(self, model: str):
        self._envelope = _envelope("chat.completion.chunk", model)
        self._role = {"role": "assistant"}
        """For the first chunk."""
        self._sent = 0

    def words(self, text: str) -> Iterator[dict[str, Any]]:
        """What was not sent yet of `text`, all of the turn's words so far."""
        if len(text) > self._sent:
            yield self._chunk({"content": text[self._sent:]})
            self._sent = len(text)

    def end(self, reply: Reply, include_usage: bool) -> Iterator[dict[str, Any]]:
        for delta in reply.rest(self._sent):
            yield self._chunk(delta)
        yield self._chunk({}, reply.finish)
        if include_usage:
            yield self._envelope | {"choices": [], "usage": reply.usage()}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": self._role | delta, "logprobs": None, "finish_reason": finish}
        self._role = {}
        return self._envelope | {"choices": [choice]}


def _sent(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    function = call["function"]
    return {"id": call["id"], "type": "function", "function": {
        "name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _envelope(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
