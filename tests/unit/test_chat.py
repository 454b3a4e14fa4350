"""Chats over real models' templates, played as episodes: what the engine was sent, against the template itself."""
import asyncio
from types import SimpleNamespace

import chat_folder
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.errors import UserError
from sao_megatron.rollout.chat import Chat, ChatTemplate, normal
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Status

ADD = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}}
SETTINGS = EpisodeSettings(temperature=1.0, max_new_tokens=2000, max_tokens=50_000, environment_retries=0,
                           request_timeout=1)
ODD_STOP = {"chatml": ("<|endoftext|>", "<|im_end|>"), "qwen3": ("<|endoftext|>", "<|im_end|>"),
            "glm45": ("<|endoftext|>", ""), "llama31": ("<|eom_id|>", "<|eot_id|>"), "forgetful": ("", "")}
"""A stop token that the template never writes, and what it writes there."""
THINKS = {"qwen3", "glm45", "forgetful"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return {name: ChatTemplate.load(chat_folder.save(tmp_path_factory.mktemp(name), name))
            for name in chat_folder.STOPS}


class Turn(SimpleNamespace):
    """What the model says (`kind`, `text`), how it samples it, and what comes next (a user's or tools' `answers`)."""


words = st.text("ab 4é<\n\"{", min_size=1, max_size=8).map(lambda text: f"the{text}word")
turns = st.builds(Turn, kind=st.sampled_from(["plain", "thought", "call"]), text=words, canonical=st.booleans(),
                  stop=st.sampled_from(["usual", "usual", "odd"]), answers=st.lists(words, min_size=1, max_size=2))


class Script:
    """A task, its environment and its engine in one: plays `turns` over a template and notes every request."""

    name, max_turns, max_new_tokens = "script", 100, None

    def __init__(self, name, template, turns):
        self.template_name, self.template, self.turns, self.turn = name, template, turns, -1
        self.tools = None if name == "forgetful" else [ADD]
        self.vocab_size, self.stop_token_ids = template.vocab_size, template.stop_token_ids
        self.chat = Chat(template, [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}], self.tools)
        self.requests, self.said, self.full, self.rewritten = [], [], [], []

    def environment(self, prompt):
        return self

    async def reset(self):
        return self.chat.prompt()

    async def step(self, action):
        turn, reply = self.turns[self.turn], self.chat.reply(action)
        assert bool(reply.get("tool_calls")) == (turn.kind == "call" and self.tools is not None)
        role = "tool" if reply.get("tool_calls") else "user"
        more = self.chat.add([{"role": role, "content": answer} for answer in turn.answers])
        self.rewritten.append(more.context is not None)
        return Step(more.observation, context=more.context, done=self.turn + 1 == len(self.turns))

    async def generate(self, input_ids, *, max_new_tokens, temperature, stop_token_ids):
        self.turn += 1
        self.requests.append(list(input_ids))
        self.full.append(self.template.text(self.chat.messages, self.tools))
        tokens = self.sample(self.turns[self.turn])
        finish = "stop" if tokens[-1] in stop_token_ids else "abort"
        return SimpleNamespace(tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[0] * len(tokens), finish=finish)

    def sample(self, turn):
        template, text = self.template, self.model_words(turn)
        if turn.canonical:
            tokens = template.encode(text)
        else:  # other white space, other tokens for the same text
            text = f"{text} \n" if self.template_name == "llama31" else f"\n {text} "
            half = len(text) // 2
            tokens = template.encode(text[:half]) + template.encode(text[half:])
        self.said.append(text)
        stop = self.usual_stop(turn) if turn.stop != "odd" else ODD_STOP[self.template_name][0]
        return tokens + template.encode(stop)

    def usual_stop(self, turn):
        if self.template_name == "glm45":
            return "<|observation|>" if turn.kind == "call" else "<|user|>"
        return self.template.turn_end.strip()

    def model_words(self, turn):
        """What a model says that follows its template: what this writes for such a turn."""
        thought = "<think>\nhmm\n</think>\n\n" if turn.kind != "plain" and self.template_name in THINKS else ""
        message = {"role": "assistant", "content": thought + turn.text * (turn.kind != "call")}
        if turn.kind == "call" and self.tools:
            message["tool_calls"] = [{"type": "function", "function": {
                "name": "add", "arguments": {"a": 4, "b": turn.text}}}]
        before = self.full[-1]
        after = self.template.text([*self.chat.messages, message], self.tools, prompt=False)
        return after[len(before):].removesuffix(self.template.turn_end) if after.startswith(before) else (
            message["content"].removeprefix("<think>\n"))


def play(name, template, turns):
    script = Script(name, template, turns)
    return script, asyncio.run(run_episode(script, script, Prompt("p"), SETTINGS, 0))


def squeezed(text):
    return "".join(text.split())


