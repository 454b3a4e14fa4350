"""The processes of a run on the nodes of a Slurm job: what the local placement starts as a child is here an `srun`.

The launcher runs on the job's first node, as store and controller do, which is also the first of the learner's. Each
engine is a step of its own, all learner ranks are one. Steps overlap: the job holds whole nodes, and we deal out what
is on them. The supervisor sees the sruns; signals to them reach their tasks.
"""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sao_megatron.config import ClusterSection, RunConfig
from sao_megatron.config.cluster import PORTS
from sao_megatron.config.cluster import placement as places
from sao_megatron.engine.process import engine_command, engine_environment
from sao_megatron.errors import Unfinished, UserError
from sao_megatron.placement.allocation import Allocation, Node, down
from sao_megatron.placement.plan import Plan, learner_environment
from sao_megatron.placement.preflight import Preflight
from sao_megatron.placement.steps import Steps
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.telemetry.progress import Progress

_GUARD = """echo "$(hostname): guards job $1 against the loss of $0"
while sleep 10; do
    nodes=$(squeue -h -j "$1" -t R -o %N | paste -sd,) && [ -n "$nodes" ] || continue
    scontrol show hostnames "$nodes" | grep -qx "$0" || { echo "$0 is lost: requeue"; scontrol requeue "$1"; }
done"""
"""With --no-kill Slurm leaves a job alive that has lost its first node, and us with it (seen with 22.05): it would hold
the other nodes until its time limit. So a step on another node puts it back into the queue."""


@dataclass(frozen=True)
class Roles:
    """Which node does what."""

    learner: list[Node]
    rollout: list[Node]
    spares: list[Node]


def assign(cluster: ClusterSection, found: list[list[Node]], bad: Mapping[str, str] = {}) -> Roles:  # noqa: B006
    """Deal the nodes of the job's components out, leaving out the `bad` ones (name → why).

    Raises UserError where the job has too few nodes, or too few good ones.
    """
    heterogeneous = len(found) > 1
    good = [[node for node in nodes if node.name not in bad] for nodes in found]
    head, first = found[0][0], good[0]
    learner, rest = first[:cluster.learner_nodes], first[cluster.learner_nodes:]
    pool = good[1] if heterogeneous else rest
    rollout = pool[:cluster.rollout_nodes]
    spares = [node for node in (rest if heterogeneous else []) + pool[cluster.rollout_nodes:]]
    missing = cluster.rollout_nodes - len(rollout)
    rollout, spares = rollout + spares[:missing], spares[max(0, missing):]
    too_few = len(learner) < cluster.learner_nodes or len(rollout) < cluster.rollout_nodes
    reasons = "".join(f"; {name} failed the preflight: {why}" for name, why in bad.items())
    if (too_few or head.name in bad) and share_a_fault(found, bad):
        raise UserError(f"{len(bad)} of the job's {sum(map(len, found))} nodes are bad, so it is not the nodes: look "
                        f"at what they share (runs_dir, cluster.interface, the image), or give slow ones more "
                        f"cluster.preflight_seconds{reasons}")
    if head.name in bad:
        raise UserError(f"{head.name}, the job's first node, failed the preflight: {bad[head.name]}; submit again with "
                        f"--exclude={head.name}")
    if too_few:
        raise UserError(f"the job has {sum(map(len, good))} good nodes, cluster.learner_nodes={cluster.learner_nodes} "
                        f"and cluster.rollout_nodes={cluster.rollout_nodes} need more{reasons}: ask for "
                        f"cluster.spare_nodes, or submit again with --exclude={','.join(bad) or '…'}")
    return Roles(learner, rollout, spares)


def share_a_fault(found: list[list[Node]], bad: Mapping[str, str]) -> bool:
    """Whether so many of the job's nodes are bad that it is hardly the nodes."""
    return bool(bad) and 2 * len(bad) >= sum(map(len, found))


