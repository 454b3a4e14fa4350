"""Multi-turn tool use from the Berkeley function calling leaderboard (needs the package bfcl-eval, --no-deps).

A person asks for several things in turn; each may need several calls to simulated services (a file system, a trading
desk, a car …) that keep state. Calls, services and the leaderboard's own checks run in the sandbox.
"""
from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sao_megatron.errors import UserError
from sao_megatron.rollout.chat import Chat, Message, normal
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.chat_task import ChatTask, next_turn
from sao_megatron.rollout.tasks.sources import PromptSource, read_rows
from sao_megatron.sandbox.session import Sandbox, Session

CATEGORIES = ("base", "miss_param", "miss_func", "long_context")
CALLS_A_TURN = 20
"""Turns of calls that one of the person's requests may take, as in the leaderboard."""
MORE_TOOLS = "I have added some functions that you can call. What about now?"
"""What the person says when functions come that had been missing."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}
_SERVICES = """
import contextlib, io
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker
entry = {entry!r}
said = []
def execute(who, calls):
    return checker.execute_multi_turn_func_call(
        calls, entry["initial_config"], entry["involved_classes"], who, entry["id"], {long_context!r})
def call(name, arguments):
    [answer], _ = execute("model", [f"{{name}}(**{{arguments!r}})"])
    said.append(answer)
    print(answer)
def right(turn, truth):
    with contextlib.redirect_stdout(io.StringIO()):
        answers, true = execute("truth", truth)
        _, ours = execute("model", [])
        return (checker.state_checker(ours, true)["valid"]
                and checker.response_checker(said, answers, turn)["valid"])
