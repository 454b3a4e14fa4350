"""What a run starts, and what the watch may ask of where it starts."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sao_megatron.supervisor import GRACE_SECONDS, ProcessSpec, Supervisor
from sao_megatron.telemetry.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What to start."""

    engines: list[ProcessSpec]
    controller: ProcessSpec | None
    learners: list[ProcessSpec]
    """The ranks (on Slurm one step for all of them), without the port at which they find each other."""
    urls: list[str]
    """Of the engines."""
    address: str = "127.0.0.1"
    """Of this machine, for the ranks: the store at which they meet is in the launcher."""
    sandboxes: list[ProcessSpec] = field(default_factory=list)
    sandbox_urls: list[str] = field(default_factory=list)


def learner_environment(gpu: bool) -> dict[str, str]:
    """What a rank's environment needs on top of its parent's."""
    if not gpu:
        return {}
    return {
        # Micro-batches differ in length; without this, what each leaves between the others' blocks is lost to them.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # Megatron-Core issues communication before the kernels that are to hide it: one queue keeps the order.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class Placement(Protocol):
    """Makes the plan, and knows whether the machines under it live."""

    log_dir: Path
    grace: float
    """Seconds between SIGTERM and SIGKILL for its processes."""

    def plan(self) -> Plan:
        """As it is now."""

    def check(self, supervisor: Supervisor, progress: Progress) -> None:
        """Try the machines before anything starts on them. Raises UserError or RunError naming one that is bad."""

    def tend(self, supervisor: Supervisor, ended: dict[str, int]) -> None:
        """Take out of `ended`, and start again, what is the placement's own."""

    def lost(self, name: str) -> str | None:
        """The node of this process (of the plan) that is down; None if all its nodes live."""

    def move(self, name: str) -> bool:
        """Give this engine another place, so that `plan` changes; False if there is none."""


class OneMachine:
    """The placement of a plan that stays as it is, on a machine that lives as long as we do."""

    def __init__(self, plan: Plan, log_dir: Path):
        self._plan, self.log_dir, self.grace = plan, log_dir, GRACE_SECONDS

    def plan(self) -> Plan:
        return self._plan

    def check(self, supervisor: Supervisor, progress: Progress) -> None:
        """Nothing: what could be wrong is seen when the processes start."""

    def tend(self, supervisor: Supervisor, ended: dict[str, int]) -> None:
        """Nothing is."""

    def lost(self, name: str) -> str | None:
        return None

    def move(self, name: str) -> bool:
        return False