class SlurmPlacement:
    """Raises UserError where the job's nodes do not hold the recipe's roles."""

    grace = 60.0
    """An srun that we kill leaves its tasks alive; it ends them by itself within Slurm's KillWait (30 s) and some."""

    def __init__(self, config: RunConfig, folder: RunFolder, allocation: Allocation):
        self.config, self.folder, self.nodes, self.job = config, folder, allocation.components, allocation.job
        self.places = places(config)
        self.log_dir = folder.log_dir / str(self.job)
        self.steps = Steps(config.cluster, self.log_dir, allocation.binds_cpus)
        self.roles = assign(config.cluster, self.nodes)
        # Below those of outgoing connections.
        self._first_port = config.engine.port or 10000 + allocation.job % 22 * PORTS
        self._engine_nodes: list[list[Node]] = []
        self._deal_engines()

    def check(self, supervisor: Supervisor, progress: Progress) -> None:
        """The preflight. Spare nodes take the places of bad ones."""
        if self.config.cluster.preflight_seconds:
            self._preflight(supervisor, progress)
        self._start_guard(supervisor)

    def _preflight(self, supervisor: Supervisor, progress: Progress) -> None:
        cluster, roles = self.config.cluster, self.roles
        check = Preflight(roles.learner, roles.rollout, roles.spares, cluster.gpus_per_node, cluster.preflight_seconds,
                          self.folder.path)
        begin = time.monotonic()
        bad = check.run(supervisor, self._node_check)
        for name, why in bad.items():
            progress.event("node_excluded", name, f"{name} failed the preflight: {why}")
        self.leave_out(bad)
        progress.note(f"preflight of {len(check.nodes)} nodes: {time.monotonic() - begin:.0f} s, slowest exchange "
                      f"{min(check.rates, default=0.0):.1f} GB/s")
        if check.untried:
            progress.note(f"the {cluster.preflight_seconds:.0f} s of cluster.preflight_seconds left no time for "
                          f"{len(check.untried)} exchanges, such as {check.untried[-1]}")

    def _start_guard(self, supervisor: Supervisor) -> None:
        others = [node.name for node in [*self.roles.learner, *self.roles.rollout] if node != self.head]
        if alive := self.alive(others):
            (node,) = (node for nodes in self.nodes for node in nodes if node.name == alive[0])
            command = [*self.steps.srun("guard", [node], 1), "bash", "-c", _GUARD, self.head.name, str(self.job)]
            supervisor.start([ProcessSpec("guard", command, orphan_signal=signal.SIGTERM)])

    def tend(self, supervisor: Supervisor, ended: dict[str, int]) -> None:
        if ended.pop("guard", None) is not None:  # its node is lost
            self._start_guard(supervisor)

    def _node_check(self, node: Node, address: str, port: int) -> ProcessSpec:
        command = [self.steps.python, "-m", "sao_megatron.placement.node_check", address, str(port)]
        return self.steps.step(f"preflight-{node.name}", [node], command, parts=False,
                               tasks=max(1, self.config.cluster.gpus_per_node))

    def leave_out(self, bad: Mapping[str, str]) -> None:
        """Deal the nodes out anew without these (name → why).

        Where too few are left: Unfinished if most are good, and the script (slurm/lib.sh) is to start the job again
        without the bad ones; else UserError, for it is something that all nodes share.
        """
        try:
            self.roles = assign(self.config.cluster, self.nodes, bad)
        except UserError:
            unwanted = os.environ.get("SAO_EXCLUDE")
            if unwanted is None or share_a_fault(self.nodes, bad):
                raise
            Path(unwanted).write_text("".join(f"{name}\n" for name in bad))
            reasons = "; ".join(f"{name} failed the preflight: {why}" for name, why in bad.items())
            raise Unfinished(f"{reasons}; no spare node is left, so the job is to get others") from None
        self._deal_engines()

    def _deal_engines(self) -> None:
        """The nodes of each engine: blocks of a node where GPUs are counted, else in turn."""
        rollout, span, each = self.roles.rollout, self.places.nodes_per_engine, self.places.engines_per_node
        if not self.config.cluster.gpus_per_node:
            self._engine_nodes = [[rollout[i % len(rollout)]] for i in range(self.config.engine.count)]
        else:
            self._engine_nodes = [rollout[i // each * span:][:span] for i in range(self.config.engine.count)]

    @property
    def head(self) -> Node:
        return self.nodes[0][0]

    # What the watch asks

    def plan(self) -> Plan:
        config, folder = self.config, str(self.folder.path)
        cli = [self.steps.python, "-m", "sao_megatron.cli"]
        urls = [] if config.mode == "replay" else [self._url(i) for i in range(config.engine.count)]
        engines = [self._engine(i, url) for i, url in enumerate(urls)]
        controller = None if config.mode == "replay" else self.steps.step(
            "controller", [self.head], [*cli, "controller", folder])
        learners = [] if config.mode == "rollout" else [self.steps.step(
            "learner", self.roles.learner, [*cli, "learner", folder], tasks=self.places.ranks_per_node,
            environment=learner_environment(bool(config.cluster.gpus_per_node)) | config.cluster.environment
            | {"MASTER_ADDR": self.head.address, "TORCHELASTIC_USE_AGENT_STORE": "True"})]
        servers = [] if config.mode == "replay" else range(config.sandbox.servers)
        sandboxes = [self.steps.step(f"sandbox-{i}", [self._sandbox_node(i)],
                                     [*cli, "sandbox", folder, "--index", str(i)]) for i in servers]
        return Plan(engines, controller, learners, urls, self.head.address, sandboxes,
                    [self._sandbox_url(i) for i in servers])

    def lost(self, name: str) -> str | None:
        return next(iter(down([node.name for node in self._nodes_of(name)], self.job)), None)

    def move(self, name: str) -> bool:
        """A spare for an engine of one node; an engine that spans nodes stays lost."""
        nodes = self._nodes_of(name)
        if not name.startswith("engine-") or len(nodes) > 1:
            return False
        alive = set(self.alive([node.name for node in self.roles.spares]))
        spare = next((node for node in self.roles.spares if node.name in alive), None)
        if spare is None:
            return False
        self.roles.spares.remove(spare)
        for others in self._engine_nodes:  # all engines of the lost node share its successor
            others[:] = [spare if node == nodes[0] else node for node in others]
        return True

    def alive(self, names: list[str]) -> list[str]:
        lost = down(names, self.job) if names else []
        return [name for name in names if name not in lost]

    def _nodes_of(self, name: str) -> list[Node]:
        if name.startswith("engine-"):
            return self._engine_nodes[int(name.removeprefix("engine-"))]
        if name.startswith("sandbox-"):
            return [self._sandbox_node(int(name.removeprefix("sandbox-")))]
        return self.roles.learner if name == "learner" else [self.head]

    # The roles' steps

    def _sandbox_node(self, index: int) -> Node:
        """The rollout nodes in turn: their cores idle while the GPUs sample."""
        return self.roles.rollout[index % len(self.roles.rollout)]

    def _sandbox_url(self, index: int) -> str:
        port = self._first_port + PORTS - 1 - index // len(self.roles.rollout)
        return f"http://{self._sandbox_node(index).address}:{port}"

    def _url(self, index: int) -> str:
        return f"http://{self._engine_nodes[index][0].address}:{self._first_port + index}"

    def _engine(self, index: int, url: str) -> ProcessSpec:
        config, nodes, gpus = self.config, self._engine_nodes[index], self.config.cluster.gpus_per_node
        address, tp = urlsplit(url), config.engine.tp
        there = config.model_copy(update={"engine": config.engine.model_copy(update={"host": address.hostname})})
        command = engine_command(there, self.folder.model_dir(config), address.port, bool(gpus))
        if len(nodes) > 1:
            command += ["--nnodes", str(len(nodes)), "--node-rank", "%t",
                        "--dist-init-addr", f"{address.hostname}:{self._first_port + config.engine.count + index}"]
        own = {}
        if gpus:
            first = index % self.places.engines_per_node * tp
            own["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + i) for i in range(min(tp, gpus)))
        return self.steps.step(f"engine-{index}", nodes, [self.steps.python, *command[1:]], own=own,
                               environment=engine_environment(bool(gpus), tp), parts=len(nodes) > 1)
