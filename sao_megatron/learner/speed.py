"""How fast a step was, and what the machines did meanwhile: tokens and FLOPs a second of learner and engines, GPUs,
host, and what the engines and their GPUs do (rollout/engine_metrics.py leaves it in the store)."""
from __future__ import annotations

import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron.algorithm.presets import Preset
from sao_megatron.config import RunConfig
from sao_megatron.learner.trainer import StepResult
from sao_megatron.telemetry import flops
from sao_megatron.telemetry.machine import Gpus, host
from sao_megatron.trajectory.store import ENGINES, Store
from sao_megatron.trajectory.types import Trajectory


class Speed:
    """One on every rank."""

    def __init__(self, config: RunConfig, hf_config: dict, preset: Preset, store: Store | None):
        """`store` on rank 0."""
        self.config, self.preset, self.store = config, preset, store
        self.model = flops.forward(hf_config)
        self.gpu, self.gpus = runtime.gpu(), Gpus()
        self.peak = flops.peak(self.gpu[1]) if self.gpu else None
        self._appended = 0
        """Action tokens in the store when the last step was recorded."""

    def begin(self) -> None:
        """The first step begins (rank 0)."""
        self._appended = self.store.appended_tokens()
        host()

    def machines(self) -> dict[str, float]:
        """Counters of every rank's GPU and of rank 0's machine; on rank 0, {} elsewhere (collective)."""
        if self.gpu is None:
            return host() if self.store else {}
        gathered = [None] * dist.get_world_size() if self.store else None
        dist.gather_object(self.gpus.read(self.gpu[0]), gathered, dst=0)
        if gathered is None:
            return {}
        return host() | {f"gpu/{name} rank-{rank}": value for rank, counters in enumerate(gathered)
                         for name, value in counters.items()}

    def rates(self, seconds: dict[str, float], metrics: dict[str, float], trajectories: list[Trajectory],
              result: StepResult, update_policy: bool) -> dict[str, float]:
        """Of a step that took `seconds` by phase, on rank 0. `metrics` has the batch's sizes."""
        appended, counts = self.store.appended_tokens(), self.store.counts()
        sampled, self._appended = appended - self._appended, appended
        lengths, actions = [len(t) for t in trajectories], metrics["tokens/action"]
        engine = self.config.engine
        found = {f"seconds/{name}": value for name, value in seconds.items()} | {
            "learner/tokens_per_second": metrics["tokens/total"] / seconds["step"],
            "learner/flops_per_second": flops.step(
                self.model, lengths, actions, self.preset.critic_updates * self.preset.has_critic,
                self.preset.behaviour != "rollout", update_policy) / seconds["step"] / self.config.parallel.ranks,
            "learner/bubble": self._bubble(len(result.batches) / self.config.batch.mini_batches),
            "queue/ready": counts.get("ready", 0), "queue/in_flight": self.store.sum_of("in_flight"),
            "engine/tokens_per_second": sampled / seconds["step"],
            "engine/flops_per_second": self.model.of(lengths, actions) * sampled / actions / seconds["step"] / (
                engine.count * engine.tp)}
        if self.peak:
            found |= {f"{side}/mfu": found[f"{side}/flops_per_second"] / self.peak for side in ("learner", "engine")}
        return found | self.store.get_state(ENGINES, {})

    def _bubble(self, micro_batches: float) -> float:
        idle = (self.config.parallel.pp - 1) / self.config.parallel.vpp
        return idle / (micro_batches + idle)
