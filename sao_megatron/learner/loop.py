"""The learner's loop, run by every rank: lease a batch, train, mark it trained, publish the new weights."""
from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.learner.trainer import Trainer
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.tensorboard import StepWriter
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory, decode, encode
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher
from sao_megatron.weights.shards import save_hf

log = logging.getLogger("learner")


def main(config: RunConfig, run_dir: Path, task) -> None:
    """Train one run from start to exported checkpoint. RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from the environment.

    `task` gives the demonstrations of the supervised warm-up.
    """
    waits = config.engine.start_timeout + config.publication.timeout  # the longest that ranks wait for each other
    runtime.initialize(config.parallel, config.seed, timeout_seconds=waits)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {dist.get_rank()} %(message)s", force=True)
    learner = Learner(config, RunFolder(run_dir))
    if learner.is_head and config.model.path is None:
        task.save_tokenizer(learner.model_dir)
    learner.warm_up(task)
    learner.run()
    dist.destroy_process_group()


class Learner:
    def __init__(self, config: RunConfig, folder: RunFolder):
        self.config, self.folder = config, folder
        self.model_dir = folder.model_dir(config)
        self.is_head = dist.get_rank() == 0
        hf_config = hf.read_config(self.model_dir)
        self.vocab_size = hf_config["vocab_size"]
        self.trainer = Trainer(config, hf_config, hf.initial_weights(config, self.model_dir))
        self.version = 0
        self.clock = Clock()
        self._appended = 0  # action tokens in the store when the last step was recorded
        self.store = Store(folder.store_path) if self.is_head else None
        self.writer = StepWriter(folder.path / "tensorboard") if self.is_head else None

    def warm_up(self, task) -> None:
        """Supervised steps on the task's demonstrations: they give a fresh model the format, not the skill."""
        section = self.config.warmup
        if not section.steps:
            return
        log.info("supervised warm-up: %d steps of %d demonstrations", section.steps, section.trajectories)
        episodes = list(task.demonstrations(section.steps * section.trajectories, self.config.seed))
        batches = [episodes[i:i + section.trajectories] for i in range(0, len(episodes), section.trajectories)]

        def report(step: int, loss: float, norm: float):
            if self.is_head and (step % 10 == 0 or step + 1 == section.steps):
                log.info("warm-up step %d/%d: loss %.4f, gradient norm %.3f", step + 1, section.steps, loss, norm)
                self.store.set_state("warmup", {"step": step + 1, "steps": section.steps, "loss": loss})
        self.trainer.supervised(batches, section.lr, report)

    def run(self) -> None:
        """Publish version 0, then train, publish, and export at the end."""
        self.trainer.begin_reinforcement()
        self.publisher = Publisher(self.trainer.policy_shards, self.folder.engine_urls, self.config.engine.tp,
                                   self.vocab_size, self.config.publication, runtime.backend(),
                                   self.config.engine.start_timeout, self.folder.path / "publication", self.model_dir)
        self._publish(steps=0)
        if self.is_head:
            self.store.release()  # leases of an earlier learner of this run
        self.clock.restart()
        for step in range(self.config.total_steps):
            self._step(step)
        if self.is_head:
            self.store.set_state("learner_finished", True)
        save_hf(self.trainer.policy_shards, self.folder.path / "hf", self.model_dir)
        self.publisher.close()
        if self.is_head:
            self.writer.close()
            self.store.close()

    def _step(self, step: int) -> None:
        update_policy = step >= self.config.algorithm.critic_only_steps or not self.trainer.preset.has_critic
        with self.clock.phase("wait"):
            trajectories = self._lease()
        result = self.trainer.train_step(trajectories, self.version, update_policy, self.clock.phase)
        metrics = result.metrics | _batch_metrics(trajectories, self.version) | {"policy_updated": update_policy}
        self.version += update_policy
        if self.is_head:
            metrics |= self._rates(metrics)
            self.store.mark_trained(step, self.version, [t.id for t in trajectories], metrics)
            self.writer.write(step, metrics, result.statistics)
        with self.clock.phase("publish"):
            if update_policy:
                self._publish(steps=step + 1)
            elif self.is_head:
                self.store.set_published(self.version, step + 1)

    def _lease(self) -> list[Trajectory]:
        """The next batch, the same on every rank. Rank 0 waits for it and tells the others every few seconds."""
        deadline = time.monotonic() + self.config.rollout.starvation_timeout
        while True:
            message: list = [self._poll(deadline) if self.is_head else None]
            dist.broadcast_object_list(message, src=0)
            if message[0]:
                return [decode(blob) for blob in message[0]]
            self.publisher.publish(self.version)  # to engines that came back meanwhile

    def _poll(self, deadline: float, seconds: float = 10.0) -> list[bytes]:
        """Up to `seconds` of waiting for a full batch; [] if there is none yet."""
        count, until = self.config.batch.trajectories, time.monotonic() + seconds
        while time.monotonic() < until:
            if leased := self.store.lease(count, f"learner-{self.publisher.incarnation}", self.version,
                                          self.config.rollout.max_token_lag,
                                          self.trainer.preset.rollouts_per_prompt):
                return [encode(self._checked(trajectory)) for trajectory in leased]
            if time.monotonic() > deadline:
                raise RunError(f"no batch of {count} trajectories became ready within rollout.starvation_timeout="
                               f"{self.config.rollout.starvation_timeout:.0f} s (store: {self.store.counts()}): look "
                               f"at the controller's log")
            time.sleep(0.01)
        log.info("waiting for trajectories: %s of %d ready", self.store.counts().get("ready", 0), count)
        return []

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        trajectory.check_vocabulary(self.vocab_size)
        return trajectory

    def _publish(self, steps: int) -> None:
        seconds = self.publisher.publish(self.version)
        every = self.config.publication.verify_every
        if every and self.version % every == 0:
            difference = self.publisher.verify(self.version, self.trainer.score)
            log.info("version %d verified: engines' log-probs differ by %.1e nats a token", self.version, difference)
        if self.is_head:
            log.info("version %d published in %.2f s", self.version, seconds)
            self.store.set_published(self.version, steps)

    def _rates(self, metrics: dict) -> dict[str, float]:
        """Seconds by phase since the last step was recorded, and tokens per second of learner and engines."""
        appended = self.store.appended_tokens()
        seconds = self.clock.restart()
        sampled, self._appended = appended - self._appended, appended
        counts = self.store.counts()
        return {f"seconds/{name}": value for name, value in seconds.items()} | {
            "learner/tokens_per_second": metrics["tokens/total"] / seconds["step"],
            "engine/tokens_per_second": sampled / seconds["step"],
            "queue/ready": counts.get("ready", 0), "queue/in_flight": self.store.get_state("in_flight", 0)}


