"""One agent's episode: its chats, token-exact, in whatever order it asks.

An agent sends whole histories. One that begins with a chat that this session knows, up to the last reply that it gave,
goes on there from the very tokens that were sampled. Any other (the first request, an edited history, a second answer
to one question, a sub-agent) begins a chat of its own. Every chat is one or more segments of one trajectory, ordered
by their last replies, so that the outcome sits on the agent's last turn.

A turn counts when its reply is ready to be sent: one that the agent gave up (it hung up, the engine failed) leaves its
chat as it was.
"""
from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sao_megatron.rollout.chat import Chat, ChatTemplate
from sao_megatron.rollout.gateway.protocol import Reply, Request, RequestError
from sao_megatron.rollout.pool import Generator
from sao_megatron.rollout.sampling import sample_turn
from sao_megatron.trajectory.types import TrajectoryBuilder

if TYPE_CHECKING:
    from sao_megatron.rollout.episode import EpisodeSettings

PIECE = 32
"""Tokens that are sampled between two looks for a client's stop strings, and two chunks of a stream."""
Say = Callable[[str], Awaitable[None]]
"""Takes all words of a turn so far, of which none will change. Raises RequestError where nobody listens any more."""


class _Thread:
    """One chat and its tokens."""

    def __init__(self, chat: Chat, builder: TrajectoryBuilder):
        self.chat, self.builder = chat, builder
        self.busy = False
        self.turn = -1
        """Number of its last turn in the session."""


