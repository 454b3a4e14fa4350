"""Faults planted into short runs of the real trainer (test_planted_faults.py); writes the alarms that each raised."""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from fixed_lag import FixedLag
import numpy as np

from sao_megatron import config
from sao_megatron.telemetry.alarms import Alarms

SMALL = ["algorithm.critic_only_steps=2", "evaluation.episodes=15", "alarms.mismatch=0.001"]
"""The limit of float32; the default is bfloat16's."""


def raised(recipe: str, start: dict | None, steps: int, lag: int = 0, overrides=(), plant=lambda run: None) -> tuple:
    """(the run, the alarms in the order in which they rang)."""
    settings = config.load(recipe, [*SMALL, f"steps={steps}", *overrides])
    run, alarms, rung = FixedLag(settings, lag, start), Alarms(settings.alarms, lag), []
    train = run.trainer.train_step

    def watched(trajectories, version, update_policy):
        step = train(trajectories, version, update_policy)
        rung.extend(sentence.partition(" ")[0] for sentence in alarms.check(step.metrics | {
            "reward/mean": float(np.mean([t.reward for t in trajectories]))}))
        return step
    run.trainer.train_step = watched
    plant(run)
    result = run.run(evaluate_every=10**6)
    return run, rung + (["failed"] if result["failed"] else [])


def dropout(run: FixedLag) -> None:
    """Megatron's default of 0.1 left on."""
    for layer in run.trainer.policy_chunks[0].decoder.layers:
        layer.hidden_dropout = 0.1


def stale_engine(run: FixedLag) -> None:
    """The engine says that it serves each version, but keeps the first weights."""
    load, first = run.sampler.load, run.start
    run.sampler.load = lambda weights, version: load(first, version)


def renamed_expert(run: FixedLag) -> None:
    """The engine ignores one expert's tensors, as SGLang does with names that it does not know."""
    load, first = run.sampler.load, run.start
    lost = {name: value for name, value in first.items() if ".layers.1." in name and "local_experts.0." in name}
    assert lost
    run.sampler.load = lambda weights, version: load(weights | lost, version)


def temperature(run: FixedLag) -> None:
    """The engine samples at 1.3, the learner takes log-probs at 1."""
    sample = run._sample
    run._sample = lambda weights, version, settings, prompts: sample(
        weights, version, replace(settings, temperature=1.3), prompts)


def shuffled(run: FixedLag) -> None:
    """Each trajectory's log-probs belong to other tokens of it."""
    sample, rng = run._sample, np.random.default_rng(0)

    def mixed(*arguments):
        trajectories = sample(*arguments)
        everything = np.concatenate([t.rollout_logprobs[t.action_mask] for t in trajectories])
        rng.shuffle(everything)
        parts = np.split(everything, np.cumsum([t.num_actions for t in trajectories])[:-1])
        for trajectory, part in zip(trajectories, parts, strict=True):
            trajectory.rollout_logprobs[trajectory.action_mask] = part
        return trajectories
    run._sample = mixed


def main(recipe: str, out: str) -> None:
    healthy, rung = raised(recipe, None, 300, lag=1)
    start = healthy._weights()  # a policy whose guesses differ in probability
    cases = {"healthy": rung, "healthy at lag 0": raised(recipe, start, 30)[1]}
    for fault in (dropout, temperature, shuffled):
        cases[fault.__name__] = raised(recipe, start, 8, plant=fault)[1]
    for fault in (stale_engine, renamed_expert):
        cases[fault.__name__] = raised(recipe, start, 20, plant=fault)[1]
    cases["learning rate"] = raised(recipe, healthy.start, 60, lag=1, overrides=["policy_optimizer.lr=0.03"])[1]
    Path(out).write_text(json.dumps(cases))


if __name__ == "__main__":
    main(*sys.argv[1:])
