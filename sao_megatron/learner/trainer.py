"""The learner's maths of one step: K critic updates, advantages, one policy update (DESIGN.md §4).

With λ_critic = 1 the critic's targets need no values, and the first critic update's own forward gives the values that
the policy's advantages need. A step is K critic passes and one policy pass, forward and backward, and nothing else;
presets whose behaviour policy is not the rollout pay one forward pass more, timed as the phase "recompute".
"""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from sao_megatron.learner import runtime  # noqa: F401  (before Megatron)
from megatron.core import parallel_state as ps

from sao_megatron.algorithm import advantage as adv
from sao_megatron.algorithm.gates import GATES
from sao_megatron.algorithm.objective import NegativeLogLikelihood, PolicyGradient
from sao_megatron.algorithm.presets import Preset, check_batch, resolve
from sao_megatron.config import AdamSection, RunConfig
from sao_megatron.errors import RunError
from sao_megatron.learner import model as models
from sao_megatron.learner.critic import Critic
from sao_megatron.learner.expert_load import ExpertLoad
from sao_megatron.learner.objectives import MiniBatch, objectives, spread_advantages, trajectory_advantages
from sao_megatron.learner.optimized import Optimized, wrap
from sao_megatron.learner.logprob import HeadOutput
from sao_megatron.learner.passes import (DeviceBatch, local_batches, local_micro_batches, policy_pass,
                                         reduce_statistics, reports, to_device, to_numpy)
from sao_megatron.learner.routing_replay import RoutingReplay
from sao_megatron.telemetry.statistics import Statistics, Tokens
from sao_megatron.trajectory.packing import MicroBatch, mini_batches, pack
from sao_megatron.trajectory.types import Trajectory
from sao_megatron.trajectory.versions import lag
from sao_megatron.weights.hf import TensorSource
from sao_megatron.weights.shards import ShardMap


@dataclass
class StepResult:
    metrics: dict[str, float]
    """Global scalars, the same on every rank."""
    statistics: Statistics
    """Global sums, the same on every rank."""
    batches: list[DeviceBatch] = field(default_factory=list)
    """This rank's micro-batches; `results` holds per-token tensors on the last pipeline stage."""


