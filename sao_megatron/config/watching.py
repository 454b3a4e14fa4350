"""Sections of a recipe about what a run records of itself."""
from __future__ import annotations

from typing import Literal

from pydantic import Field

from sao_megatron.config.section import Section


class AlarmSection(Section):
    """Limits of telemetry/alarms.py. An alarm is one sentence in the log and a mark in TensorBoard."""

    on_alarm: Literal["warn", "slow", "pause", "stop"] = "warn"
    """Go on; let pacing admit less lag until alarms about the samples' age are over (docs/metrics.md); wait until the
    file PAUSED in the run's folder is deleted; or end the run."""
    mismatch: float = Field(0.05, gt=0)
    """Mean |log r| at lag 0 (nats): bfloat16 kernels differ by about 0.01, float32 ones by less than 1e-5."""
    mismatch_slope: float = Field(0.05, gt=0)
    """|slope| of log r on the rollout's log-prob at lag 0."""
    mask_share: float = Field(0.3, gt=0, le=1)
    """Dropped share of the action tokens (the paper's runs stay below 0.006)."""
    effective_sample_size: float = Field(0.5, gt=0, le=1)
    discarded_mass: float = Field(0.3, gt=0)
    lag_beyond_bound: float = Field(0.5, gt=0)
    """Versions by which the mean lag exceeds rollout.max_lag."""
    gradient_norm: float = Field(20.0, gt=1)
    """Times its median of the last 50 steps."""
    entropy_collapse: float = Field(0.05, gt=0, lt=1)
    """Entropy as a share of its mean in the first ten updates."""
    entropy_growth: float = Field(3.0, gt=1)
    reward_drop: float = Field(0.5, gt=0)
    """Fall of the twenty-step mean reward from its best, as a share of the best (at least 0.1)."""
    explained_variance: float = Field(-0.5, lt=0)


class TokensSection(Section):
    trajectories: int = Field(8, ge=0)
    """Trajectories a step whose every token is recorded: a seeded sample, and in a quarter of the places those of which
    the gate dropped most; 0 = no records."""
    every: int = Field(1, ge=1)
    """Steps from one record to the next."""
    limit_mb: float = Field(256.0, gt=0)
    """Most megabytes of a run's records; beyond, every second of the older files is deleted."""
    page: str | None = Field(None, pattern=r"^https?://\S+$")
    """Address of the page that `sao-megatron inspect --html` writes, where you serve it, for TensorBoard's links; null:
    they lead to `sao-megatron inspect --serve` on the machine of the browser."""


class WritersSection(Section):
    tensorboard: bool = True
    """TensorBoard events in the run's folder."""
    jsonl: bool = False
    """metrics.jsonl in the run's folder, one line a step."""
    wandb: str | None = Field(None, min_length=1)
    """Project of Weights & Biases to write to (needs the package wandb); null = none."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: files in the run's folder, for `wandb sync`."""


class CheckpointSection(Section):
    every: int = Field(50, ge=0)
    """Learner steps between two checkpoints (there is one more at the end); 0 = none."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay."""
