"""The critic: K updates a step on the policy's batch, and the values and advantages of its first forward.

With λ_critic = 1 a target is the reward-to-go and needs no values, so the first update's own forward, which sees the
critic before it moves, gives the values that the policy's advantages use (ALGORITHM.md §3).
"""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sao_megatron.learner import model as models
from sao_megatron.algorithm import advantage as adv
from sao_megatron.algorithm.presets import Preset
from sao_megatron.algorithm.value import HLGauss, SquaredError, ValueLoss
from sao_megatron.config import CriticSection, RunConfig
from sao_megatron.errors import RunError
from sao_megatron.learner.optimized import Optimized, wrap
from sao_megatron.learner.passes import DeviceBatch, reports, to_numpy, value_pass
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.trajectory.types import Status
from sao_megatron.weights import hf, value_head
from sao_megatron.weights.shards import ShardMap, save_hf


def value_loss(section: CriticSection) -> ValueLoss:
    if section.head == "hl_gauss":
        return HLGauss(section.bins, section.value_min, section.value_max, section.sigma_ratio)
    return SquaredError(section.value_clip)


class Critic:
    """Give it weights with one of the `start_…` methods before it trains."""

    def __init__(self, config: RunConfig, hf_config: dict, preset: Preset, steps: int):
        """`steps` is the length of the learning-rate schedule."""
        self.config, self.hf_config, self.preset, self.steps = config, hf_config, preset, steps
        self.head = value_loss(config.critic)
        self.chunks = models.build(hf_config, config.parallel, getattr(torch, config.model.dtype), self.head.width)
        self.shards = ShardMap(self.chunks, hf_config, rules=value_head.RULES)
        self.model: Optimized | None = None

    def start_from_policy(self, policy: list) -> None:
        """The weights of the policy (its chunks in this layout) and a fresh head."""
        models.start_from_policy(self.chunks, policy)
        self._wrap()

    def start_from_weights(self, source: hf.TensorSource) -> None:
        """A policy's weights as HF tensors, and a fresh head."""
        ShardMap(self.chunks, self.hf_config, skip=frozenset(value_head.RULES)).load(source)
        self._wrap()

    def start_from_critic(self, folder: Path) -> None:
        """A critic that `save` wrote, head and all."""
        self.shards.load(hf.SafetensorsFolder(folder))
        self._wrap()

    def _wrap(self) -> None:
        if self.preset.freeze_critic_attention:
            models.freeze_attention(self.chunks)
        self.model = Optimized(wrap(self.chunks), self.config.critic_optimizer, self.steps)

    def save(self, folder: Path, model_dir: Path) -> None:
        """Write the critic as an HF-like folder (collective); `model_dir` is the policy's."""
        save_hf(self.shards, folder, model_dir, beside=value_head.files(self.config.critic))

    def train(self, batches: list[DeviceBatch], statistics: Statistics) -> dict[str, float]:
        """K updates. Leaves `values`, `returns` and `advantages` [k] in each batch's results (last pipeline stage)."""
        norm = rate = 0.0
        for _ in range(self.preset.critic_updates):
            self.model.zero_grad()
            value_pass(self.model.ddp, batches, self._loss)
            norm, rate = self.model.step()
        for batch in batches if reports() else ():
            _count(batch, statistics)
        return {"critic/grad_norm": norm, "critic/lr": rate}

    def _loss(self, batch: DeviceBatch, outputs: Tensor, last_outputs: Tensor) -> Tensor:
        """Summed over the held action tokens. The first update's call leaves its values and what follows from them."""
        bootstrap = self._bootstrap(batch, last_outputs)
        returns = adv.returns(batch.rewards, batch.lengths, last_values=bootstrap)
        self._check_range(batch, returns)
        if "values" not in batch.results:
            values = self.head.values(outputs).detach()
            advantages = self._advantages(batch, values, bootstrap)
            batch.results |= dict(values=values, returns=returns[batch.held], advantages=advantages)
        return self.head.losses(outputs, returns[batch.held], batch.results["values"]).sum()

    def _advantages(self, batch: DeviceBatch, values: Tensor, bootstrap: Tensor | None) -> Tensor:
        """They run along whole trajectories, so every context parallel rank computes them all and keeps its own [k]."""
        values, alpha = batch.whole(values), self.preset.lambda_alpha
        if self.preset.advantage == "gae":
            lam = adv.adaptive_lambda(batch.lengths, alpha)
            return adv.gae(batch.rewards, values, batch.lengths, lam, last_values=bootstrap)[batch.held]
        turns = [t.turns[t.action_mask] for t in batch.source.trajectories]
        turns = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *turns])).to(values.device)
        return adv.step_gae(self.preset.advantage, batch.rewards, values, batch.lengths, turns, alpha,
                            bootstrap)[batch.held]

    def _bootstrap(self, batch: DeviceBatch, last_outputs: Tensor) -> Tensor | None:
        """V after the last action, [m]: 0 (None), or the value at the cut of truncated trajectories if configured."""
        if not self.config.algorithm.bootstrap_truncated:
            return None
        cut = torch.tensor([t.status is Status.TRUNCATED for t in batch.source.trajectories], dtype=torch.bool,
                           device=last_outputs.device)
        return batch.whole_last(self.head.values(last_outputs)) * cut

    def _check_range(self, batch: DeviceBatch, returns: Tensor) -> None:
        """A histogram cannot hold a return outside it. Raises RunError naming the trajectory."""
        if not isinstance(self.head, HLGauss):
            return
        outside = ((returns < self.head.low) | (returns > self.head.high)).nonzero()
        if len(outside):
            first = outside[0, 0]
            raise RunError(f"trajectory {batch.owner(first)}: its return {float(returns[first]):g} lies outside "
                           f"critic.value_min={self.head.low:g} … critic.value_max={self.head.high:g}: "
                           f"widen the range")


def _count(batch: DeviceBatch, statistics: Statistics) -> None:
    # float64: the variance of returns that are all alike must come out as 0, not as the rounding of their squares
    value, target, advantage = (to_numpy(batch.results[name]).astype(np.float64)
                                for name in ("values", "returns", "advantages"))
    error = target - value
    statistics.add(value_tokens=len(value), value=value, error=error, error_squared=error**2, advantage=advantage,
                   advantage_squared=advantage**2, **{"return": target, "return_squared": target**2})
