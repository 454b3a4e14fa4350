"""The learner's loop, run by every rank: lease a batch, train, mark it trained, publish the new weights.

A learner that finds a checkpoint goes on from it. The order within a step makes that exact wherever it is killed: the
trajectories are marked as trained before a checkpoint can hold weights that were trained on them, and a learner that
starts takes back what was marked after its checkpoint. So no trajectory is trained twice in weights that survive, and
none is lost.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron import config as run_config
from sao_megatron.checkpoints import Checkpoint, check_same_run
from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.heartbeat import Heart
from sao_megatron.learner import checkpoint
from sao_megatron.learner.bookkeeping import Clock, batch_metrics, replayed_share
from sao_megatron.learner.records import gather_records
from sao_megatron.learner.reporting import Reporter
from sao_megatron.learner.speed import Speed
from sao_megatron.learner.trainer import StepResult, Trainer
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.records import Recorded
from sao_megatron.trajectory.store import Store, within
from sao_megatron.trajectory.types import Trajectory, decode, encode
from sao_megatron.trajectory.versions import version_of
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher
from sao_megatron.weights.shards import save_hf

log = logging.getLogger("learner")
PAUSE = 5.0  # seconds between two looks at whether the run is still paused
LOOK = 1.0  # seconds between two looks at whether the weights are evaluated


def main(config: RunConfig, run_dir: Path, task) -> None:
    """Train one run from start to exported checkpoint. RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from the environment.

    `task` gives the demonstrations of the supervised warm-up.
    """
    runtime.initialize(config.parallel, config.seed, timeout_seconds=config.collective_timeout)
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
        self.store = Store(folder.store_path) if self.is_head else None
        self.checkpoint, self.generation = self._begin()
        self.first_step = self.checkpoint.step if self.checkpoint else 0
        self.updates = self.checkpoint.state()["updates"] if self.checkpoint else 0
        self.trainer = Trainer(config, hf_config,
                               None if self.checkpoint else hf.initial_weights(config, self.model_dir))
        self.publisher: Publisher | None = None
        self.saver: checkpoint.Saver | None = None
        self.heart = Heart(dist.get_rank())
        self.clock = Clock(lambda phase: self.heart.beat(f"{phase} of step {self.step}"))
        self.step = self.first_step
        self.speed = Speed(config, hf_config, self.trainer.preset, self.store)
        self.reporter = Reporter(config, folder, self.store, self.first_step) if self.is_head else None

    def _begin(self) -> tuple[Checkpoint | None, int]:
        """The checkpoint to go on from and this learner's generation, the same on every rank; fits the store to it."""
        message: list = [None]
        if self.is_head:
            self.folder.checkpoints.clean()
            latest = self.folder.checkpoints.latest()
            if latest:
                check_same_run(run_config.parse(latest.state()["config"], str(latest.path)), self.config)
                log.info("going on from step %d (%s)", latest.step, latest.path)
            generation = self.store.rewind(latest.step if latest else 0)
            if self.folder.export_path.exists():  # of fewer steps, or of a run that died just before its end
                self.folder.export_path.rename(self.folder.path / f"hf.{generation}")
            message = [(latest, generation)]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    @property
    def version(self) -> int:
        """Of the weights as they are."""
        return version_of(self.generation, self.updates)

    def warm_up(self, task) -> None:
        """Supervised steps on the task's demonstrations: they give a fresh model the format, not the skill."""
        section = self.config.warmup
        if not section.steps or self.checkpoint:
            return
        log.info("supervised warm-up: %d steps of %d demonstrations", section.steps, section.trajectories)
        episodes = list(task.demonstrations(section.steps * section.trajectories, self.config.seed))
        batches = [episodes[i:i + section.trajectories] for i in range(0, len(episodes), section.trajectories)]

        def report(step: int, loss: float, norm: float):
            self.heart.beat(f"warm-up step {step}")
            if self.is_head and (step % 10 == 0 or step + 1 == section.steps):
                log.info("warm-up step %d/%d: loss %.4f, gradient norm %.3f", step + 1, section.steps, loss, norm)
                self.store.set_state("warmup", {"step": step + 1, "steps": section.steps, "loss": loss})
        self.trainer.supervised(batches, section.lr, report)

    def run(self) -> None:
        """Publish the weights, then train, publish and save, and export at the end."""
        self.trainer.begin_reinforcement()
        if self.checkpoint:
            checkpoint.load(self.trainer, self.checkpoint)
        self.saver = checkpoint.Saver(self.trainer, self.folder.checkpoints, self.generation,
                                      self.checkpoint.step if self.checkpoint else -1)
        if self.config.mode == "train":
            self.publisher = Publisher(
                self.trainer.policy_shards, self._find_engines, self.config.engine.tp, self.vocab_size,
                self.config.publication, runtime.backend(), self.config.engine.start_timeout,
                self.folder.path / "publication", self.model_dir,
                unchanged=self.config.model.path is not None and not self.checkpoint and not self.config.warmup.steps)
            self._publish(self.first_step, verify=True)
        if self.is_head:
            self.speed.begin()
        self.clock.restart()
        if self._train():
            self.saver.finish()
            if self.is_head:
                self.store.set_state("finished", True)
            save_hf(self.trainer.policy_shards, self.folder.export_path, self.model_dir,
                    mtp=self.config.model.mtp == "keep")
        if self.publisher:
            self.publisher.close()
        if self.is_head:
            self.reporter.close()
            self.store.close()

    def _find_engines(self) -> list[str]:
        """The engines' URLs, for the publisher, which asks again and again while it waits for one: no hang, for that
        has a deadline of its own. None once told to end: the last one may be gone, and steps wait to be saved."""
        self.heart.beat(f"looking for engines at step {self.step}")
        return [] if self.store.get_state("stop") else self.folder.engine_urls()

    def _train(self) -> bool:
        """All steps. False if told to end before: then the steps so far are saved."""
        for step in range(self.first_step, self.config.total_steps):
            self.step = step
            if not self._step(step):
                self._save_before_the_end(step)
                return False
        return True

    @contextmanager
    def _saving(self, steps: int) -> Iterator[None]:
        """What engines or controller are to blame for, a RunError on every rank, takes no steps along."""
        try:
            yield
        except RunError:
            if steps > self.first_step:
                self._save_before_the_end(steps)
            raise

    def _save_before_the_end(self, steps: int) -> None:
        self.saver.finish()
        if self.config.checkpoint.every and self.saver.newest < steps:
            log.info("told to end: saving a checkpoint of step %d", steps)
            self._begin_to_save(steps)
        self.saver.finish()

    def _step(self, step: int) -> bool:
        """False, and nothing done, if told to end."""
        update_policy = step >= self.config.algorithm.critic_only_steps or not self.trainer.preset.has_critic
        with self.clock.phase("wait"), self._saving(step):
            trajectories = self._lease(step)
        if trajectories is None:
            return False
        version = self.version
        result = self.trainer.train_step(trajectories, version, update_policy, self.clock.phase)
        recorded = self._recorded(step, trajectories, result)
        metrics = result.metrics | batch_metrics(trajectories, version) | {
            "policy_updated": update_policy, "publication/paused": self.publisher.paused if self.publisher else 0.0}
        self.updates += update_policy
        machines = self.speed.machines()
        if self.is_head:
            if self.config.rollout.routing_replay:
                metrics["routing/replayed"] = replayed_share(trajectories)
            metrics |= machines | self.reporter.pacing() | self.speed.rates(
                self.clock.restart(), metrics, trajectories, result, update_policy)
            self.store.mark_trained(step, self.version, [t.id for t in trajectories], metrics, self.owner)
            self.reporter.step(step, version, metrics, result.statistics, recorded)
        if self.publisher:
            with self.clock.phase("publish"):
                if update_policy:
                    self._publish(step + 1)
                elif self.is_head:
                    self.store.set_published(self.version, step + 1)
        with self.clock.phase("checkpoint"):
            self._save(step + 1)
        return True

    def _recorded(self, step: int, trajectories: list[Trajectory], result: StepResult) -> list[Recorded]:
        """The step's token records on rank 0 (collective)."""
        section = self.config.tokens
        if not section.trajectories or step % section.every:
            return []
        return gather_records(result.batches, trajectories, section.trajectories, (self.config.seed, step))

    def _save(self, steps: int) -> None:
        """A checkpoint, if it is time for one; only after the store has recorded the step."""
        every = self.config.checkpoint.every
        if every and (steps % every == 0 or steps == self.config.total_steps):
            self._begin_to_save(steps)
        else:
            self.saver.advance()

    def _begin_to_save(self, steps: int) -> None:
        if self.is_head:
            self.reporter.settle()  # a learner that goes on from the checkpoint does not write these steps again
        self.saver.save(steps, self.updates)

    @property
    def owner(self) -> str:
        """Under which name this learner leases trajectories."""
        return f"learner-{self.generation}"

    def _lease(self, step: int) -> list[Trajectory] | None:
        """The next batch, the same on every rank; None if told to end. Rank 0 waits, and tells the others every few
        seconds. It alone has the recorded routing, which is dealt out when it is known who needs what of it."""
        deadline = time.monotonic() + self.config.rollout.starvation_timeout
        while True:
            leased: list[Trajectory] | None = []
            failure: str | None = None
            if self.is_head and self.store.get_state("stop"):
                leased = None
            elif self.is_head and self.folder.paused_path.exists():
                log.info("paused until %s is deleted: %s", self.folder.paused_path,
                         self.folder.paused_path.read_text().strip())
                deadline += PAUSE
                time.sleep(PAUSE)
            elif self.is_head and self._awaits_evaluation():
                deadline += LOOK
                time.sleep(LOOK)
            elif self.is_head:
                try:
                    leased = self._poll(step, deadline)
                except RunError as error:
                    failure = str(error)
            message = [leased and [encode(replace(one, routing=None)) for one in leased], failure]
            dist.broadcast_object_list(message, src=0)
            if message[1]:
                raise RunError(message[1])
            if message[0] is None:
                return None
            self.heart.beat(f"wait of step {step}")
            if message[0]:
                return leased if self.is_head else [decode(blob) for blob in message[0]]
            if self.publisher:
                self.publisher.publish(self.version)  # to engines that came back meanwhile

    def _awaits_evaluation(self) -> bool:
        """Whether the weights as they are must be evaluated before they may change (evaluation.pinned)."""
        section = self.config.evaluation
        if not (section.pinned and section.every and self.publisher and section.count):
            return False
        due = 0 < self.updates < self.config.steps and self.updates % section.every == 0
        return due and sum(row.name == within(self.updates) for row in self.store.evaluations()) < section.count

    def _poll(self, step: int, deadline: float, seconds: float = 10.0) -> list[Trajectory] | None:
        """Up to `seconds` of waiting for a full batch; [] if there is none yet, None if the store says to stop."""
        count, until = self.config.batch.trajectories, time.monotonic() + seconds
        while time.monotonic() < until:
            if self.store.get_state("stop"):
                return None
            if leased := self.store.lease(count, self.owner, self.version, self.config.rollout.max_token_lag,
                                          self.trainer.preset.rollouts_per_prompt, step,
                                          self.config.rollout.redundancy):
                return [self._checked(trajectory) for trajectory in leased]
            if self.publisher is None:
                raise RunError(f"the recorded trajectories are used up: step {step} needs {count}, the store holds "
                               f"{self.store.counts()}: ask for fewer steps")
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

    def _publish(self, steps: int, verify: bool = False) -> None:
        """`steps`: learner steps that the weights include; `verify`: whether or not it is time to."""
        with self._saving(steps):
            seconds = self.publisher.publish(self.version)
        if seconds is None:
            return
        every = self.config.publication.verify_every
        if every and (verify or self.updates % every == 0):
            difference = self.publisher.verify(self.version, self.trainer.score)
            log.info("version %d verified: engines' log-probs differ by %.1e nats a token", self.version, difference)
        if self.is_head:
            log.info("version %d published in %.2f s", self.version, seconds)
            self.store.set_published(self.version, steps)
