"""Agents with the unmodified openai client at the gateway, before an engine that says what it is told.

tests/engine/test_gateway_served.py has the same on a real engine.
"""
import asyncio
import functools
import socket
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import chat_folder
import openai
import pytest

from sao_megatron.config import LimitsSection
from sao_megatron.errors import EngineGone, RunError, UserError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks import load_task
from sao_megatron.rollout.tasks.agent import AgentTask
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Status

SETTINGS = EpisodeSettings(temperature=1.0, max_new_tokens=400, max_tokens=4000, environment_retries=1,
                           request_timeout=1)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: chat_folder.save(tmp_path_factory.mktemp(name), name) for name in ("chatml", "qwen3")}


class Engine:
    """Says one of `lines` after the other, the stop token included; an exception is raised instead."""

    def __init__(self, task, *lines):
        self.template, self.lines, self.requests, self.answers = task.template, list(lines), [], []
        self.waiting, self.holding, self.holds_again = 0, asyncio.Event(), False
        self.holding.set()

    async def generate(self, input_ids, *, max_new_tokens, temperature, stop_token_ids):
        self.waiting += 1
        try:
            await self.holding.wait()
        finally:
            self.waiting -= 1
        if self.holds_again:
            self.holding.clear()
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        tokens = line if isinstance(line, list) else self.template.encode(line + self.template.turn_end.strip())
        if len(tokens) > max_new_tokens:
            self.lines.insert(0, tokens[max_new_tokens:])
            tokens = tokens[:max_new_tokens]
        self.requests.append(list(input_ids))
        self.answers.append(tokens)
        return SimpleNamespace(tokens=tokens, logprobs=[-0.5] * len(tokens), versions=[3] * len(tokens),
                               finish="stop" if tokens[-1] in stop_token_ids else "length")


def play(folder, agent, *lines, seconds=60.0, turns=100, **settings):
    """Run `agent(client, …)` as an episode; returns (its trajectory, the engine)."""
    class Task(AgentTask):
        name, max_seconds, max_turns = "agents", seconds, turns

        async def agent(self, prompt, base_url, api_key):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                client.engine = engine
                return await agent(client)

    async def run():
        return await run_episode(engine, task, Prompt("p"), EpisodeSettings(**vars(SETTINGS) | settings), 0)
    task = Task(folder)
    engine = Engine(task, *lines)
    return asyncio.run(run()), engine


def ask(client, messages, **options):
    return client.chat.completions.create(model="any", messages=messages, **options)


def seen(trajectory, engine):
    """Every request is what lies before its answer in the trajectory."""
    starts = [*trajectory.segments.tolist(), len(trajectory)]
    segments = [trajectory.tokens[start:end].tolist() for start, end in zip(starts, starts[1:], strict=False)]
    return all(any(segment[:len(request) + len(answer)] == request + answer for segment in segments)
               for request, answer in zip(engine.requests, engine.answers, strict=True))


async def tool_user(client):
    """As OpenAI's documentation has it: append the message, answer its calls, ask again."""
    messages = [USER]
    reply = await ask(client, messages, tools=[ADD], temperature=0.2, seed=1)
    [call] = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, reply.choices[0].finish_reason) == (
        "add", '{"a": 1}', "tool_calls")
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    reply = await ask(client, messages, tools=[ADD])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("it is 2", "stop")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    return 1.0


# If this fails, an agent with tools is not recorded as it was sampled, or its outcome is lost.
@pytest.mark.parametrize("template", ["chatml", "qwen3"])
def test_tools_and_outcome(folders, template):
    trajectory, engine = play(folders[template], tool_user, "I add " + CALL, "it is 2")
    assert trajectory.status is Status.COMPLETED and trajectory.segments.tolist() == [0]
    assert trajectory.tokens.tolist() == engine.requests[1] + engine.answers[1]
    assert seen(trajectory, engine) and trajectory.num_actions == sum(map(len, engine.answers))
    assert trajectory.rewards[-1] == 1.0 and trajectory.reward == 1.0
    assert set(trajectory.action_versions) == {3} and trajectory.turns.max() == 1
    assert (trajectory.info["solved"], trajectory.info["turns"]) == (True, 2)


