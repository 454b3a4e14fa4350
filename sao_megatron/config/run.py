"""RunConfig: all sections of a run."""
from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sao_megatron.config.algorithm import (
    AdamSection,
    AlgorithmSection,
    BatchSection,
    CriticAdamSection,
    CriticSection,
    WarmupSection,
)
from sao_megatron.config.cluster import ClusterSection
from sao_megatron.config.model import ModelSection, ParallelSection
from sao_megatron.config.rollouts import (
    EngineSection,
    EvaluationSection,
    PublicationSection,
    RolloutSection,
    TaskSection,
)
from sao_megatron.config.sandbox import SandboxSection
from sao_megatron.config.section import Section
from sao_megatron.config.watching import AlarmSection, CheckpointSection, TokensSection, WritersSection


class RunConfig(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Run name; outputs go to `runs_dir/name`."""
    runs_dir: Path = Path("runs")
    seed: int = Field(0, ge=0)
    steps: int = Field(1, ge=1)
    """Policy updates (critic-only steps come on top)."""
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    policy_optimizer: AdamSection = AdamSection()
    critic: CriticSection = CriticSection()
    critic_optimizer: CriticAdamSection = CriticAdamSection()
    batch: BatchSection = BatchSection()
    warmup: WarmupSection = WarmupSection()
    task: TaskSection
    sandbox: SandboxSection = SandboxSection()
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    publication: PublicationSection = PublicationSection()
    alarms: AlarmSection = AlarmSection()
    tokens: TokensSection = TokensSection()
    writers: WritersSection = WritersSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    restarts: int = Field(0, ge=0)
    """How often `train` starts processes of the run again when some died, before it gives up; counted anew whenever the
    run gets further than ever."""
    hang_timeout: float = Field(1800.0, ge=0)
    """Seconds in which no learner rank gets further, after which all ranks' Python stacks are logged and the ranks are
    started again (one of `restarts`); 0 = never."""
    mode: Literal["train", "replay", "rollout"] = "train"
    """train: engines, controller and learner. replay: the learner alone, on recorded trajectories (the verb `replay`).
    rollout: engines and controller alone, until the store holds the trajectories of all steps (the verb `rollout`)."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def total_steps(self) -> int:
        """Learner steps: critic-only ones and policy updates."""
        return self.steps + self.algorithm.critic_only_steps

    @property
    def collective_timeout(self) -> float:
        """Seconds after which a learner rank no longer waits for the others: when engines start and get their first
        weights they wait long; and the watchdog, which names the rank that is missing, must come first."""
        return max(self.engine.start_timeout + self.publication.timeout, 1.2 * self.hang_timeout)
