"""One run at a fixed lag, in one process and without an engine: step t trains on samples of the weights `lag` versions
before its own. The episodes, the task, the trainer and the statistics are those of `sao-megatron train`.

    python tools/fixed_lag.py configs/fixed-lag-cpu.yaml --lag 4 algorithm.preset=sao_recover seed=1

prints a line per evaluation and, with --json FILE, writes every step's metrics. With --run DIR it leaves the folder of
a run there, with token records, metrics and TensorBoard events, for `sao-megatron inspect DIR` and `tensorboard
--logdir DIR`. tools/sweep.py runs many of them.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import deque
from pathlib import Path

from sao_megatron.learner import runtime  # before Megatron
import numpy as np
import torch
import torch.distributed as dist

from sao_megatron import config as run_config
from sao_megatron.config import RunConfig
from sao_megatron.engine.process import free_port
from sao_megatron.errors import RunError, UserError
from sao_megatron.learner.bookkeeping import batch_metrics
from sao_megatron.learner.records import gather_records
from sao_megatron.learner.reporting import Reporter
from sao_megatron.learner.sampler import Sampler
from sao_megatron.learner.trainer import StepResult, Trainer
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks import load_task
from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, Trajectory
from sao_megatron.weights import hf

METRICS = {
    "dropped": "mask/dropped", "dropped_low": "mask/dropped_low", "dropped_high": "mask/dropped_high",
    "recovered": "mask/recovered", "ess": "mask/effective_sample_size", "m": "mask/discarded_mass",
    "entropy": "policy/entropy", "log_ratio_abs": "ratio/log_abs_mean", "grad_norm": "policy/grad_norm",
    "explained_variance": "critic/explained_variance"}
"""Names in a result, and the learner's metrics that they are."""


def initialize(config: RunConfig) -> None:
    """Be a process group of one rank; once in a process, since every group of Gloo's keeps its threads for ever."""
    if dist.is_initialized():
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    runtime.initialize(config.parallel, config.seed)


