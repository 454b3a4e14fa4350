"""Any family of reasoning-gym: procedural questions with a scorer, one turn each (needs the package reasoning-gym)."""
from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym
from transformers import AutoTokenizer

from sao_megatron.errors import UserError
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Trajectory

EXAMPLES = 10**6
"""Seeds between the training questions and the solved examples of a few-shot prompt; evaluation questions lie there."""
SOLVED = 0.99
"""Some scorers give partial credit; from this score on an answer counts as right."""


class ReasoningGym:
    """`family` is a dataset's name (chain_sum …), `dataset_options` are that dataset's own settings.

    Training goes round `size` questions, of seeds seed … seed + size − 1; evaluation questions have the seeds after
    them. The prompt is the chat template's, or the question and a newline where the tokenizer has none. The answer is
    the decoded action, or what its last <answer> tag encloses; its score is the reward.

    With `shots` > 0 the prompt is plain text, for a base model: that many solved questions, a line each, then the
    question; a turn ends with its line. They are the same in every prompt and in neither set.
    """

    max_turns = 1
    max_new_tokens = None

    def __init__(self, model_dir: str | Path | None, family: str, size: int = 10_000, seed: int = 0, shots: int = 0,
                 **dataset_options):
        if model_dir is None:
            raise UserError("task reasoning_gym needs a tokenizer: give model.path a folder that has one")
        self.name = f"reasoning_gym/{family}"
        self.family, self.size, self.seed, self.dataset_options = family, size, seed, dataset_options
        self.dataset = self._dataset(size, seed)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {model_dir} has no eos_token: task reasoning_gym ends a turn with it")
        self.vocab_size = len(self.tokenizer)
        self.stop_token_ids = [self.tokenizer.eos_token_id]
        self.examples = ""
        if shots:
            self.stop_token_ids += self.tokenizer.encode("\n", add_special_tokens=False)[-1:]
            self.examples = "".join(f"{entry['question']} {entry['answer']}\n"
                                    for entry in self._dataset(shots, seed + size + EXAMPLES))

    def _dataset(self, size: int, seed: int):
        try:
            return reasoning_gym.create_dataset(self.family, size=size, seed=seed, **self.dataset_options)
        except (ValueError, TypeError, AssertionError) as error:  # unknown family; unknown option; refused value
            raise UserError(f"reasoning_gym family {self.family!r} with size={size}, seed={seed}, options "
                            f"{self.dataset_options}: {error}") from error

    def prompt(self, index: int) -> Prompt:
        index %= self.size
        return self._prompt(self.dataset[index], self.seed + index)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        start = self.seed + self.size
        dataset = self._dataset(count, start)
        return [self._prompt(dataset[index], start + index) for index in range(count)]

    def _prompt(self, entry: dict[str, Any], seed: int) -> Prompt:
        return Prompt(f"{self.name}/{seed}", entry)

    def environment(self, prompt: Prompt) -> _Question:
        return _Question(self, prompt.data)

    def demonstrations(self, count: int, seed: int) -> Iterable[Trajectory]:
        raise NotImplementedError("task reasoning_gym has no demonstrations: start from a pretrained model")

    def save_tokenizer(self, folder) -> None:
        self.tokenizer.save_pretrained(folder)


class _Question:
    def __init__(self, task: ReasoningGym, entry: dict[str, Any]):
        self.task, self.entry = task, entry

    async def reset(self) -> list[int]:
        tokenizer, question = self.task.tokenizer, self.entry["question"]
        if self.task.examples:
            return tokenizer(self.task.examples + question)["input_ids"]
        if tokenizer.chat_template is None:
            return tokenizer(question + "\n")["input_ids"]
        return tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                             return_dict=False)

    async def step(self, action: list[int]) -> Step:
        """Not done where the stop token is missing: a budget cut the answer off, so the episode is `truncated`."""
        text = self.task.tokenizer.decode(action, skip_special_tokens=True)
        score = float(self.task.dataset.score_answer(answer_in(text), self.entry))
        return Step(reward=score, done=action[-1] in self.task.stop_token_ids,
                    info={"solved": score >= SOLVED, "score": score})


def answer_in(text: str) -> str:
    """The last <answer>…</answer>, or all of it; without surrounding space."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (tagged[-1] if tagged else text).strip()
