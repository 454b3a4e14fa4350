"""Sections of a recipe about what is learned and how."""
from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from sao_megatron.config.section import Section


class AlgorithmSection(Section):
    preset: str = "sao"
    """A row of `sao-megatron presets`; every other field here overrides one choice of it."""
    gate: str | None = None
    """Gate on the ratio (algorithm/gates.py): dis, dis_recover, none, ppo_clip, decoupled_ppo, icepop, tis, cispo,
    gspo, ipo, flash_reinforce, dpo."""
    behaviour: str | None = None
    """The ratio's denominator: rollout (no further forward pass), recomputed (the policy before the batch's first
    update) or reference (the policy's starting weights, for dpo)."""
    advantage: str | None = None
    """With a critic: gae, or one action per turn: average, last_token. Without: group (needs rollouts_per_prompt > 1),
    running_mean, batch_mean, preference (for dpo)."""
    rollouts_per_prompt: int | None = Field(None, ge=1)
    """1 = single rollout."""
    critic_updates: int | None = Field(None, ge=0)
    """K critic updates per policy update."""
    freeze_critic_attention: bool | None = None
    """Keep the critic's attention modules at the policy's starting weights."""
    lambda_alpha: float | None = Field(None, gt=0)
    """α of the length-adaptive λ = 1 − 1/(α·n) of the policy's GAE."""
    eps_low: float | None = Field(None, gt=0, lt=1)
    """Lower bound of the gate: DIS drops tokens with ratio ≤ 1 − eps_low."""
    eps_high: float | None = Field(None, gt=0)
    """Upper bound of the gate: DIS drops tokens with ratio ≥ 1 + eps_high."""
    mismatch_low: float | None = Field(None, gt=0)
    """icepop: least ratio of the recomputed policy to the rollout."""
    mismatch_high: float | None = Field(None, gt=0)
    """icepop: largest such ratio; tis, decoupled_ppo: where it is truncated."""
    dual_clip: float | None = Field(None, gt=1)
    """PPO's gates: with a negative advantage, drop ratios above this; off by default."""
    trust: float | None = Field(None, gt=0)
    """flash_reinforce: largest mean binary KL of a trajectory."""
    beta: float | None = Field(None, gt=0)
    """dpo: strength of the pull towards the reference."""
    positive_nll: float | None = Field(None, ge=0)
    """Weight of the negative log-likelihood of trajectories with a positive reward (VAPO)."""
    anchor: float = Field(0.0, ge=0)
    """τ of the pull towards the sampling policy (ALGORITHM.md §8); 0 = off, as in the paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Entropy bonus; the paper has none."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts; the learner's log-probs are taken at the same."""
    critic_only_steps: int = Field(10, ge=0)
    """Steps at the start in which only the critic trains."""
    bootstrap_truncated: bool = False
    """Use the value at the cut for trajectories that a budget truncated, instead of 0."""
    whiten: bool = False
    """Whiten advantages over the global batch; off in the paper."""


class AdamSection(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(1.0, ge=0, le=1)
    """Learning rate at the last step as a share of `lr` (linear decay); 1 = constant."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 = no clipping."""


class CriticAdamSection(AdamSection):
    lr: float = Field(5e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear learning-rate warm-up."""


class CriticSection(Section):
    path: Path | None = None
    """Folder that `sao-megatron pretrain-value` wrote: the critic starts from it instead of from the policy's weights.
    """
    head: Literal["mse", "hl_gauss"] = "mse"
    """mse: one output, squared error. hl_gauss: a histogram of the return, cross-entropy."""
    value_clip: float | None = Field(None, gt=0)
    """PPO's value clipping: further updates gain nothing by moving a value more than this from where the step began
    (mse only; off in the paper)."""
    bins: int = Field(101, ge=2)
    """Bins of the histogram (hl_gauss)."""
    value_min: float = -1.5
    """Lower end of the histogram; returns must lie inside, a few bins away from the ends (hl_gauss)."""
    value_max: float = 1.5
    """Upper end of the histogram (hl_gauss)."""
    sigma_ratio: float = Field(0.75, gt=0)
    """Standard deviation of the target's Gaussian, in bins (hl_gauss)."""

    @model_validator(mode="after")
    def _fits(self):
        if self.value_min >= self.value_max:
            raise ValueError(f"value_min={self.value_min:g} must be less than value_max={self.value_max:g}")
        if self.value_clip is not None and self.head != "mse":
            raise ValueError(f"value_clip limits a squared error: it needs head=mse, not head={self.head}")
        return self


class BatchSection(Section):
    trajectories: int = Field(128, ge=1)
    """B: trajectories of one learner step, over all ranks."""
    mini_batches: int = Field(1, ge=1)
    """Policy updates per leased batch, each on its part of the trajectories."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Packed tokens of one micro-batch; a longer trajectory gets a micro-batch of its own."""


class WarmupSection(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps on the task's demonstrations before RL, for a fresh model; 0 = none."""
    trajectories: int = Field(128, ge=1)
    """Demonstrations per supervised step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate, decaying linearly to 0."""
