"""The critic: K updates a step on the policy's batch, and the values and advantages of its first forward.

With λ_critic = 1 a target is the reward-to-go and needs no values, so the first update's own forward, which sees the
critic before it moves, gives the values that the policy's advantages use (ALGORITHM.md §3).
"""
from __future__ import annotations

import torch

from sao_megatron.learner import model as models
from sao_megatron.algorithm import advantage as adv
from sao_megatron.algorithm.presets import Preset
from sao_megatron.config import RunConfig
from sao_megatron.learner.optimized import Optimized, wrap
from sao_megatron.learner.passes import DeviceBatch, reports, to_numpy, value_pass
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.trajectory.types import Status


class Critic:
    """A value model that starts from the policy's weights with a fresh scalar head."""

    def __init__(self, config: RunConfig, hf_config: dict, preset: Preset, policy):
        self.config, self.preset = config, preset
        module = models.build(hf_config, config.parallel, getattr(torch, config.model.dtype), value_head=True)
        models.start_from_policy(module, policy)
        if preset.freeze_critic_attention:
            models.freeze_attention(module)
        self.model = Optimized(wrap(module), config.critic_optimizer, config.total_steps)

    def train(self, batches: list[DeviceBatch], statistics: Statistics) -> dict[str, float]:
        """K updates. Leaves `values`, `returns` and `advantages` [k] in each batch's results (last pipeline stage)."""
        norm = rate = 0.0
        for update in range(self.preset.critic_updates):
            self.model.zero_grad()
            value_pass(self.model.ddp, batches, self._loss if update else self._first_loss)
            norm, rate = self.model.step()
        for batch in batches if reports() else ():
            _count(batch, statistics)
        return {"critic/grad_norm": norm, "critic/lr": rate}

    def _first_loss(self, batch: DeviceBatch, values: torch.Tensor, last_values: torch.Tensor) -> torch.Tensor:
        """The loss, keeping the values it saw and the advantages that follow from them.

        Advantages run along whole trajectories, so every context parallel rank computes them all and keeps its own.
        """
        bootstrap = self._bootstrap(batch, last_values)
        lam = adv.adaptive_lambda(batch.lengths, self.preset.lambda_alpha)
        advantages = adv.gae(batch.rewards, batch.whole(values), batch.lengths, lam, last_values=bootstrap)
        batch.results |= dict(values=values.detach(), returns=_targets(batch, bootstrap),
                              advantages=advantages[batch.held])
        return _squared_error(values, batch.results["returns"])

    def _loss(self, batch: DeviceBatch, values: torch.Tensor, last_values: torch.Tensor) -> torch.Tensor:
        return _squared_error(values, _targets(batch, self._bootstrap(batch, last_values)))

    def _bootstrap(self, batch: DeviceBatch, last_values: torch.Tensor) -> torch.Tensor | None:
        """V after the last action, [m]: 0 (None), or the value at the cut of truncated trajectories if configured."""
        if not self.config.algorithm.bootstrap_truncated:
            return None
        cut = torch.tensor([t.status is Status.TRUNCATED for t in batch.source.trajectories], dtype=torch.bool,
                           device=last_values.device)
        return batch.whole_last(last_values) * cut


def _targets(batch: DeviceBatch, bootstrap: torch.Tensor | None) -> torch.Tensor:
    """Reward-to-go of the held action tokens."""
    return adv.returns(batch.rewards, batch.lengths, last_values=bootstrap)[batch.held]


def _squared_error(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Summed over action tokens."""
    return (values - target).square().sum()


def _count(batch: DeviceBatch, statistics: Statistics) -> None:
    value, target, advantage = (to_numpy(batch.results[name]) for name in ("values", "returns", "advantages"))
    error = target - value
    statistics.add(value_tokens=len(value), value=value, error=error, error_squared=error**2, advantage=advantage,
                   advantage_squared=advantage**2, **{"return": target, "return_squared": target**2})