# If this fails, a streaming client gets another answer, or the usage it asked for is missing.
def test_streaming(folders):
    async def agent(client):
        text, calls, finish, usage = "", [], None, None
        async for chunk in await ask(client, [USER], tools=[ADD], stream=True, stream_options={"include_usage": True}):
            usage = usage or chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                finish = choice.finish_reason or finish
        assert (text, [call.function.name for call in calls], finish) == ("I add", ["add"], "tool_calls")
        assert usage.completion_tokens == len(client.engine.answers[0])
        async with client.chat.completions.stream(model="any", messages=[USER]) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "done"
        return Step(reward=0.5, info={"solved": False, "note": "streamed"})
    trajectory, _ = play(folders["chatml"], agent, "I add " + CALL, "done")
    assert (trajectory.reward, trajectory.info["note"]) == (0.5, "streamed")


# If this fails, a client that streams sees nothing until its turn ends, or other words than were sampled; or its chat
# does not go on from them.
@pytest.mark.parametrize("stop", [None, "END"])
def test_words_are_streamed_as_they_are_sampled(folders, stop):
    said = "\u00e4 word \u2042 " * 20

    async def agent(client):
        engine, words = client.engine, []
        engine.holds_again = True  # one piece at a time
        async for chunk in await ask(client, [USER], stream=True, stop=stop):
            words += [choice.delta.content for choice in chunk.choices if choice.delta.content]
            assert len(engine.answers) <= len(words) + 1  # a piece that ends in half a character adds none
            engine.holding.set()
        engine.holds_again = False
        assert "".join(words) == said and len(words) > 3
        engine.holding.set()
        await ask(client, [USER, {"role": "assistant", "content": said}, USER])
        return 1
    trajectory, engine = play(folders["chatml"], agent, said + (stop or ""), "fine", seconds=20)
    assert trajectory.status is Status.COMPLETED, trajectory.info
    assert len(trajectory.segments) == (2 if stop else 1)
    assert engine.template.decode(trajectory.tokens.tolist()).count(said.strip()) == (2 if stop else 1)


# If this fails, a turn that its client has left in the middle of a stream is trained on, or an engine that fails in the
# middle of one is taken for the end of the turn.
def test_streams_that_break_off(folders):
    async def leaves(client):
        client.engine.holds_again = True
        async for _ in (stream := await ask(client, [USER], stream=True)):
            await stream.close()
            break
        while client.engine.waiting:
            await asyncio.sleep(0.01)
        client.engine.holds_again = False
        client.engine.holding.set()
        client.engine.lines[:] = ["fine"]
        await ask(client, [USER])
        return 1
    trajectory, engine = play(folders["chatml"], leaves, "word " * 40)
    assert trajectory.info["turns"] == 1 and trajectory.tokens.tolist() == engine.requests[-1] + engine.answers[-1]

    ended = []

    async def meets_a_failure(client):
        client.engine.holds_again = True
        async for _ in await ask(client, [USER], stream=True):
            client.engine.lines[:] = [EngineGone("it died")]
            client.engine.holding.set()
        ended.append(True)
        return 1
    trajectory, _ = play(folders["chatml"], meets_a_failure, "word " * 40)
    assert trajectory.status is Status.ERROR and "it died" in trajectory.info["error"] and not ended


# If this fails, an edited or repeated history goes on from tokens that the client did not mean, or the outcome sits on
# a turn that was not the agent's last.
def test_histories_that_are_not_continued_are_segments(folders):
    async def agent(client):
        first = (await ask(client, [USER])).choices[0].message
        await ask(client, [USER])  # a second answer to the same question
        await ask(client, [USER, {"role": "assistant", "content": "edited"}, USER])
        await ask(client, [{"role": "system", "content": "another agent"}, USER])
        await ask(client, [USER, first, USER])  # goes on in the first
        return 1
    trajectory, engine = play(folders["chatml"], agent, "one", "two", "three", "four", "five")
    assert len(trajectory.segments) == 4 and seen(trajectory, engine)
    assert trajectory.tokens[trajectory.segments[-1]:].tolist() == engine.requests[4] + engine.answers[4]
    assert trajectory.rewards[-1] == 1.0
    assert sorted(set(trajectory.turns[trajectory.action_mask])) == [0, 1, 2, 3, 4]


# If this fails, thinking that the template drops from the history stays in what the model is trained to see.
def test_rewritten_history(folders):
    async def agent(client):
        messages = [USER]
        for _ in range(3):
            reply = await ask(client, messages)
            messages += [reply.choices[0].message.model_dump(), USER]
        return 0
    trajectory, engine = play(folders["qwen3"], agent, "<think>\na\n</think>\n\none", "two", "three")
    assert len(trajectory.segments) == 2 and seen(trajectory, engine)
    think = engine.template.encode("<think>")[0]
    assert (trajectory.tokens == think).sum() == 1 and think not in engine.requests[1]