def _batch_metrics(trajectories: list[Trajectory], version: int) -> dict[str, float]:
    """What the batch is like before any gate: outcomes, sizes, lags (in versions, over action tokens)."""
    lags = np.concatenate([version - t.action_versions for t in trajectories])
    return {
        "reward/mean": float(np.mean([t.reward for t in trajectories])),
        "reward/solve_rate": float(np.mean([bool(t.info.get("solved")) for t in trajectories])),
        "lag/mean": float(lags.mean()), "lag/max": int(lags.max()),
        "trajectories/count": len(trajectories),
        "trajectories/mixed_version": sum(bool(np.ptp(t.action_versions)) for t in trajectories),
        "trajectories/truncated": sum(t.status == "truncated" for t in trajectories),
        "tokens/action": len(lags), "tokens/total": sum(len(t) for t in trajectories)}


PHASES = ("wait", "critic", "recompute", "policy", "publish")
"""`recompute` is the further forward pass that some presets pay for their behaviour policy."""


class Clock:
    """Seconds by phase between two steps."""

    def __init__(self):
        self._begin, self._spent = time.monotonic(), defaultdict(float)

    @contextmanager
    def phase(self, name: str):
        begin = time.monotonic()
        yield
        self._spent[name] += time.monotonic() - begin

    def restart(self) -> dict[str, float]:
        """Seconds of each phase, of the whole step and of the rest (`other`), since the last restart."""
        now = time.monotonic()
        seconds = {name: self._spent[name] for name in PHASES}
        seconds["step"] = now - self._begin
        seconds["other"] = seconds["step"] - sum(seconds[name] for name in PHASES)
        self._begin, self._spent = now, defaultdict(float)
        return seconds
