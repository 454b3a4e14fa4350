"""The nodes of the Slurm job in which we run: their names, addresses, components, and whether they live."""
from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sao_megatron.errors import RunError, UserError

QUERY_SECONDS = 60.0
"""For one of Slurm's commands."""
PATIENCE_SECONDS = 600.0
"""For Slurm's controller to come back."""
ANSWER_SECONDS = 5.0
"""For a node's slurmd to accept a connection."""
_DEAD = re.compile(r"DOWN|FAIL|NOT_RESPONDING|POWERED|POWERING_DOWN|\*")


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    """At which other nodes reach it: an HTTP client may resolve names otherwise than Slurm does."""
    component: int | None = None
    """Of a heterogeneous job; None in any other."""


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the job in which we run."""

    job: int
    """Of the whole job, also where it has components."""
    components: list[list[Node]]
    """In Slurm's order: more than one if the job is heterogeneous. The very first node is ours."""
    binds_cpus: bool
    """Whether Slurm binds tasks to cores; where it cannot, srun complains of every option about it."""

    @classmethod
    def ours(cls) -> Allocation:
        """Raises UserError outside a job."""
        if "SLURM_JOB_ID" not in os.environ:
            raise UserError("--slurm: this is not a Slurm job (SLURM_JOB_ID is not set): use `sao-megatron submit` or "
                            "`sbatch slurm/train.sbatch`")
        count = int(os.environ.get("SLURM_HET_SIZE", 0))
        found = [_nodes(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"], i) for i in range(count)]
        return cls(int(os.environ.get("SLURM_HET_JOB_ID", os.environ["SLURM_JOB_ID"])),
                   found or [_nodes(os.environ["SLURM_JOB_NODELIST"], None)],
                   "task/none" not in _ask("scontrol", "show", "config"))


def _nodes(names: str, component: int | None) -> list[Node]:
    shown = _show(names)
    return [Node(name, socket.gethostbyname(shown[name]["NodeAddr"]), component)
            for name in _ask("scontrol", "show", "hostnames", names).split()]


def _show(names: str) -> dict[str, dict[str, str]]:
    """What `scontrol show node` says of each node."""
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in
             _ask("scontrol", "--oneliner", "show", "node", names).splitlines()]
    return {line["NodeName"]: line for line in lines if "NodeName" in line}


def down(names: list[str], job: int) -> list[str]:
    """Those of the nodes that are dead: Slurm says so (minutes after a power loss), or slurmd no longer answers.

    And those that were, if only for a moment: Slurm has taken them out of the job and starts nothing of it there again.
    """
    held = _held(job)
    shown = _show(",".join(names))
    port = re.search(r"SlurmdPort\s*= (\d+)", _ask("scontrol", "show", "config"))[1]

    def is_dead(name: str) -> bool:
        node = shown[name]
        return (bool(held) and name not in held or bool(_DEAD.search(node["State"]))
                or not _listens(node["NodeAddr"], int(node.get("Port", port))))
    with ThreadPoolExecutor(64) as threads:
        return [name for name, dead in zip(names, threads.map(is_dead, names), strict=True) if dead]


def _held(job: int) -> set[str]:
    """The nodes that the job still has, in all its components; none where it no longer runs (it is being cancelled)."""
    lists = _ask("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N").split()
    return set(_ask("scontrol", "show", "hostnames", ",".join(lists)).split()) if lists else set()


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _ask(*command: str) -> str:
    """The answer of one of Slurm's commands; waits for a controller that is away, since no step starts without it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS).stdout
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or "").strip()
            if "contact slurm controller" not in said or time.monotonic() > deadline:
                raise RunError(f"`{' '.join(command)}` failed ({error}) {said}: the run asks Slurm about its nodes"
                               ) from None
            time.sleep(10.0)