# If this fails, a stop string is sent to the client, or tokens after it are trained.
@pytest.mark.parametrize("stop", ["END", ["nothing", "END"]])
def test_stop_strings(folders, stop):
    async def agent(client):
        first = await ask(client, [USER], stop=stop)
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("word " * 40 + "the ", "stop")
        await ask(client, [USER, first.choices[0].message, USER], stop=stop)
        return 1
    trajectory, engine = play(folders["chatml"], agent, "word " * 40 + "the END of it", "fine")
    said = engine.template.decode(trajectory.tokens[:trajectory.segments[1]].tolist())
    assert len(trajectory.segments) == 2 and said.endswith("the END")
    assert "END" not in engine.template.decode(engine.requests[-1])


# If this fails, a client's own limit is not kept, or a turn that it cuts cannot be continued.
def test_length(folders):
    async def agent(client):
        reply = await ask(client, [USER], max_tokens=3)
        assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 3)
        await ask(client, [USER, reply.choices[0].message, USER])
        return 1
    trajectory, engine = play(folders["chatml"], agent, "words and words")
    assert trajectory.segments.tolist() == [0] and trajectory.status is Status.COMPLETED
    assert engine.template.turn_end in engine.template.decode(trajectory.tokens.tolist()[len(engine.requests[0]) + 3:])


# If this fails, an agent that runs into the run's budget is an error, or is trained beyond it.
@pytest.mark.parametrize("budget, code", [(dict(max_tokens=70), "context_length_exceeded"),
                                          (dict(limits=LimitsSection(tokens=70)), "context_length_exceeded"),
                                          (dict(turns=3), "turn_limit"),
                                          (dict(limits=LimitsSection(turns=3)), "turn_limit")])
def test_spent_budgets_truncate(folders, budget, code):
    codes = []

    async def agent(client):
        messages = [USER]
        while True:
            try:
                messages += [(await ask(client, messages)).choices[0].message, USER]
            except openai.BadRequestError as error:
                codes.append(error.code)
                raise
    trajectory, engine = play(folders["chatml"], agent, *["word"] * 50, **budget)
    assert trajectory.status is Status.TRUNCATED and codes == [code] and len(trajectory) <= 70 + 130
    assert trajectory.reward == 0 and seen(trajectory, engine)