def check(name, template, turns):
    script, trajectory = play(name, template, turns)
    assert trajectory.status is Status.COMPLETED, trajectory.info
    odd, usual = ODD_STOP[name]

    def told(ids):
        text = squeezed(template.tokenizer.decode(ids))
        return text.replace(odd, usual) if odd else text
    start, exact, segments, action_starts = 0, True, iter(trajectory.segments[1:].tolist()), []
    for k, request in enumerate(script.requests):
        if k and script.rewritten[k - 1]:
            start, exact = next(segments), True
            # nothing is given up for a template that would have gone on from what was sampled
            context = told([*script.requests[k - 1], *template.encode(script.said[k - 1])])
            assert not squeezed(script.full[k]).startswith(context)
        end = start + len(request)
        assert trajectory.tokens[start:end].tolist() == request  # the concatenation is what the engine saw
        assert trajectory.action_mask[end]
        assert told(request) == squeezed(script.full[k])
        if exact:
            assert request == template.encode(script.full[k])
        exact &= turns[k].canonical and turns[k].stop == "usual"
        action_starts.append(end)
    assert next(segments, None) is None
    assert (trajectory.turns[action_starts] == list(range(len(turns)))).all()
    return script


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", chat_folder.STOPS)
def test_property_chats_are_token_exact(templates, name, data):
    """Fails if a context that the engine samples from is not what was sampled before it and, in every other respect,
    what the model's template says; or if a trajectory is cut into segments that need not be."""
    drawn = data.draw(st.lists(turns, min_size=1, max_size=4))
    for turn in drawn:
        if not ODD_STOP[name][0]:
            turn.stop = "usual"
    check(name, templates[name], drawn)


@pytest.mark.parametrize("name, kind, rewritten", [
    ("chatml", "plain", False), ("chatml", "call", False), ("llama31", "plain", False), ("llama31", "call", False),
    ("qwen3", "plain", True), ("qwen3", "thought", True), ("qwen3", "call", False), ("glm45", "plain", False),
    ("glm45", "thought", True), ("glm45", "call", False), ("forgetful", "thought", True)])
def test_what_each_template_rewrites(templates, name, kind, rewritten):
    """Fails if a template's own habit is not seen: the thinking that Qwen3 and GLM-4.5 drop when a user speaks again
    (Qwen3 an empty one too), and keep while tools answer."""
    turn = Turn(kind=kind, text="word", canonical=True, stop="usual", answers=["fine"])
    script = check(name, templates[name], [turn, turn])
    assert script.rewritten[0] is rewritten


def chat_of(template, *messages, tools=None):
    chat = Chat(template, messages or [{"role": "user", "content": "hi"}], tools)
    return chat, chat.prompt()


# If this fails, a turn that a limit cut is left open in the next context, so that the user speaks in the model's name.
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama31", "glm45"])
def test_a_cut_turn_is_closed(templates, name):
    template = templates[name]
    chat, prompt = chat_of(template)
    action = template.encode("\n<think></think>\nit is" if name == "glm45" else "it is")
    chat.reply(action)
    more = chat.add([{"role": "user", "content": "go on"}])
    assert more.context is None
    assert prompt + action + more.observation == template.encode(template.text(chat.messages, None))


# If this fails, a model without thinking sees in training what its template never shows it: the empty thoughts of
# earlier turns.
@pytest.mark.parametrize("role", ["user", "tool"])
def test_template_options(tmp_path, role):
    template = ChatTemplate.load(chat_folder.save(tmp_path, "qwen3"), enable_thinking=False)
    chat, prompt = chat_of(template)
    assert template.decode(prompt).endswith("<think>\n\n</think>\n\n")
    chat.reply(template.encode("it is<|im_end|>"))
    more = chat.add([{"role": role, "content": "go on"}])
    assert more.context == template.encode(template.text(chat.messages, None))
    assert template.decode(more.context).count("<think>") == 1


# If this fails, a call that the model formats in its own way costs a segment a turn, or is formatted anew.
def test_a_call_in_the_models_own_format(templates):
    template = templates["qwen3"]
    chat, prompt = chat_of(template, tools=[ADD])
    action = template.encode('<tool_call>\n{"arguments": {"b":"x", "a":1}, "name":"add"}\n</tool_call><|im_end|>')
    assert chat.reply(action)["tool_calls"][0]["function"] == {"name": "add", "arguments": {"b": "x", "a": 1}}
    more = chat.add([{"role": "tool", "content": "2"}])
    assert more.context is None and template.decode(more.observation).startswith("\n<|im_start|>user\n<tool_response>")


# If this fails, an unreadable call, or one of a tool that does not exist, is lost from what the agent is told.
@pytest.mark.parametrize("call", ['{"name": "add", "arguments"', '{"name": "sub", "arguments": {}}', '[1]',
                                  '{"name": "add", "arguments": [1]}'])
def test_calls_that_are_none(templates, call):
    template = templates["qwen3"]
    chat, _ = chat_of(template, tools=[ADD])
    text = f"I call <tool_call>\n{call}\n</tool_call>"
    assert chat.reply(template.encode(text + "<|im_end|>")) == {"role": "assistant", "content": text}


# If this fails, a message that a client sends back is taken for another one, or reaches the template half read.
def test_normal_messages():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None}
    assert normal(sent) == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normal({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}
    for wrong in ({"content": "x"}, {"role": "user", "content": [{"type": "image_url"}]},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]}):
        with pytest.raises(ValueError, match="message|arguments"):
            normal(wrong)


# If this fails, a model that cannot chat is found out in a running job.
def test_folders_that_cannot_chat(tmp_path, templates):
    with pytest.raises(UserError, match="a chat needs a tokenizer"):
        ChatTemplate.load(None)
    folder = chat_folder.save(tmp_path, "chatml")
    with pytest.raises(UserError, match="set the task's option tool_parser to one of SGLang's"):
        ChatTemplate.load(folder, tool_parser="nonsense").reply([1, 2], [ADD])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate.load(folder)
