"""A run folder made of random numbers: as many trajectories as wanted, written by the recorder that a run uses."""
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import yaml

from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.records import Recorded, Recorder
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder

FATES = np.array(["kept", "dropped_low", "dropped_high"])
QUESTION = "How many of the numbers from 1 to {n} are divisible by {k}?\n"
THOUGHT = "Each multiple of {k} counts once, so I divide and round down.\n<tool>{n} // {k}</tool>"
RESULT = "\n[python] {answer}\n"
ANSWER = "There are {answer} such numbers: the largest is {k} times {answer}."


def make_run(folder: Path, steps: int, per_step: int, seed: int = 0) -> RunFolder:
    """`steps` × `per_step` trajectories of one or two turns, of two tasks."""
    rng, run = np.random.default_rng(seed), RunFolder(folder)
    folder.mkdir(parents=True)
    (folder / "model").mkdir()
    tokenizer = _tokenizer(folder / "model" / "tokenizer.json")
    run.config_path.write_text(yaml.safe_dump(
        {"name": folder.name, "runs_dir": str(folder.parent), "model": {"path": str(folder / "model")},
         "task": {"name": "random"}, "steps": steps}))
    recorder = Recorder(run.tokens_dir, 1000, folder / "model" / "tokenizer.json")
    with Store(run.store_path) as store:
        for step in range(steps):
            recorded = [_recorded(_trajectory(rng, step, tokenizer), rng, step, steps, index, per_step)
                        for index in range(per_step)]
            recorder.write(step, step, recorded)
            store.mark_trained(step, step + 1, [], _metrics(recorded, step), "nobody")
    return run


def _trajectory(rng: np.random.Generator, step: int, tokenizer) -> Trajectory:
    n, k = int(rng.integers(20, 900)), int(rng.integers(2, 12))
    task = "divisible" if rng.random() < 0.7 else "divisible_hard"

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text.format(n=n, k=k, answer=n // k)).ids
    builder = TrajectoryBuilder(ids(QUESTION), f"{task}/{n}-{k}", task)
    version = max(0, step - int(rng.integers(0, 4)))
    turns = [THOUGHT, RESULT, ANSWER] if rng.random() < 0.8 else [ANSWER]
    for text in turns:
        tokens = ids(text)
        if text is RESULT:
            builder.add_observation(tokens)
            continue
        versions = np.minimum(version + (np.arange(len(tokens)) > rng.integers(3, 60)), step)
        builder.add_action(tokens, (-rng.exponential(0.4, len(tokens))).tolist(), versions.tolist())
        version = int(versions[-1])
    builder.add_reward(float(rng.random() < 0.3 + 0.5 * math.tanh(step / 40)))
    return builder.build(Status.COMPLETED if rng.random() < 0.9 else Status.TRUNCATED)


def _recorded(t: Trajectory, rng: np.random.Generator, step: int, steps: int, index: int, per_step: int) -> Recorded:
    n, lag = t.num_actions, step - t.action_versions
    log_ratio = (rng.normal(0, 0.08, n) * (1 + lag) + rng.normal(0, 1.2, n) * (rng.random(n) < 0.03)).astype(np.float32)
    fate = np.where(log_ratio <= math.log(0.7), 1, np.where(log_ratio >= math.log(6.0), 2, 0))
    value = np.clip(0.4 + np.cumsum(rng.normal(0.01, 0.05, n)), 0, 1).astype(np.float32)
    returns = np.full(n, t.reward, np.float32)
    return Recorded(t, "worst" if index % 8 == 7 else "sample", {
        "policy_logprob": t.rollout_logprobs[t.action_mask] + log_ratio, "log_ratio": log_ratio, "fate": FATES[fate],
        "weight": np.exp(log_ratio) * (fate == 0), "advantage": returns - value, "value": value, "return": returns,
        "entropy": rng.exponential(0.5, n).astype(np.float32),
        "expert_load": rng.gamma(20, 0.05, n).astype(np.float32)})


def _metrics(recorded: list[Recorded], step: int) -> dict[str, float]:
    fate = np.concatenate([one.results["fate"] for one in recorded])
    weight = np.concatenate([one.results["weight"] for one in recorded])
    lag = np.concatenate([step - one.trajectory.action_versions for one in recorded])
    reward = float(np.mean([one.trajectory.reward for one in recorded]))
    return {"reward/mean": reward, "reward/solve_rate": reward, "mask/dropped_low": float(np.mean(fate == FATES[1])),
            "mask/dropped_high": float(np.mean(fate == FATES[2])), "mask/recovered": 0.0,
            "mask/effective_sample_size": float(weight.sum()**2 / (len(fate) * (weight**2).sum())),
            "mask/discarded_mass": float(1 - weight.mean()), "lag/mean": float(lag.mean()), "lag/max": int(lag.max()),
            "policy/entropy": float(np.mean(np.concatenate([one.results["entropy"] for one in recorded]))),
            "critic/loss": 0.25 * math.exp(-step / 30), "policy/grad_norm": 0.3 + 0.1 * math.sin(step),
            "critic/explained_variance": math.tanh(step / 30) * 0.8}


def _tokenizer(path: Path):
    """Byte-level BPE of the texts above, as a model's tokenizer.json has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([QUESTION, THOUGHT, RESULT, ANSWER] * 3, trainer)
    tokenizer.save(str(path))
    return tokenizer
