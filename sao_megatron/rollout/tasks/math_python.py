"""Mathematics with a Python tool: questions with an answer, an interpreter that keeps its variables, math-verify.

Needs the package math-verify, which runs in the sandbox too: an answer can be made to keep it busy for ever.
"""
from __future__ import annotations

from pathlib import Path
from typing import Literal

from sao_megatron.rollout.chat import Chat, Message, normal
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.chat_task import ChatTask, fenced_code, next_turn
from sao_megatron.rollout.tasks.sources import PromptSource
from sao_megatron.sandbox.session import Sandbox, Session

PYTHON = {"type": "function", "function": {
    "name": "python", "description": "Run Python code in an interpreter that keeps its variables from call to call. "
                                     "Answers what the code prints and the value of its last expression.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "Python code."}},
                   "required": ["code"]}}}
SYSTEM = {
    "calls": "Solve the problem step by step. You can run Python code with the tool python. Give the final answer in "
             "\\boxed{}.",
    "blocks": "Solve the problem step by step. To run Python code, end your turn with it in a block between ```python "
              "and ```; you are then shown what it prints. Give the final answer in \\boxed{}.",
}
_START_JUDGE = """
import logging
logging.disable()  # it warns that it sets itself no time limit; the sandbox does
from math_verify import parse, verify
"""
_JUDGE = """
print(verify(parse({gold!r}, parsing_timeout=None), parse({answer!r}, parsing_timeout=None), timeout_seconds=None))
"""
JUDGE_SECONDS = 10.0


class MathPython(ChatTask):
    """Reward 1 for a final answer in \\boxed{} that equals the row's, else 0.

    `prompts` are rows with the fields `question` and `answer`; `held_out` of them, or the file `evaluation_prompts`,
    are for evaluation. `tools` "calls" are the chat template's own tool calls; "blocks" are ```python blocks in the
    text, for models whose template knows no tools. A turn with code is answered by its output, one without is the last;
    there are at most `calls` turns with code. `examples` are messages of solved questions (role and content), which
    come between the system prompt and the question.
    """

    name = "math_python"
    replayable = True

    def __init__(self, model_dir: str | Path | None, sandbox: Sandbox | None, prompts: str, question: str = "question",
                 answer: str = "answer", evaluation_prompts: str | None = None, held_out: int = 0, seed: int = 0,
                 tools: Literal["calls", "blocks"] = "calls", calls: int = 8, system: str | None = None,
                 examples: list[Message] | None = None, tool_parser: str | None = None,
                 chat_template: str | None = None):
        if tools not in SYSTEM:
            raise ValueError(f"tools={tools!r}: expected calls or blocks")
        super().__init__(model_dir, tool_parser, chat_template)
        if tools == "calls":
            self.check_calls(sandbox)
        self.sandbox, self.tools, self.max_turns = sandbox, tools, calls + 1
        system = SYSTEM[tools] if system is None else system
        self.before = [normal(message) for message in (
            *([{"role": "system", "content": system}] if system else []), *(examples or []))]
        self.question, self.answer = question, answer
        self.source = PromptSource(prompts, [question, answer], seed, held_out, evaluation_prompts)

    def prompt(self, index: int) -> Prompt:
        return self._prompt(*self.source.row(index))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(*named) for named in self.source.evaluation(count)]

    def _prompt(self, name: str, row: dict) -> Prompt:
        return Prompt(f"{self.name}/{name}", (str(row[self.question]), str(row[self.answer])))

    def environment(self, prompt: Prompt) -> _Problem:
        return _Problem(self, *prompt.data)

    def code_in(self, message: Message) -> list[str | None]:
        """The code that a turn wants run, in order; None for a call that is not one of the tool."""
        if self.tools == "blocks":
            code = fenced_code(message["content"])
            return [] if code is None else [code]
        found = []
        for call in message.get("tool_calls", []):
            code = call["function"]["arguments"].get("code")
            found.append(code if call["function"]["name"] == "python" and isinstance(code, str) else None)
        return found

    def answers(self, outputs: list[str]) -> list[Message]:
        """Messages that show the outputs of one turn's code."""
        if self.tools == "blocks":
            return [{"role": "user", "content": f"```output\n{output.rstrip()}\n```"} for output in outputs]
        return [{"role": "tool", "name": "python", "content": output} for output in outputs]


class _Problem:
    def __init__(self, task: MathPython, question: str, gold: str):
        self.task, self.gold = task, gold
        self.chat = Chat(task.template, [*task.before, {"role": "user", "content": question}],
                         [PYTHON] if task.tools == "calls" else None)
        self.session: Session | None = None
        self.calls = 0

    async def reset(self) -> list[int]:
        return self.chat.prompt()

    async def step(self, action: list[int]) -> Step:
        """Not done where the stop token is missing: a budget cut the turn off, so the episode is `truncated`."""
        message = self.chat.reply(action)
        if not self.task.ended(action):
            return Step(info={"solved": False, "calls": self.calls})
        if code := self.task.code_in(message):
            outputs = [await self._run(cell) for cell in code]
            return next_turn(self.chat.add(self.task.answers(outputs)), calls=self.calls)
        answer = last_boxed(message["content"])
        solved = answer is not None and await self._equal(answer)
        return Step(reward=float(solved), done=True,
                    info={"solved": solved, "calls": self.calls, "answered": answer is not None})

    async def _run(self, code: str | None) -> str:
        if code is None:
            return "There is one tool, python, with one argument: code, a string."
        if self.session is None:
            self.session = await self.task.sandbox.open()
        self.calls += 1
        return (await self.session.run(code)).text()

    async def _equal(self, answer: str) -> bool:
        """Whether math-verify holds them for equal, in an interpreter that the model has not used."""
        await self.close()  # so that no episode waits for a second place while it has one
        if answer.strip() == self.gold.strip():
            return True
        self.session = await self.task.sandbox.open()
        gold = last_boxed(self.gold) or self.gold
        ready = await self.session.run(_START_JUDGE)
        if ready.status != "ok":
            raise RuntimeError(f"the judge does not start in the sandbox (is math_verify among sandbox.modules?): "
                               f"{ready.text().strip()}")
        result = await self.session.run(_JUDGE.format(gold=f"${gold}$", answer=f"${answer}$"), JUDGE_SECONDS)
        return result.status == "ok" and result.output.strip() == "True"

    async def close(self) -> None:
        if self.session:
            session, self.session = self.session, None
            await session.close()


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{…} encloses, with braces that match; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None