class FixedLag:
    def __init__(self, config: RunConfig, lag: int, start: dict | None = None, folder: RunFolder | None = None):
        """`start` is a policy state dict in place of the supervised warm-up; `folder` becomes that of a run."""
        if config.rollout.routing_replay:
            raise UserError("rollout.routing_replay: the sampler here is the learner's own model and needs no replay: "
                            "set it to false")
        initialize(config)
        self.config, self.lag = config, lag
        self.hf_config = hf.canonical(config.model.fresh)
        self.task = load_task(config.task.name, config.task.options, None)
        self.trainer = Trainer(config, self.hf_config, hf.FreshTensors(config.seed, config.model.init_std))
        if start is None:
            self._warm_up()
        else:
            self.trainer.policy_chunks[0].load_state_dict(start)
        self.start = self._weights()
        self.trainer.begin_reinforcement()
        self.sampler = Sampler(self.hf_config, getattr(torch, config.model.dtype), seed=1000 + config.seed)
        self.loop = asyncio.new_event_loop()
        self.version = self.next_seq = 0
        self.record = Record(config, folder, self.task) if folder else None
        self.history = deque([(0, self.start)], maxlen=lag + 1)

    def _weights(self) -> dict:
        return {name: value.clone() for name, value in self.trainer.policy_chunks[0].state_dict().items()
                if torch.is_tensor(value)}

    def _warm_up(self) -> None:
        section = self.config.warmup
        episodes = list(self.task.demonstrations(section.steps * section.trajectories, self.config.seed))
        self.trainer.supervised([episodes[i:i + section.trajectories]
                                 for i in range(0, len(episodes), section.trajectories)], section.lr, lambda *_: None)

    def run(self, evaluate_every: int = 25, report=lambda version, solved: None) -> dict:
        """Train to the end. A result: every step's METRICS, `evaluations` [[version, solve rate, malformed share], …].

        A run whose numbers overflow ends early and says so in `failed`.
        """
        begin = time.process_time()
        result = {name: [] for name in ("reward", "solved", "malformed", *METRICS, "evaluations")} | {"failed": None}
        critic_steps = self.config.algorithm.critic_only_steps if self.trainer.preset.has_critic else 0
        try:
            for step in range(critic_steps + self.config.steps):
                self._step(result, update_policy=step >= critic_steps)
                if self.version % evaluate_every == 0 and step >= critic_steps:
                    self._evaluate(result)
                    report(*result["evaluations"][-1][:2])
        except RunError as error:
            result["failed"] = str(error)
        return result | {"cpu_seconds": round(time.process_time() - begin, 1)}

    def _step(self, result: dict, update_policy: bool) -> None:
        if self.version == 0 and not result["evaluations"]:
            self._evaluate(result)
        version, weights = self.history[0]
        count = self.config.batch.trajectories
        trajectories = self._sample(weights, version, EpisodeSettings.of(self.config), self._prompts(count))
        step = self.trainer.train_step(trajectories, self.version, update_policy)
        if self.record:
            self.record.step(self.version, trajectories, step, update_policy)
        if not update_policy:
            return
        self.version += 1
        self.history.append((self.version, self._weights()))
        numbers = _outcomes(trajectories) | {name: step.metrics.get(key) for name, key in METRICS.items()}
        for name, value in numbers.items():
            result[name].append(None if value is None else round(float(value), 6))

    def _prompts(self, count: int) -> list:
        size = EpisodeSettings.of(self.config).group
        self.next_seq += count
        return [self.task.prompt(seq // size) for seq in range(self.next_seq - count, self.next_seq)]

    def _sample(self, weights: dict, version: int, settings: EpisodeSettings, prompts: list) -> list[Trajectory]:
        self.sampler.load(weights, version)

        async def play():
            return await asyncio.gather(*(run_episode(self.sampler, self.task, prompt, settings, seq)
                                          for seq, prompt in enumerate(prompts)))
        trajectories = self.loop.run_until_complete(play())
        if failed := [t for t in trajectories if t.status is Status.ERROR]:
            raise RuntimeError(f"the environment failed: {failed[0].info['traceback']}")
        return trajectories

    def _evaluate(self, result: dict) -> None:
        prompts = self.task.evaluation_prompts(self.config.evaluation.episodes)
        settings = EpisodeSettings.of(self.config, temperature=1.0, group=1)
        outcomes = _outcomes(self._sample(self._weights(), self.version, settings, prompts))
        result["evaluations"].append([self.version, round(outcomes["solved"], 4), round(outcomes["malformed"], 4)])


class Record:
    """The folder of a run, as the learner of `sao-megatron train` would leave it, but for the trajectories."""

    def __init__(self, config: RunConfig, folder: RunFolder, task):
        self.config, self.next = config, 0
        folder.path.mkdir(parents=True, exist_ok=True)
        run_config.save(config, folder.config_path)
        (folder.path / "model").mkdir(exist_ok=True)
        task.save_tokenizer(folder.path / "model")
        self.store = Store(folder.store_path)
        self.reporter = Reporter(config, folder, self.store, 0)

    def step(self, version: int, trajectories: list[Trajectory], result: StepResult, update_policy: bool) -> None:
        """`version` is the weights' before the step."""
        step, self.next = self.next, self.next + 1
        recorded = gather_records(result.batches, trajectories, self.config.tokens.trajectories,
                                  (self.config.seed, step))
        metrics = result.metrics | batch_metrics(trajectories, version) | {"policy_updated": update_policy}
        self.store.mark_trained(step, version + update_policy, [], metrics, "fixed_lag")
        self.reporter.step(step, version, metrics, result.statistics, recorded)

    def close(self) -> None:
        self.reporter.close()
        self.store.close()


def _outcomes(trajectories: list[Trajectory]) -> dict[str, float]:
    return {"reward": float(np.mean([t.reward for t in trajectories])),
            "solved": float(np.mean([bool(t.info.get("solved")) for t in trajectories])),
            "malformed": float(np.mean([bool(t.info.get("malformed")) for t in trajectories]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe with a fresh model and one rank, such as configs/fixed-lag-cpu.yaml")
    parser.add_argument("--lag", type=int, default=0, help="versions between the sampling and the trained weights")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--run", type=Path, metavar="DIR", help="leave a run's folder here, for `sao-megatron inspect`")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value, as in `sao-megatron train`")
    options = parser.parse_intermixed_args()
    named = [f"name={options.run.name}", f"runs_dir={options.run.parent}"] if options.run else []
    config = run_config.load(options.recipe, [*options.overrides, *named, f"rollout.max_lag={options.lag}"])
    run = FixedLag(config, options.lag, folder=RunFolder(options.run) if options.run else None)
    result = run.run(report=lambda version, solved: print(f"version {version}: solves {solved:.3f}", flush=True))
    if run.record:
        run.record.close()
    print(f"{result['failed'] or 'done'}; {result['cpu_seconds']:.0f} CPU seconds")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