"""


class Bfcl(ChatTask):
    """Reward 1 where after each request the services are in the state that the solution leaves, and have answered what
    it was answered; the first request that ends otherwise ends the episode with 0. A request that cannot be fulfilled
    yet is not judged, and one that can be needs a call.

    `category` is base, miss_param (the person forgets to say something at first), miss_func (functions are missing at
    first; where they come, the prompt is a new segment) or long_context: 200 dialogues each, of which `held_out` are
    for evaluation; with `services` (GorillaFileSystem, MathAPI, MessageAPI, TicketAPI, TradingBot, TravelAPI,
    TwitterAPI, VehicleControlAPI) those that need no others. The prompt holds the tools' descriptions: 3,000 to 10,000
    tokens. `examples` are messages of fulfilled requests, in OpenAI's form with tool_calls, that come before the first.
    """

    replayable = True

    def __init__(self, model_dir: str | Path | None, sandbox: Sandbox | None,
                 category: Literal["base", "miss_param", "miss_func", "long_context"] = "base", held_out: int = 40,
                 seed: int = 0, services: list[str] | None = None, examples: list[Message] | None = None,
                 tool_parser: str | None = None, chat_template: str | None = None):
        if category not in CATEGORIES:
            raise ValueError(f"category={category!r}: expected one of {', '.join(CATEGORIES)}")
        super().__init__(model_dir, tool_parser, chat_template)
        self.check_calls(sandbox)
        self.name, self.sandbox, self.category = f"bfcl/{category}", sandbox, category
        rows = read_rows(_data(f"BFCL_v4_multi_turn_{category}.json"))
        chosen = [row for row in (rows[number] for number in range(len(rows)))
                  if services is None or set(row["involved_classes"]) <= set(services)]
        self.source = PromptSource(chosen, [], seed, held_out)
        self.solutions = _solutions(category)
        self.examples = [normal(message) for message in examples or []]
        self.max_turns = 10 * CALLS_A_TURN

    def prompt(self, index: int) -> Prompt:
        return self._prompt(self.source.row(index)[1])

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(row) for _, row in self.source.evaluation(count)]

    def _prompt(self, row: dict[str, Any]) -> Prompt:
        return Prompt(f"bfcl/{row['id']}", row)

    def environment(self, prompt: Prompt) -> _Dialogue:
        return _Dialogue(self, prompt.data, self.solutions[prompt.data["id"]])


class _Dialogue:
    def __init__(self, task: Bfcl, row: dict[str, Any], solution: list[list[str]]):
        self.task, self.row, self.solution = task, row, solution
        self.request, self.turns = 0, 0
        self.missing = {int(request): names for request, names in row.get("missed_function", {}).items()}
        self.chat = Chat(task.template, [*task.examples, *self._question()], self._tools())
        self.session: Session | None = None

    def _tools(self) -> list[dict[str, Any]]:
        """Those that the person offers with the present request."""
        missing = {name for request, names in self.missing.items() if request > self.request for name in names}
        missing.update(self.row.get("excluded_function", []))
        return [tool for service in self.row["involved_classes"] for tool in _tools(service)
                if tool["function"]["name"] not in missing]

    def _question(self) -> list[Message]:
        come = self.request in self.missing
        return [{"role": "user", "content": MORE_TOOLS}] if come else self.row["question"][self.request]

    async def reset(self) -> list[int]:
        self.session = await self.task.sandbox.open()
        entry = {key: self.row[key] for key in ("id", "initial_config", "involved_classes")}
        started = await self.session.run(_SERVICES.format(entry=entry,
                                                          long_context=self.task.category == "long_context"))
        if started.status != "ok":
            raise RuntimeError(f"the services of {self.row['id']} do not start: {started.text().strip()}")
        return self.chat.prompt()

    async def step(self, action: list[int]) -> Step:
        """Not done where the stop token is missing: a budget cut the turn off, so the episode is `truncated`."""
        message = self.chat.reply(action)
        self.turns += 1
        if not self.task.ended(action):
            return self._end(done=False)
        calls = message.get("tool_calls", [])
        if calls and self.turns <= CALLS_A_TURN:
            answers = [{"role": "tool", "name": call["function"]["name"], "content": await self._call(call["function"])}
                       for call in calls]
            return next_turn(self.chat.add(answers), requests_right=self.request)
        if self.solution[self.request] and (self.turns == 1 or not await self._right()):
            return self._end()
        self.request, self.turns = self.request + 1, 0
        if self.request == len(self.row["question"]):
            return Step(reward=1.0, done=True, info={"solved": True, "requests_right": self.request})
        return next_turn(self.chat.add(self._question(), self._tools()), requests_right=self.request)

    def _end(self, done: bool = True) -> Step:
        return Step(done=done, info={"solved": False, "requests_right": self.request})

    async def _call(self, function: dict[str, Any]) -> str:
        if function["name"] not in {tool["function"]["name"] for tool in self.chat.tools}:
            return f"Error during execution: there is no function {function['name']}"
        result = await self.session.run(f"call({function['name']!r}, {function['arguments']!r})")
        return result.text().strip()

    async def _right(self) -> bool:
        """Whether the services are where they should be. (Not where a call has ended them.)"""
        result = await self.session.run(f"right({self.request}, {self.solution[self.request]!r})")
        return result.status == "ok" and result.output.strip() == "True"

    async def close(self) -> None:
        if self.session:
            await self.session.close()


def _data(name: str) -> Path:
    """A file of the package."""
    folder = Path(importlib.util.find_spec("bfcl_eval").origin).parent / "data"
    if not (folder / name).is_file():
        raise UserError(f"the package bfcl-eval has no {name}: install bfcl-eval==2026.3.23 --no-deps")
    return folder / name


@cache
def _solutions(category: str) -> dict[str, list[list[str]]]:
    lines = _data(f"possible_answer/BFCL_v4_multi_turn_{category}.json").read_text().splitlines()
    return {row["id"]: row["ground_truth"] for row in map(json.loads, lines)}


@cache
def _tools(service: str) -> list[dict[str, Any]]:
    """A service's functions as OpenAI describes tools."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
    lines = _data(f"multi_turn_func_doc/{MULTI_TURN_FUNC_DOC_FILE_MAPPING[service]}").read_text().splitlines()
    return [{"type": "function", "function": {"name": row["name"], "description": row["description"],
                                              "parameters": _schema(row["parameters"])}}
            for row in map(json.loads, lines)]


def _schema(value: Any) -> Any:
    """With JSON Schema's names of types."""
    if isinstance(value, dict):
        return {key: _TYPES.get(inner, inner) if key == "type" and isinstance(inner, str) else _schema(inner)
                for key, inner in value.items()}
    return [_schema(inner) for inner in value] if isinstance(value, list) else value
