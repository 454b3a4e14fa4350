"""Guess the secret number from higher/lower hints: the smallest task in which acting well needs several turns.

`Levers` is the same game with other hints and rewards: find out which number pays, and keep naming it.

One token per number, so that a tiny fresh model learns it on a laptop. With 15 numbers and four turns, uniform guessing
solves 0.24 of the episodes (1 − (14/15)⁴) and binary search all of them.
"""
from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Literal

from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder

VOCAB_SIZE = 32
SPECIAL = ["<pad>", "<bos>", "<eot>", "higher", "lower", "win"]
"""Names of the first token ids; the numbers follow, the rest is unused."""
PAD, BOS, EOT, HIGHER, LOWER, WIN = range(len(SPECIAL))
FIRST_NUMBER = len(SPECIAL)


class GuessNumber:
    """The secret is in low..high; each of at most `turns` turns guesses one number.

    An action is the number's token and <eot> (action "number_eot"), or the number's token alone ("number"). The answer
    is the token `higher` (the secret is larger), `lower` or `win`. Reward 1 for finding the secret, `malformed_reward`
    for an action that is not a guess, which ends the episode, otherwise 0.
    """

    name = "guess_number"
    vocab_size = VOCAB_SIZE

    def __init__(self, low: int = 1, high: int = 15, turns: int = 4,
                 action: Literal["number_eot", "number"] = "number_eot", malformed_reward: float = 0.0, seed: int = 0,
                 learn_hints: bool = True):
        if not 0 <= low <= high < low + VOCAB_SIZE - FIRST_NUMBER:
            raise ValueError(f"low={low}, high={high}: expected 0 <= low <= high and at most "
                             f"{VOCAB_SIZE - FIRST_NUMBER} numbers")
        if turns < 1:
            raise ValueError(f"turns={turns}: expected at least 1")
        if action not in ("number_eot", "number"):
            raise ValueError(f"action={action!r}: expected number_eot or number")
        self.low, self.high, self.max_turns, self.seed = low, high, turns, seed
        self.malformed_reward, self.learn_hints = malformed_reward, learn_hints
        self.ending = [EOT] if action == "number_eot" else []
        self.stop_token_ids = self.ending
        self.max_new_tokens = 1 + len(self.ending)

    def token(self, number: int) -> int:
        return FIRST_NUMBER + number - self.low

    def verdict(self, guess: int, secret: int) -> int:
        """The answer's token id."""
        return WIN if guess == secret else HIGHER if secret > guess else LOWER

    def outcome(self, found: bool) -> tuple[float, bool]:
        """Reward of a turn, and whether it ends the game before its last turn."""
        return float(found), found

    def prompt(self, index: int) -> Prompt:
        return self._prompt(random.Random(f"{self.seed}/{index}").randint(self.low, self.high))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Every secret in rotation."""
        return [self._prompt(self.low + index % (self.high - self.low + 1)) for index in range(count)]

    def _prompt(self, secret: int) -> Prompt:
        return Prompt(f"{self.name}/{secret}", secret)

    def environment(self, prompt: Prompt) -> _Game:
        return _Game(self, prompt.data)

    def demonstrations(self, count: int, seed: int) -> Iterator[Trajectory]:
        """A player that guesses uniformly at random, with its true log-probs, as weight version 0.

        It shows the format and nothing of the strategy. With `learn_hints` the answers are learnt too (log-prob 0.0, a
        placeholder: supervised warm-up reads only the mask): predicting an answer from the guesses before it is the
        only way in which random play teaches what the answers mean, and it leaves the guesses uniform.
        """
        rng = random.Random(f"demonstrations/{seed}")
        for _ in range(count):
            yield self._demonstration(rng)

    def _demonstration(self, rng: random.Random) -> Trajectory:
        secret = rng.randint(self.low, self.high)
        prompt = self._prompt(secret)
        builder = TrajectoryBuilder([BOS], prompt.id, self.name)
        logprobs = [-math.log(self.high - self.low + 1)] + [0.0] * len(self.ending)
        for _ in range(self.max_turns):
            guess = rng.randint(self.low, self.high)
            builder.add_action([self.token(guess), *self.ending], logprobs, [0] * len(logprobs))
            reward, done = self.outcome(guess == secret)
            builder.add_reward(reward)
            answer = [self.verdict(guess, secret)]
            if self.learn_hints:
                builder.add_action(answer, [0.0], [0])
            builder.add_observation([] if self.learn_hints else answer)
            if done:
                break
        return builder.build(solved=guess == secret)

    def words(self) -> list[str]:
        """The token ids' names, from 0 on."""
        return SPECIAL + [str(number) for number in range(self.low, self.high + 1)]

    def save_tokenizer(self, folder) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        words = self.words()
        words += [f"<unused{index}>" for index in range(len(words), VOCAB_SIZE)]
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[PAD]))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], bos_token=SPECIAL[BOS],
                                eos_token=SPECIAL[EOT]).save_pretrained(folder)


class _Game:
    def __init__(self, task: GuessNumber, secret: int):
        self.task, self.secret, self.turns = task, secret, 0

    async def reset(self) -> list[int]:
        return [BOS]

    async def step(self, action: list[int]) -> Step:
        task = self.task
        self.turns += 1
        guess = action[0] - FIRST_NUMBER + task.low
        if not task.low <= guess <= task.high or action[1:] != task.ending:
            return Step(reward=task.malformed_reward, done=True, info={"solved": False, "malformed": True})
        found = guess == self.secret
        reward, done = task.outcome(found)
        return Step([task.verdict(guess, self.secret)], reward=reward, done=done or self.turns == task.max_turns,
                    info={"solved": found, "malformed": False})


class Levers(GuessNumber):
    """One of the levers low..high pays in every turn, the others never: find it, then stay with it.

    The answer is the token `win` or `nothing`; a turn that pays has reward 1/turns, so rewards come along the way and
    not only at the end. Solved where the last turn paid: uniform play solves 1/levers of the episodes, trying each
    lever once and keeping the one that pays solves all of them if there are as many turns as levers.
    """

    name = "levers"

    def __init__(self, low: int = 1, high: int = 5, turns: int = 5, **options):
        super().__init__(low, high, turns, **options)
        self.nothing = FIRST_NUMBER + high - low + 1
        if self.nothing >= VOCAB_SIZE:
            raise ValueError(f"low={low}, high={high}: expected at most {VOCAB_SIZE - FIRST_NUMBER - 1} levers")

    def verdict(self, guess: int, secret: int) -> int:
        return WIN if guess == secret else self.nothing

    def outcome(self, found: bool) -> tuple[float, bool]:
        return found / self.max_turns, False

    def words(self) -> list[str]:
        return [*super().words(), "nothing"]
