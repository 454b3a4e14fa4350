"""A model under Megatron-Core's DDP with its distributed optimizer and learning-rate schedule."""
from __future__ import annotations

import numpy as np

from sao_megatron.learner import runtime  # noqa: F401  (before Megatron)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from sao_megatron.config import AdamSection
from sao_megatron.errors import RunError


class Optimized:
    """`steps` is the length of the schedule."""

    def __init__(self, ddp: list[DistributedDataParallel], adam: AdamSection, steps: int):
        config = ddp[0].config
        self.ddp = ddp
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=adam.lr, min_lr=adam.lr * adam.min_lr_ratio, weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1, adam_beta2=adam.beta2, adam_eps=adam.eps, clip_grad=adam.clip_grad, bf16=config.bf16,
            params_dtype=config.params_dtype, use_distributed_optimizer=True), ddp, use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=adam.lr, min_lr=adam.lr * adam.min_lr_ratio,
            lr_warmup_steps=adam.warmup_steps, lr_decay_steps=max(steps, adam.warmup_steps + 1),
            lr_decay_style="linear", start_wd=adam.weight_decay, end_wd=adam.weight_decay, wd_incr_steps=0,
            wd_incr_style="constant")

    def go_on_from(self, steps: int) -> None:
        """Be at the place of the schedule where `steps` updates have been made."""
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)

    def zero_grad(self) -> None:
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> tuple[float, float]:
        """Apply the gradients. Returns (gradient norm before clipping, learning rate)."""
        self.scheduler.step(1)  # before the update, so that a warm-up's first step is not one at rate 0
        finite, norm, _ = self.optimizer.step()
        if not finite or not np.isfinite(norm):
            raise RunError(f"the gradient norm is {norm}: the weights were not updated; look at the last step's "
                           "trajectories and at the learning rate")
        return float(norm), float(self.scheduler.get_lr({}))


def wrap(chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Megatron's DDP around each; gradients accumulate and are reduced in float32."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
