"""The sbatch command of a recipe, and what Slurm says of it where a controller answers."""
from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sao_megatron.config import ClusterSection, RunConfig
from sao_megatron.errors import RunError, UserError
from sao_megatron.run_folder import RunFolder

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"
ASK_SECONDS = 30.0
"""For one of Slurm's commands."""


def command(config: RunConfig, script: Path = SCRIPT) -> list[str]:
    """One job; a heterogeneous one has two components, the learner's (with the spares) and the engines'."""
    cluster = config.cluster
    job = [f"--job-name={config.name}", f"--output={config.runs_dir}/{config.name}.slurm-%j.out",
           f"--signal=B:USR1@{cluster.signal_seconds}"]
    if cluster.chain > 1:
        job.append("--dependency=singleton")
    learners = cluster.learner_nodes + cluster.spare_nodes
    if cluster.heterogeneous:
        parts = [*job, *_component(cluster, learners, cluster.learner_partition), ":",
                 *_component(cluster, cluster.rollout_nodes, cluster.rollout_partition)]
    else:
        parts = [*job, *_component(cluster, learners + cluster.rollout_nodes, cluster.learner_partition)]
    return ["sbatch", *parts, str(script), str(RunFolder(config.run_dir).submitted_path)]


def _component(cluster: ClusterSection, nodes: int, partition: str | None) -> list[str]:
    """Whole nodes: ranks, engines, store and controller are dealt out inside the job."""
    options = [f"--nodes={nodes}", f"--time={cluster.time}", "--exclusive", "--mem=0", "--no-kill"]
    if cluster.gpus_per_node and cluster.gres:
        options.append(f"--gres={cluster.gres}:{cluster.gpus_per_node}")
    options += [f"--partition={partition}"] if partition else []
    options += [f"--account={cluster.account}"] if cluster.account else []
    return options + cluster.sbatch_args


def answers() -> bool:
    """Whether this machine has sbatch, and a controller behind it."""
    return bool(shutil.which("sbatch")) and _ask("sinfo", "--noheader", "--format=%R").returncode == 0


def check_nodes(cluster: ClusterSection) -> None:
    """Raise UserError if a partition is unknown, has fewer nodes than are asked for, or fewer GPUs on each."""
    learners, engines = cluster.learner_nodes + cluster.spare_nodes, cluster.rollout_nodes
    if not cluster.heterogeneous:
        _check_partition(cluster, cluster.learner_partition, learners + engines)
        return
    _check_partition(cluster, cluster.learner_partition, learners)
    _check_partition(cluster, cluster.rollout_partition, engines)


def _check_partition(cluster: ClusterSection, partition: str | None, wanted: int) -> None:
    found = _nodes()
    name = partition or next((name for name, is_default, *_ in found if is_default), None)
    if name is None:
        raise UserError("this cluster has no default partition: give cluster.learner_partition")
    if not (mine := [(count, gpus) for other, _, count, gpus in found if other == name]):
        known = ", ".join(sorted({other for other, *_ in found}))
        raise UserError(f"partition {name!r} is not on this cluster: its partitions are {known} "
                        "(cluster.learner_partition, cluster.rollout_partition)")
    if cluster.gpus_per_node and cluster.gres:
        most = max(gpus for _, gpus in mine)
        if most < cluster.gpus_per_node:
            raise UserError(f"cluster.gpus_per_node={cluster.gpus_per_node}: the nodes of partition {name} have {most} "
                            "GPUs (gres, `sinfo --format='%R %G'`): ask for as many, or name another partition")
        mine = [(count, gpus) for count, gpus in mine if gpus >= cluster.gpus_per_node]
    if (total := sum(count for count, _ in mine)) < wanted:
        raise UserError(f"the recipe needs {wanted} nodes of partition {name} (cluster.learner_nodes, rollout_nodes, "
                        f"spare_nodes), which has {total}")


def _nodes() -> list[tuple[str, bool, int, int]]:
    """(partition, whether it is the default, nodes, GPUs of each) of each kind of node."""
    lines = _ask("sinfo", "--noheader", "--format=%R|%P|%D|%G").stdout.splitlines()
    kinds = [line.strip().split("|") for line in lines]
    return [(name, starred.endswith("*"), int(count), gpus_in(gres)) for name, starred, count, gres in kinds]


def gpus_in(gres: str) -> int:
    """GPUs of a node by its gres, such as `gpu:h100:8(S:0-1),nvme:1`."""
    return sum(int(match[1]) for match in re.finditer(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def test_only(parts: Sequence[str]) -> str:
    """Have Slurm say whether it would take the job. Returns its line; raises UserError with its words if not."""
    done = _ask(parts[0], "--test-only", *parts[1:])
    said = " ".join((done.stderr + done.stdout).split()).replace("sbatch: ", "")
    if done.returncode:
        raise UserError(f"Slurm refuses the job: {said}")
    return said


def submit(parts: Sequence[str]) -> str:
    """Queue the job; returns its id."""
    done = _ask(parts[0], "--parsable", *parts[1:])
    if done.returncode:
        raise RunError(f"sbatch failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def _ask(*words: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"{words[0]} did not answer within {ASK_SECONDS:.0f} s: is the cluster's controller up?"
                       ) from None
