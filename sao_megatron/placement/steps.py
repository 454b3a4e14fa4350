"""How a role becomes a step of a Slurm job: the srun, the container, what the task is told."""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from sao_megatron.config import ClusterSection
from sao_megatron.errors import UserError
from sao_megatron.placement.allocation import Node
from sao_megatron.supervisor import ProcessSpec

REPOSITORY = Path(__file__).parents[2]


class Steps:
    """Makes the specs of steps that share the job's nodes."""

    def __init__(self, cluster: ClusterSection, log_dir: Path, binds_cpus: bool):
        """`binds_cpus`: whether Slurm binds tasks to cores (an engine could get the one core of its task)."""
        self.cluster, self.log_dir = cluster, log_dir
        self._unbound = ["--cpu-bind=none"] if binds_cpus else []

    def step(self, name: str, nodes: list[Node], command: list[str], tasks: int = 1,
             environment: Mapping[str, str] = {}, own: Mapping[str, str] = {},  # noqa: B006
             parts: bool | None = None) -> ProcessSpec:
        """`command` as one step with so many `tasks` on each of the nodes; `own`: what only the task may be told.

        A step of several tasks (`parts`) writes a log for each: learner-0.log, learner-1.log … beside srun's own.
        """
        count = len(nodes) * tasks
        parts = count > 1 or name == "learner" if parts is None else parts
        where = [[node for node in nodes if node.component == component]
                 for component in sorted({node.component for node in nodes}, key=str)]
        if len(where) > 1:
            raise UserError(f"{name} would lie in two components of the heterogeneous job, which share no step: "
                            "a spare node can take an engine's place, but not a part of it")
        output = [f"--output={self.log_dir / f'{name}-%t.log'}"] if parts else []
        srun = [*self.srun(name, nodes, tasks), *output, *self._srun_container()]
        task = [*self._command_container(), self.python, "-m", "sao_megatron.placement.task",
                *(f"{key}={value}" for key, value in own.items()), "--"]
        return ProcessSpec(name, [*srun, *task, *command], self._common() | dict(environment),
                           parts=tuple(f"{name}-{i}" for i in range(count)) if parts else (),
                           orphan_signal=signal.SIGTERM)

    def srun(self, name: str, nodes: list[Node], tasks: int) -> list[str]:
        """One that shares the nodes with others, and ends when one of its tasks has failed."""
        return ["srun", f"--job-name={name}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * tasks}",
                f"--ntasks-per-node={tasks}", f"--nodelist={','.join(node.name for node in nodes)}",
                "--distribution=block", "--overlap", "--mem=0", "--kill-on-bad-exit=1", "--no-kill=off",
                "--export=ALL", *self._unbound, *self._component(nodes)]

    @staticmethod
    def _component(nodes: list[Node]) -> list[str]:
        component = nodes[0].component
        return [] if component is None else [f"--het-group={component}"]

    def _common(self) -> dict[str, str]:
        """The environment of every task; srun carries it over."""
        cluster = self.cluster
        threads = "4" if cluster.gpus_per_node else "1"
        socket_interface = {} if cluster.interface is None else {
            "NCCL_SOCKET_IFNAME": cluster.interface, "GLOO_SOCKET_IFNAME": cluster.interface}
        # The package of the launcher, and not one that the image may have.
        inside = {} if cluster.container.runtime == "none" else {"PYTHONPATH": str(REPOSITORY)}
        return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
                **inside, **socket_interface, **cluster.environment}

    @property
    def python(self) -> str:
        """The interpreter of the roles."""
        if self.cluster.venv is not None:
            return str(self.cluster.venv / "bin" / "python")
        return sys.executable if self.cluster.container.runtime == "none" else "python3"

    def _srun_container(self) -> list[str]:
        container = self.cluster.container
        if container.runtime != "pyxis":
            return []
        mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        return [f"--container-image={container.image}", f"--container-workdir={Path.cwd()}", *mounts]

    def _command_container(self) -> list[str]:
        container, gpus = self.cluster.container, self.cluster.gpus_per_node
        if container.runtime != "apptainer":
            return []
        mounts = [argument for mount in container.mounts for argument in ("--bind", mount)]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), "--pwd", str(Path.cwd()), *mounts, container.image]
