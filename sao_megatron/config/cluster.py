"""Section of a recipe about the Slurm nodes of a run, and how learner ranks and engines lie on them."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from sao_megatron.config.section import Section
from sao_megatron.errors import UserError

if TYPE_CHECKING:
    from sao_megatron.config.run import RunConfig

PORTS = 1024
"""That a job keeps to itself: from the first on, one for each engine and one for the meeting of each engine's nodes;
from the last down, those of the sandbox servers, which every rollout node needs as often as it has servers."""


class ContainerSection(Section):
    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """none: the processes run in `cluster.venv`. pyxis: srun --container-image (enroot). apptainer: apptainer exec."""
    image: str | None = None
    """What the runtime takes: a .sqsh file or registry#image:tag for pyxis, a .sif file for apptainer."""
    mounts: list[str] = []
    """host:container paths to mount; runs_dir, the checkpoint and the repository must be among them."""

    @model_validator(mode="after")
    def _has_image(self):
        if (self.runtime == "none") != (self.image is None):
            raise ValueError(f"runtime={self.runtime} with image={self.image}: give an image with pyxis or apptainer, "
                             "and none without")
        return self


class ClusterSection(Section):
    """What slurm/train.sbatch and `sao-megatron submit` ask Slurm for; `sao-megatron train` does not look at it."""

    learner_nodes: int = Field(1, ge=1)
    """Nodes of the learner's ranks; the first also runs store, controller and launcher."""
    rollout_nodes: int = Field(1, ge=1)
    """Nodes of the engines."""
    spare_nodes: int = Field(0, ge=0)
    """Further nodes, of the learner's kind, that take the places of those that fail the preflight."""
    gpus_per_node: int = Field(0, ge=0)
    """0 = nodes without GPUs."""
    gpu_memory_gb: float = Field(79.1, gt=0)
    """Memory of one GPU in GiB, as CUDA shows it, for the estimate that `submit` makes: 79.1 of an H100 with 80 GB."""
    gres: str = "gpu"
    """Slurm's name of the GPUs, such as gpu or gpu:h100; empty where whole nodes come without asking for GPUs."""
    learner_partition: str | None = None
    rollout_partition: str | None = None
    """Another than the learner's makes the job heterogeneous; None = the learner's."""
    account: str | None = None
    time: str = Field("24:00:00", pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$", coerce_numbers_to_str=True)
    """Time limit of one job, as sbatch takes it: minutes, hours:minutes:seconds or days-hours:minutes:seconds."""
    sbatch_args: list[str] = []
    """More options of sbatch for every component, such as --qos=high, --reservation=x or --exclude=node7."""
    signal_seconds: int = Field(600, ge=30)
    """So long before the time limit the run saves a checkpoint and goes back into the queue."""
    requeues: int = Field(10, ge=0)
    """Most times one job goes back into the queue without having got further; one that does is counted anew."""
    chain: int = Field(1, ge=1)
    """Jobs that `submit` queues one behind the other (--dependency=singleton), for runs longer than the limit."""
    preflight_seconds: float = Field(60.0, ge=0)
    """Most seconds for the check of all nodes before the roles start (placement/preflight.py); 0 = no check."""
    interface: str | None = None
    """Network interface for NCCL's and Gloo's sockets, such as eth0 (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); None =
    they choose: NCCL InfiniBand's, else the first, Gloo the one of the host name's address."""
    environment: dict[str, str] = {}
    """Environment variables of all processes, such as NCCL_IB_HCA."""
    venv: Path | None = None
    """Folder of the virtual environment on the nodes; None = .venv of the repository."""
    container: ContainerSection = ContainerSection()

    @model_validator(mode="after")
    def _has_time(self):
        if self.signal_seconds >= seconds_of(self.time):
            raise ValueError(f"signal_seconds={self.signal_seconds} is not less than time={self.time}: the run would "
                             "be told to save itself before it has begun")
        return self

    @property
    def heterogeneous(self) -> bool:
        """Whether learner and engines need two components of one job."""
        return self.rollout_partition not in (None, self.learner_partition)


def seconds_of(time: str) -> int:
    """Seconds of a time limit in one of sbatch's spellings: m, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3] if len(parts) < 3 else parts
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True)
class Placement:
    """How many processes a node gets. All nodes of a role get the same number, but for CPU engines."""

    ranks_per_node: int
    """Learner ranks."""
    engines_per_node: int
    """Engines that one rollout node holds, the last nodes perhaps fewer; 1 where an engine spans nodes."""
    nodes_per_engine: int
    """More than 1 where engine.tp is larger than a node: the engine is then one process per node."""


def placement(config: RunConfig) -> Placement:
    """Raises UserError where ranks or engines do not fill the nodes evenly: GPUs would idle, or ranks share one."""
    cluster, engine, ranks = config.cluster, config.engine, config.parallel.ranks
    if (ports := 2 * engine.count - (-config.sandbox.servers // cluster.rollout_nodes)) > PORTS:
        raise UserError(f"engine.count={engine.count} and sandbox.servers={config.sandbox.servers} need {ports} ports, "
                        f"a job has {PORTS}: take fewer and larger engines (engine.tp)")
    if ranks % cluster.learner_nodes:
        raise UserError(f"cluster.learner_nodes={cluster.learner_nodes} does not divide parallel.ranks={ranks}: every "
                        "learner node must get the same number of ranks")
    gpus = cluster.gpus_per_node
    if not gpus:
        if engine.count < cluster.rollout_nodes:
            raise UserError(f"cluster.rollout_nodes={cluster.rollout_nodes} is more than engine.count={engine.count}: "
                            "nodes would stay empty")
        return Placement(ranks // cluster.learner_nodes, -(-engine.count // cluster.rollout_nodes), 1)
    if ranks != cluster.learner_nodes * gpus:
        raise UserError(f"parallel.ranks={ranks} must be the number of the learner's GPUs, cluster.learner_nodes × "
                        f"cluster.gpus_per_node = {cluster.learner_nodes} × {gpus} = {cluster.learner_nodes * gpus}")
    if engine.count * engine.tp != cluster.rollout_nodes * gpus:
        raise UserError(f"engine.count × engine.tp = {engine.count} × {engine.tp} = {engine.count * engine.tp} must be "
                        f"the number of the engines' GPUs, cluster.rollout_nodes × cluster.gpus_per_node = "
                        f"{cluster.rollout_nodes} × {gpus} = {cluster.rollout_nodes * gpus}")
    if gpus % engine.tp and engine.tp % gpus:
        raise UserError(f"engine.tp={engine.tp} neither divides cluster.gpus_per_node={gpus} nor is a multiple of it: "
                        "an engine would share a node unevenly")
    return Placement(gpus, max(1, gpus // engine.tp), max(1, engine.tp // gpus))