class Trainer:
    def __init__(self, config: RunConfig, hf_config: dict, source: TensorSource | None):
        """`source`: the policy's first weights; None leaves them unset, for a checkpoint to fill."""
        self.config, self.hf_config = config, hf_config
        self.dtype = getattr(torch, config.model.dtype)
        algorithm = config.algorithm.model_dump()
        self.preset: Preset = resolve(algorithm.pop("preset"), **algorithm)
        check_batch(self.preset, config.batch.trajectories, config.batch.mini_batches)
        self.policy_chunks = models.build(hf_config, config.parallel, self.dtype)
        self.policy_shards = ShardMap(self.policy_chunks, hf_config)
        if source is not None:
            self.policy_shards.load(source)
        self.replay = RoutingReplay(self.policy_chunks) if config.rollout.routing_replay else None
        self.expert_load = ExpertLoad(self.policy_chunks) if "num_experts" in hf_config else None
        self.policy_ddp = wrap(self.policy_chunks)
        self.policy: Optimized | None = None
        self.critic: Critic | None = None
        self.reference: list | None = None
        """The policy's starting weights, frozen, where the behaviour policy is the reference."""
        self.running_mean = adv.RunningMean()

    def begin_reinforcement(self) -> None:
        """Make the optimizers. The critic starts from `critic.path` or from the policy as it is, like the reference."""
        updates = self.config.steps * self.config.batch.mini_batches
        self.policy = Optimized(self.policy_ddp, self.config.policy_optimizer, updates)
        if self.preset.behaviour == "reference":
            self.reference = models.build(self.hf_config, self.config.parallel, self.dtype)
            for chunk, policy in zip(self.reference, self.policy_chunks, strict=True):
                chunk.requires_grad_(False).load_state_dict(policy.state_dict())
        if not self.preset.has_critic:
            return
        self.critic = Critic(self.config, self.hf_config, self.preset, self.config.total_steps)
        if self.config.critic.path is not None:
            self.critic.start_from_critic(self.config.critic.path)
        else:
            self.critic.start_from_policy(self.policy_chunks)

    def train_step(self, trajectories: list[Trajectory], version: int, update_policy: bool = True,
                   timer=None) -> StepResult:
        """One learner step on a global batch (the same list on every rank; only rank 0's need have their routing).
        `version` is the learner's."""
        minis = self._mini_batches(trajectories)
        batches = [batch for mini in minis for batch in mini.batches]
        statistics, metrics = Statistics(tuple(sorted({t.task for t in trajectories}))), {}
        with _phase(timer, "critic"):
            metrics |= self._advantages(batches, trajectories, statistics)
        if update_policy:
            if self.preset.behaviour != "rollout":
                with _phase(timer, "recompute"):
                    self._recompute(batches)
            with _phase(timer, "policy"):
                updates = [self._update_policy(mini, statistics, version) for mini in minis]
            metrics |= {"policy/grad_norm": float(np.mean([norm for norm, _ in updates])), "policy/lr": updates[-1][1]}
            if self.expert_load:
                metrics["experts/busiest"] = self.expert_load.busiest
        statistics = reduce_statistics(statistics)
        return StepResult(statistics.metrics() | metrics, statistics, batches)

    def _advantages(self, batches: list[DeviceBatch], trajectories: list[Trajectory],
                    statistics: Statistics) -> dict[str, float]:
        """Leave `advantages` [n] in each batch's results; returns metrics."""
        metrics = {}
        if self.preset.has_critic:
            metrics = self.critic.train(batches, statistics)
        else:
            advantages = trajectory_advantages(self.preset, trajectories, self.running_mean)
            spread_advantages(batches, trajectories, advantages)
            if self.preset.advantage == "preference":
                metrics["preference/ties"] = float((advantages == 0).sum()) / 2
        if self.config.algorithm.whiten:
            self._whiten(batches)
        return metrics

    @torch.no_grad()
    def _recompute(self, batches: list[DeviceBatch]) -> None:
        """Log-probs under the behaviour policy (the policy before the batch's first update, or the reference)."""
        outputs = policy_pass(self.reference or self.policy.ddp, batches, [NegativeLogLikelihood()] * len(batches),
                              self.config.algorithm.temperature, forward_only=True)
        for batch, output in zip(batches, outputs, strict=False):
            batch.results["behaviour_logprobs"] = output.logprobs

    def _update_policy(self, mini: MiniBatch, statistics: Statistics, version: int) -> tuple[float, float]:
        """One optimizer step; returns (gradient norm, learning rate)."""
        section = self.config.algorithm
        wanted = objectives(self.preset, section, mini)
        self.policy.zero_grad()
        outputs = self._forward_backward(mini, wanted)
        for batch, objective, output in zip(mini.batches, wanted, outputs, strict=False):
            _refuse_non_finite(batch, output.logprobs)
            tokens = objective.diagnostics()
            batch.results |= dict(logprobs=output.logprobs, entropy=output.entropy, tokens=tokens)
            if reports():
                statistics.add_tokens(_counted(batch, version, statistics.tasks))
                statistics.add(policy_loss=float(output.loss.detach()))
        return self.policy.step()

    def _forward_backward(self, mini: MiniBatch, wanted: list[PolicyGradient]) -> list[HeadOutput]:
        """The policy pass of an update, with the experts' load in the results where there are experts."""
        temperature = self.config.algorithm.temperature
        if self.expert_load is None:
            return policy_pass(self.policy.ddp, mini.batches, wanted, temperature)
        self.expert_load.begin(mini.batches)
        outputs = policy_pass(self.policy.ddp, mini.batches, wanted, temperature, around=self.expert_load.watch)
        self.expert_load.finish()
        return outputs

    def _whiten(self, batches: list[DeviceBatch]) -> None:
        """Zero mean and unit standard deviation over the action tokens of the global batch."""
        present = [batch for batch in batches if "advantages" in batch.results]
        if not present:
            return  # an earlier pipeline stage holds no advantages
        group = ps.get_data_parallel_group(with_context_parallel=True)
        whitened = adv.whitened([batch.results["advantages"] for batch in present],
                                lambda sums: dist.all_reduce(sums, group=group))
        for batch, advantages in zip(present, whitened, strict=True):
            batch.results["advantages"] = advantages

    def supervised(self, batches_of_trajectories, learning_rate: float, on_step) -> None:
        """Supervised warm-up: NLL of the action tokens, learning rate decaying linearly to 0, one batch a step."""
        steps = len(batches_of_trajectories)
        trained = Optimized(self.policy_ddp, AdamSection(lr=learning_rate, min_lr_ratio=0.0), steps)
        for step, trajectories in enumerate(batches_of_trajectories):
            batches = local_batches(trajectories, self.config)
            trained.zero_grad()
            outputs = policy_pass(trained.ddp, batches, [NegativeLogLikelihood()] * len(batches), 1.0)
            norm, _ = trained.step()
            statistics = Statistics()
            for output in outputs if reports() else ():
                statistics.add(policy_loss=float(output.loss.detach()))
            tokens = sum(t.num_actions for t in trajectories)
            on_step(step, reduce_statistics(statistics)["policy_loss"] / tokens, norm)

    @torch.no_grad()
    def score(self, trajectories: list[Trajectory], temperature: float = 1.0) -> list[np.ndarray]:
        """log π_θ of each trajectory's action tokens under the current policy, on every rank; float32 [n] each."""
        batches = self._on_device(local_micro_batches(trajectories, self.config), trajectories)
        objectives = [NegativeLogLikelihood() for _ in batches]
        outputs = policy_pass(self.policy_ddp, batches, objectives, temperature, forward_only=True)
        mine = {}
        for batch, output in zip(batches, outputs, strict=False):
            logprobs = to_numpy(batch.whole(output.logprobs))
            parts = np.split(logprobs, np.cumsum(batch.source.lengths)[:-1]) if len(batch.lengths) else []
            mine |= {t.id: part for t, part in zip(batch.source.trajectories, parts, strict=True)}
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        scores = {key: value for part in gathered for key, value in part.items()}
        return [scores[t.id] for t in trajectories]

    def _mini_batches(self, trajectories: list[Trajectory]) -> list[MiniBatch]:
        parts = mini_batches(trajectories, self.config.batch.mini_batches, self.preset.rollouts_per_prompt)
        unit = self.preset.rollouts_per_prompt if GATES[self.preset.gate].mean_over == "pair" else 1
        packed = [local_micro_batches(part, self.config, unit) for part in parts]
        parallel = self.config.parallel
        if not models.varies_in_length(parallel):  # the critic trains on all of them in one pass
            longest = max(len(batch.tokens) for batches in packed for batch in batches)
            packed = [[pack(batch.trajectories, longest, parallel.sequence_multiple) for batch in batches]
                      for batches in packed]
        on_device = iter(self._on_device([batch for batches in packed for batch in batches], trajectories))
        return [MiniBatch(part, list(islice(on_device, len(batches))))
                for part, batches in zip(parts, packed, strict=True)]

    def _on_device(self, batches: list[MicroBatch], trajectories: list[Trajectory]) -> list[DeviceBatch]:
        """This rank's micro-batches of `trajectories`, with their routing where it is replayed (then collective)."""
        routing = self.replay.deal(batches, trajectories) if self.replay else [None] * len(batches)
        return [to_device(batch, part) for batch, part in zip(batches, routing, strict=True)]