class Session:
    """`begin(tokens)` makes the builder of a segment."""

    def __init__(self, client: Generator, template: ChatTemplate, settings: EpisodeSettings, max_tokens: int,
                 max_turns: int, begin: Callable[[list[int]], TrajectoryBuilder]):
        self.client, self.template, self.settings, self.begin = client, template, settings, begin
        self.max_tokens, self.max_turns = max_tokens, max_turns
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.turns = 0
        self.spent = ""
        """Which budget of the run refused the last request or cut its turn, if one did: an agent that fails then may
        have failed for it."""
        self.failure: asyncio.Future = asyncio.get_running_loop().create_future()
        """Gets the RunError of an engine that failed, or whatever else ends the run."""
        self.requests: set[asyncio.Task] = set()
        """Being answered."""
        self._threads: list[_Thread] = []
        self._reserved = 0  # tokens that requests in flight may still add
        self._asked = 0

    def joined(self) -> TrajectoryBuilder:
        """All chats in the order of their last turns. Only where `turns` > 0."""
        first, *others = sorted((thread for thread in self._threads if thread.turn >= 0), key=lambda t: t.turn)
        for thread in others:
            first.builder.add_observation([])
            first.builder.add_segment(thread.builder)
        return first.builder

    async def complete(self, request: Request, say: Say | None = None) -> Reply:
        """Sample the answer. Raises RequestError where it is refused; any other exception is put in `failure` too."""
        if self._asked == self.max_turns:
            raise self._refusal(f"this episode had its {self.max_turns} turns", "turn_limit")
        self._asked += 1
        try:
            return await self._answer(request, say)
        except RequestError:
            raise
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise

    async def _answer(self, request: Request, say: Say | None) -> Reply:
        if request.tools:
            try:
                await asyncio.to_thread(self.template.tool_parser.check, request.tools)
            except (TypeError, ValueError) as error:
                raise RequestError(f"tools: {error}", "invalid_value", "tools") from None
        thread, chat, builder = self._continued(request)
        thread.busy = True
        try:
            return await self._sample(request, say, chat, builder, thread)
        finally:
            thread.busy = False

    def _refusal(self, message: str, code: str) -> RequestError:
        self.spent = message
        return RequestError(message, code)

    def _continued(self, request: Request) -> tuple[_Thread, Chat, TrajectoryBuilder]:
        """The thread to go on in, and its chat and tokens with the request's new messages, as copies."""
        try:
            if thread := self._known(request):
                chat, builder = copy.copy(thread.chat), thread.builder.fork()
                more = chat.add(request.messages[len(chat.messages):])
                builder.add_observation(more.observation)
                if more.context:
                    builder.add_segment(self.begin(more.context))
                return thread, chat, builder
            chat = Chat(self.template, request.messages, request.tools)
            builder = self.begin(chat.prompt())
        except (TemplateError, TypeError, ValueError) as error:  # templates index and concatenate what they are given
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        return _Thread(chat, builder), chat, builder

    def _known(self, request: Request) -> _Thread | None:
        """The idle thread with the longest history that the request's begins with."""
        fitting = [thread for thread in self._threads if not thread.busy and thread.chat.tools == request.tools
                   and thread.chat.messages == request.messages[:len(thread.chat.messages)]]
        return max(fitting, key=lambda thread: len(thread.chat.messages), default=None)

    async def _sample(self, request: Request, say: Say | None, chat: Chat, builder: TrajectoryBuilder,
                      thread: _Thread) -> Reply:
        prompt_tokens, held = len(builder.segment_tokens), len(builder.tokens)
        new = held - (len(thread.builder.tokens) if thread.turn >= 0 else 0)
        room = self.max_tokens - self._used() - new
        if room < 1:
            raise self._refusal(f"{prompt_tokens} tokens of context leave none of the episode's "
                                f"{self.max_tokens} to sample", "context_length_exceeded")
        budget = min(self.settings.max_new_tokens, room)
        mine = min(budget, request.limit or budget)
        self._reserved += new + mine
        try:
            # What is a call is known when the turn has ended.
            builder, action, words, stopped = await self._turn(builder, mine, request.stops,
                                                               None if request.tools else say)
        finally:
            self._reserved -= new + mine
        self.spent = f"a turn was cut after {budget} tokens" if not stopped and mine == budget else ""
        return self._commit(thread, chat, builder, Reply(
            self._message(chat, action, words), "stop" if stopped else "length", prompt_tokens, len(action)))

    def _used(self) -> int:
        return self._reserved + sum(len(thread.builder.tokens) for thread in self._threads)

    async def _turn(self, builder: TrajectoryBuilder, budget: int, stops: list[str], say: Say | None):
        """Returns (the builder with the turn, its tokens, its text where a stop string cut it, whether it ended)."""
        action: list[int] = []
        most = PIECE if stops or say else budget
        while len(action) < budget:
            twin = builder.fork()
            part, stopped = await sample_turn(self.client, twin, min(most, budget - len(action)),
                                              self.template.stop_token_ids, self.settings)
            if found := self._stop_in(action, part, stops):
                count, words = found
                builder.add_action(*(values[:count] for values in twin.last_action(len(part))))
                return builder, action + part[:count], words, True
            builder, action = twin, action + part
            if stopped:
                return builder, action, None, True
            if say:
                await say(self._settled(action, stops))
        return builder, action, None, False

    def _settled(self, action: list[int], stops: list[str]) -> str:
        """The words so far, without what more tokens may change: half a character, the beginning of a stop string."""
        text = self.template.words(action).rstrip("\ufffd")
        begun = max((length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])),
                    default=0)
        return text[:len(text) - begun]

    def _stop_in(self, action: list[int], part: list[int], stops: list[str]) -> tuple[int, str] | None:
        """(How many of `part` it takes to have said a stop string, the text before it)."""
        def said(count: int) -> list[int]:
            text = self.template.words(action + part[:count])
            return [text.find(stop) for stop in stops if stop in text]
        if not stops or not said(len(part)):
            return None
        count = next(count for count in range(1, len(part) + 1) if said(count))
        return count, self.template.words(action + part[:count])[:min(said(count))]

    def _message(self, chat: Chat, action: list[int], words: str | None) -> dict[str, Any]:
        message = chat.reply(action, words)
        for call in message.get("tool_calls", []):
            call["id"] = f"call_{secrets.token_hex(12)}"
        return message

    def _commit(self, thread: _Thread, chat: Chat, builder: TrajectoryBuilder, reply: Reply) -> Reply:
        thread.chat, thread.builder, thread.turn = chat, builder, self.turns
        if thread not in self._threads:
            self._threads.append(thread)
        self.turns += 1
        if reply.message.get("tool_calls"):
            return Reply(reply.message, "tool_calls", reply.prompt_tokens, reply.completion_tokens)
        return reply