# If this fails, a client's mistake is not answered as OpenAI answers it.
def test_refusals(folders):
    async def agent(client):
        for options in (dict(n=2), dict(logprobs=True), dict(tool_choice="required"), dict(max_tokens=0),
                        dict(response_format={"type": "json_object"}), dict(stop=[1])):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, [USER], extra_body=options)
            assert caught.value.type == "invalid_request_error" and caught.value.param in options
        for messages in ([], [{"content": "no role"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
            with pytest.raises(openai.BadRequestError):
                await ask(client, messages)
        with pytest.raises(openai.BadRequestError, match="tools: "):
            await ask(client, [USER], tools=[{"function": "add"}])
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key="sk-other"), [USER])
        with pytest.raises(openai.NotFoundError):
            await client.models.list()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as session:
            async with session.post(f"{client.base_url}chat/completions", data="{") as response:
                assert response.status == 400 and "not JSON" in (await response.json())["error"]["message"]
        await ask(client, [USER])
        return 1
    assert play(folders["chatml"], agent, "word")[0].status is Status.COMPLETED


# If this fails, a failed agent is trained on as a zero reward, or one that a slow machine cut off is not trained.
def test_agents_that_fail(folders):
    async def raises(client):
        await ask(client, [USER])
        raise OSError("no disk")

    async def silent(client):
        return 1.0

    async def slow(client):
        await ask(client, [USER])
        await asyncio.sleep(60)

    async def never(client):
        await asyncio.sleep(60)

    async def nonsense(client):
        await ask(client, [USER])
        return "won"

    for agent, error in ((raises, "OSError: no disk"), (silent, "without having sampled a turn"),
                         (nonsense, "the agent returned 'won'")):
        trajectory, _ = play(folders["chatml"], agent, "one", "two")
        assert trajectory.status is Status.ERROR and error in trajectory.info["error"]
        assert trajectory.info["retries"] == 1 and "traceback" in trajectory.info
    assert play(folders["chatml"], slow, "one", limits=LimitsSection(seconds=0.4))[0].info["out_of_time"]
    trajectory, _ = play(folders["chatml"], slow, "one", seconds=0.5)
    assert trajectory.status is Status.TRUNCATED and "after 0.5 s" in trajectory.info["cut"] and trajectory.reward == 0
    assert play(folders["chatml"], never, seconds=0.2)[0].status is Status.ERROR


# If this fails, an agent's own failure is trained on as a zero reward because a turn before it had been cut.
def test_only_the_last_turns_budget_excuses_a_failure(folders):
    async def agent(client, finish):
        while (await ask(client, [USER])).choices[0].finish_reason != finish:
            pass
        raise OSError("no disk")
    for finish, status in (("length", Status.TRUNCATED), ("stop", Status.ERROR)):
        fails = functools.partial(agent, finish=finish)
        trajectory, _ = play(folders["chatml"], fails, *["word " * 60] * 2, max_new_tokens=20)
        assert trajectory.status is status and trajectory.info["turns"] == (1 if finish == "length" else 4)


# If this fails, an engine that answers nonsense is recorded as failed agents, a run with one waits for ever, or an
# episode that kills one engine after the other is tried again.
def test_engine_failure_ends_the_run(folders):
    async def agent(client):
        try:
            await ask(client, [USER])
        except openai.InternalServerError:
            await asyncio.sleep(60)
    with pytest.raises(RunError, match="it answers nonsense"):
        play(folders["chatml"], agent, RunError("it answers nonsense"))
    trajectory, engine = play(folders["chatml"], agent, *[EngineGone("it died")] * 2)  # the third under one request
    assert trajectory.status is Status.ERROR and trajectory.info["retries"] == 0 and len(engine.lines) == 1


# If this fails, the example of an agent of one's own does not do what it says.
def test_the_example_agent(folders):
    recipe = Path(__file__).parents[2] / "configs" / "agents" / "arithmetic.py"
    task = load_task(f"{recipe}:Arithmetic", {"tries": 2}, folders["chatml"])
    prompt = task.prompt(3)
    engine = Engine(task, "It is 99", f"It is {sum(prompt.data)}")
    trajectory = asyncio.run(run_episode(engine, task, prompt, SETTINGS, 0))
    assert (trajectory.reward, trajectory.info["solved"], trajectory.info["tries"]) == (0.5, True, 2)
    assert trajectory.prompt_id == task.prompt(3).id and trajectory.segments.tolist() == [0]
    with pytest.raises(UserError, match="attempts"):
        load_task(f"{recipe}:Arithmetic", {"attempts": 2}, folders["chatml"])


# If this fails, two controllers with one fixed port fail without a word about it.
def test_a_port_that_is_taken(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        task = AgentTask(folders["chatml"], port=taken.getsockname()[1])
        task.name = "agents"
        with pytest.raises(RunError, match="cannot listen at 127.0.0.1"):
            asyncio.run(run_episode(Engine(task), task, Prompt("p"), SETTINGS, 0))


# If this fails, a turn that its client never got is trained on, or blocks its chat.
def test_a_client_that_hangs_up(folders):
    async def agent(client):
        first = (await ask(client, [USER])).choices[0].message
        client.engine.holding.clear()
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.3), [USER, first, USER])
        while client.engine.waiting:  # until the gateway has seen it
            await asyncio.sleep(0.01)
        client.engine.holding.set()
        await ask(client, [USER, first, USER])
        return 1
    trajectory, engine = play(folders["chatml"], agent, "one", "two")
    assert trajectory.segments.tolist() == [0] and trajectory.tokens.tolist() == engine.requests[1] + engine.answers[1]


# If this fails, agents written with the blocking client or with several requests at once do not work.
def test_threads_and_parallel_requests(folders):
    async def agent(client):
        def block():
            with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as blocking:
                return ask(blocking, [USER]).choices[0].message.content
        assert await asyncio.to_thread(block) == "one"
        await asyncio.gather(*(ask(client, [{"role": "user", "content": f"question {i}"}]) for i in range(3)))
        return 1
    trajectory, engine = play(folders["chatml"], agent, "one", "two", "three", "four")
    assert len(trajectory.segments) == 4 and seen(trajectory, engine)