def _counted(batch: DeviceBatch, version: int, tasks: tuple[str, ...]) -> Tokens:
    """This rank's action tokens of a micro-batch that was trained at `version`, for the statistics."""
    trajectories, lengths, held = batch.source.trajectories, batch.source.lengths, batch.held.cpu().numpy()
    seen, owners = batch.results["tokens"], np.repeat(np.arange(len(lengths)), lengths)[held]
    return Tokens(
        log_ratio=to_numpy(seen.log_ratio), rollout_logprob=to_numpy(batch.rollout_logprobs),
        weight=to_numpy(seen.weight), fate=to_numpy(seen.fate),
        entropy=to_numpy(batch.results["entropy"]), advantage=to_numpy(batch.results["advantages"]),
        lag=lag(version, batch.held_versions), length=lengths[owners],
        expert_load=to_numpy(batch.results["expert_load"]) if "expert_load" in batch.results else None,
        turn=np.concatenate([np.zeros(0, np.int64), *(t.turns[t.action_mask] for t in trajectories)])[held],
        position=held - (np.cumsum(lengths) - lengths)[owners],
        task=np.array([tasks.index(t.task) for t in trajectories], np.int64)[owners])


def _refuse_non_finite(batch: DeviceBatch, logprobs: torch.Tensor) -> None:
    bad = (~torch.isfinite(logprobs)).nonzero()
    if len(bad):
        raise RunError(f"trajectory {batch.owner(batch.held[bad[0, 0]])}: the learner's log-prob of an action token "
                       f"is {float(logprobs[bad[0, 0]])}; nothing was trained on this batch")


def _phase(timer, name: str):
    return timer(name) if timer else nullcontext()
