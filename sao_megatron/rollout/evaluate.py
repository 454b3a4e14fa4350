"""Evaluation: a fixed set of prompts, sampled at temperature 1, never mixed into the training data."""
from __future__ import annotations

import asyncio

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.tasks.base import Task
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status


async def evaluate(config: RunConfig, task: Task, pool: EnginePool, episodes: int, name: str, version: int,
                   store: Store) -> float:
    """Play `episodes` evaluation prompts under weight `version`; record the result as `name` and return the solve rate.

    Episodes whose environment failed count neither as solved nor as played. Raises RunError if that were all of them.
    """
    settings = EpisodeSettings.of(config, temperature=1.0, rollouts_per_prompt=1, routing_replay=False)
    slots = asyncio.Semaphore(config.rollout.concurrency)

    async def play(seq, prompt):
        async with slots:
            with pool.seat() as client:
                return await run_episode(client, task, prompt, settings, seq)

    running = [asyncio.create_task(play(seq, prompt)) for seq, prompt in enumerate(task.evaluation_prompts(episodes))]
    try:
        played = await asyncio.gather(*running)
    finally:
        for episode in running:
            episode.cancel()
    scored = [trajectory for trajectory in played if trajectory.status is not Status.ERROR]
    if not scored:
        raise RunError(f"evaluation {name!r}: the environment of task {task.name} failed in all {episodes} episodes; "
                       f"the first: {played[0].info['error']}")
    solved = sum(bool(trajectory.info.get("solved")) for trajectory in scored)
    store.add_evaluation(name, version, len(scored), solved, sum(t.reward for t in scored) / len(scored))
    return solved / len(scored)
