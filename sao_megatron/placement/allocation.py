"""The nodes of the Slurm job in which we run: their names, addresses, components, and whether they live."""
from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import dataclass

from sao_megatron.errors import RunError, UserError

QUERY_SECONDS = 60.0
"""For one of Slurm's commands."""
_DEAD = re.compile(r"DOWN|FAIL|NOT_RESPONDING|POWERED|POWERING_DOWN|\*")


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    """At which other nodes reach it: an HTTP client may resolve names otherwise than Slurm does."""
    component: int | None = None
    """Of a heterogeneous job; None in any other."""


def components() -> list[list[Node]]:
    """The nodes of each component of this job, in Slurm's order. Raises UserError outside a job."""
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError("--slurm: this is not a Slurm job (SLURM_JOB_ID is not set): use `sao-megatron submit` or "
                        "`sbatch slurm/train.sbatch`")
    count = int(os.environ.get("SLURM_HET_SIZE", 0))
    if not count:
        return [_nodes(os.environ["SLURM_JOB_NODELIST"], None)]
    return [_nodes(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"], i) for i in range(count)]


def _nodes(names: str, component: int | None) -> list[Node]:
    shown = _show(names)
    return [Node(name, socket.gethostbyname(shown[name]["NodeAddr"]), component)
            for name in _ask("scontrol", "show", "hostnames", names).split()]


def _show(names: str) -> dict[str, dict[str, str]]:
    """What `scontrol show node` says of each node."""
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in
             _ask("scontrol", "--oneliner", "show", "node", names).splitlines()]
    return {line["NodeName"]: line for line in lines if "NodeName" in line}


def down(names: list[str]) -> list[str]:
    """Those of the nodes that Slurm holds for dead."""
    shown = _show(",".join(names))
    return [name for name in names if _DEAD.search(shown[name]["State"])]


def binds_cpus() -> bool:
    """Whether Slurm binds tasks to cores here; where it cannot, srun complains of every option about it."""
    return "task/none" not in _ask("scontrol", "show", "config")


def job_id() -> int:
    """Of the whole job, also where it has components."""
    return int(os.environ.get("SLURM_HET_JOB_ID", os.environ["SLURM_JOB_ID"]))


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        raise RunError(f"`{' '.join(command)}` failed ({error}) {said}: the run asks Slurm about its nodes") from None
