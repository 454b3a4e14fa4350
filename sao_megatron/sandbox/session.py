"""What a session is to its owner, wherever it runs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from sao_megatron.errors import RunError

Status = Literal["ok", "error", "timeout", "cpu", "memory", "processes", "ended"]
"""ok; the cell raised; a limit was exceeded; the session's process ended in the cell."""
_WHY = {"timeout": "it took too long", "cpu": "it used too much CPU time", "memory": "it used too much memory",
        "processes": "it had too many processes", "ended": "the interpreter ended"}


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the cell."""


@dataclass(frozen=True)
class CellResult:
    """What one cell did."""

    status: Status
    output: str
    """What it printed, its last expression's value, its traceback; shortened with a notice."""
    seconds: float
    alive: bool
    """Whether its variables are still there."""

    def text(self) -> str:
        """The output, and where it did not end by itself, why: for a model to read."""
        why = _WHY.get(self.status)
        if why is None:
            return self.output
        kept = "variables are kept" if self.alive else "all variables are lost"
        return f"{self.output}\n[The code was stopped: {why}; {kept}.]".lstrip()


class Session(Protocol):
    """One trajectory's interpreter."""

    async def run(self, code: str, seconds: float | None = None) -> CellResult:
        """Run one cell. `seconds` may shorten its time. Raises SandboxError where the sandbox fails."""

    async def close(self) -> None:
        """End it with all that it has started."""


class Sandbox(Protocol):
    """Where sessions come from: a Pool here, or servers (client.RemoteSandbox)."""

    async def open(self) -> Session: ...
