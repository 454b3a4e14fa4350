"""Text games for one player from textarena: many turns, rules in words (needs the package textarena)."""
from __future__ import annotations

from pathlib import Path

import textarena

from sao_megatron.errors import UserError
from sao_megatron.rollout.chat import Chat
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.chat_task import ChatTask, next_turn

EVALUATION_SEEDS = 10**6
"""Seeds of evaluation games; training games have those below, from `seed` on."""


class TextGame(ChatTask):
    """`game` is textarena's id, such as GuessTheNumber-v0, with its rules as messages; `options` are the game's own.

    Reward is the game's, at its end; solved from 1 on. A game of `turns` turns that has not ended is `truncated`.
    Games differ by their seed: training goes round `size` of them.
    """

    def __init__(self, model_dir: str | Path | None, game: str, size: int = 10_000, seed: int = 0, turns: int = 32,
                 options: dict | None = None, chat_template: str | None = None):
        super().__init__(model_dir, chat_template=chat_template)
        if turns < 1 or not 0 <= seed <= seed + size <= EVALUATION_SEEDS:
            raise ValueError(f"turns={turns}, seed={seed}, size={size}: expected turns from 1 on and seeds up to "
                             f"{EVALUATION_SEEDS}")
        self.name, self.game, self.options = f"textarena/{game}", game, options or {}
        self.size, self.seed, self.max_turns = size, seed, turns
        self.start(seed)

    def start(self, seed: int):
        """A game that waits for its first move, and its rules. Raises UserError where it cannot be played."""
        try:
            game = textarena.make(f"{self.game}-raw", **self.options)
            game.reset(num_players=1, seed=seed)
            return game, self.shown(game)
        except Exception as error:  # an unknown game, one for two, an unknown option, words that it would download
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"textarena's game {self.game!r} with options {self.options} cannot be played alone: "
                            f"{type(error).__name__}: {reason}") from None

    @staticmethod
    def shown(game) -> str:
        """What the game has said since the last time, without what the player said."""
        player, observations = game.get_observation()
        return "\n".join(text for speaker, text, _ in observations if speaker != player)

    def prompt(self, index: int) -> Prompt:
        return self._prompt(self.seed + index % self.size)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(EVALUATION_SEEDS + number) for number in range(count)]

    def _prompt(self, seed: int) -> Prompt:
        return Prompt(f"{self.name}/{seed}", seed)

    def environment(self, prompt: Prompt) -> _Game:
        return _Game(self, prompt.data)


class _Game:
    def __init__(self, task: TextGame, seed: int):
        self.task = task
        self.game, rules = task.start(seed)
        self.chat = Chat(task.template, [{"role": "user", "content": rules}])

    async def reset(self) -> list[int]:
        return self.chat.prompt()

    async def step(self, action: list[int]) -> Step:
        """Not done where the stop token is missing: a budget cut the turn off, so the episode is `truncated`."""
        message = self.chat.reply(action)
        if not self.task.ended(action):
            return Step(info={"solved": False})
        done, _ = self.game.step(message["content"])
        if not done:
            return next_turn(self.chat.add([{"role": "user", "content": self.task.shown(self.game)}]))
        rewards, _ = self.game.close()
        reward = float(rewards[0])
        return Step(reward=reward, done=True, info={"solved": reward >= 1, "score": reward})
