"""Evaluation: fixed sets of prompts, each sampled a few times, never mixed into the training data."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from math import comb
from statistics import fmean
from typing import NamedTuple

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.pool import EnginePool
from sao_megatron.rollout.tasks import load_task
from sao_megatron.rollout.tasks.base import Task
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, Trajectory

PRIORITY = -1
"""Behind every training episode in the engines' queues."""


class EvaluationSet(NamedTuple):
    name: str
    task: Task
    prompts: int
    samples: int
    weight: float = 1.0


def evaluation_sets(config: RunConfig, task: Task, model_dir, sandbox) -> list[EvaluationSet]:
    """The run's own task first, then `evaluation.sets`. Raises UserError as `load_task` does."""
    section = config.evaluation
    own = [EvaluationSet(task.name, task, section.episodes, section.samples)] if section.episodes else []
    return own + [EvaluationSet(name, load_task(one.task.name, one.task.options, model_dir, sandbox), one.episodes,
                                one.samples or section.samples, one.weight) for name, one in section.sets.items()]


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that k of the `samples` episodes of a prompt, drawn without replacement, hold a solved one:
    1 − C(samples − solved, k) / C(samples, k), the unbiased estimator of pass@k (Chen et al. 2021, §2.1)."""
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


async def evaluate(config: RunConfig, sets: list[EvaluationSet], pool: EnginePool, name: str, version: int,
                   store: Store) -> None:
    """Play all sets; record the results as `name`, under weight `version` (that with which it begins).

    Episodes whose environment failed count neither as solved nor as played. Raises RunError if those were all of a set.
    """
    slots = asyncio.Semaphore(config.rollout.concurrency)
    await _together([_evaluate_set(config, chosen, pool, slots, name, version, store) for chosen in sets])


async def _together(coroutines: list[Coroutine]) -> list:
    """What they return. The first error ends the others (asyncio.TaskGroup would wrap it up)."""
    running = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()


async def _evaluate_set(config: RunConfig, chosen: EvaluationSet, pool: EnginePool, slots: asyncio.Semaphore, name: str,
                        version: int, store: Store) -> None:
    settings = EpisodeSettings.of(config, temperature=config.evaluation.temperature, group=chosen.samples,
                                  routing_replay=False)
    began = time.monotonic()

    async def play(seq: int, prompt) -> Trajectory:
        async with slots:
            with pool.seat(lambda: PRIORITY, group=(chosen.name, seq // chosen.samples)) as client:
                return await run_episode(client, chosen.task, prompt, settings, seq)

    prompts = [prompt for prompt in chosen.task.evaluation_prompts(chosen.prompts) for _ in range(chosen.samples)]
    played = await _together([play(seq, prompt) for seq, prompt in enumerate(prompts)])
    scored = [trajectory for trajectory in played if trajectory.status is not Status.ERROR]
    if not scored:
        raise RunError(f"evaluation {name!r}: the environment of task {chosen.task.name} failed in all {len(played)} "
                       f"episodes; the first: {played[0].info['error']}")
    metrics = results(played, chosen.samples) | {"weight": chosen.weight, "seconds": time.monotonic() - began}
    store.add_evaluation(name, version, len(scored), sum(map(_solved, scored)), fmean(t.reward for t in scored),
                         chosen.name, metrics)


def results(played: list[Trajectory], samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 … samples, avg@samples, failed episodes, first and last version of the sampled tokens.

    Consecutive `samples` trajectories are of one prompt. A prompt of which fewer than k episodes have an outcome does
    not count for pass@k.
    """
    tallies = []
    for start in range(0, len(played), samples):
        scored = [t for t in played[start:start + samples] if t.status is not Status.ERROR]
        tallies.append((len(scored), sum(map(_solved, scored))))
    metrics = {f"avg@{samples}": fmean(solved / count for count, solved in tallies if count)}
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
        if rates := [pass_at_k(count, solved, k) for count, solved in tallies if count >= k]:
            metrics[f"pass@{k}"] = fmean(rates)
    versions = [t.action_versions for t in played if t.status is not Status.ERROR]
    return metrics | {"errors": sum(t.status is Status.ERROR for t in played),
                      "first_version": int(min(v.min() for v in versions)),
                      "last_version": int(max(v.max() for v in versions))}


def _solved(trajectory: Trajectory) -> bool:
    return bool(trajectory.info.get("solved"))
