"""The section of a recipe about the sandbox in which the code of a model runs."""
from __future__ import annotations

import os

from pydantic import Field

from sao_megatron.config.section import Section


class SandboxSection(Section):
    """For tasks that run a model's code (docs/rollouts.md). The limits are those of one session: one trajectory."""

    servers: int = Field(0, ge=0)
    """Sandbox servers that `train` starts; 0 = the controller runs sessions itself."""
    host: str = "127.0.0.1"
    """Address of the servers."""
    sessions: int = Field(256, ge=1)
    """Most sessions at a time, of one server (or of the controller): a session takes about 15 MB."""
    cells: int = Field(0, ge=0)
    """Most pieces of code that run at a time, of one server; 0 = as many as there are CPU cores."""
    warm: int = Field(4, ge=0)
    """Sessions that are ready before they are needed."""
    modules: list[str] = ["numpy", "sympy"]
    """What is imported before a session begins, so that importing it costs a session nothing."""
    seconds: float = Field(10.0, gt=0)
    """Wall time of one piece of code."""
    cpu_seconds: float = Field(20.0, gt=0)
    """CPU time of one piece of code, all its processes together."""
    memory_mb: float = Field(512.0, ge=32)
    """Memory of all processes of a session."""
    disk_mb: float = Field(64.0, gt=0)
    """Size of a session's temporary folder, which is memory as well."""
    file_mb: float = Field(32.0, gt=0)
    """Size of one file."""
    processes: int = Field(16, ge=2)
    """Processes and threads of a session."""
    output: int = Field(8192, ge=64)
    """Bytes of output that the model gets to see: the first and the last half."""
    idle_timeout: float = Field(3600.0, gt=0)
    """Seconds after which a server ends a session that nobody has used."""
    patience: float = Field(300.0, gt=0)
    """Seconds that a call waits while no server has room, before its episode ends as `error`."""

    @property
    def cores(self) -> int:
        return self.cells or len(os.sched_getaffinity(0))
