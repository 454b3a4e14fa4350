"""`sao-megatron submit` before a real Slurm: what it refuses, what it queues, and a recipe's twin that runs to its end.

The cluster's nodes say that they have eight GPUs each, which nobody opens: the twin runs on its CPUs.
"""
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import Job
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sao_megatron import cli
from sao_megatron.learner import memory
from sao_megatron.weights.hf import read_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MATH = CONFIGS / "qwen3-30b-a3b-math.yaml"


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch, capsys):
    """submit(recipe, *arguments): the verb in a folder of its own; returns (exit code, stdout, stderr)."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SAO_PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def run(recipe: Path, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["submit", str(recipe), *arguments])
        return code, *capsys.readouterr()
    return run


# If this fails, a recipe that the cluster can hold is refused, or nobody asks the cluster.
def test_dry_run_asks_slurm(submit, cluster, tmp_path):
    code, out, error = submit(MATH, "--dry-run")
    assert code == 0, error
    assert "to start at" in out and "nodes node[1-4]" in out
    code, out, error = submit(MATH, "--dry-run", "cluster.learner_partition=learners",
                              "cluster.rollout_partition=engines")
    assert code == 0 and " : --nodes=2 " in out, error
    assert cluster.run("squeue", "--noheader") == "" and not list(tmp_path.iterdir())


# If one fails, the job waits in the queue for what the cluster does not have, or Slurm's refusal is a traceback.
@pytest.mark.parametrize(("overrides", "parts"), [
    ("cluster.gpus_per_node=16 parallel.ranks=32 parallel.ep=32 engine.count=8",
     ["cluster.gpus_per_node=16", "partition learners have 8 GPUs"]),
    ("cluster.learner_partition=h100", ["partition 'h100'", "engines, learners"]),
    ("cluster.spare_nodes=2", ["needs 6 nodes of partition learners", "which has 5"]),
    ("cluster.sbatch_args=[--nodelist=node9]", ["Slurm refuses the job", "node"]),
])
def test_what_the_cluster_does_not_have(submit, overrides, parts):
    code, _, error = submit(MATH, "--dry-run", *overrides.split())
    assert code == 2 and error.count("\n") == 1, error
    assert all(part in error for part in parts), error


def twin_of(name: str, folder: Path) -> Path:
    path = folder / "twin.yaml"
    subprocess.run([sys.executable, str(ROOT / "tools/twin.py"), str(CONFIGS / f"{name}.yaml"), str(path)], check=True,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    return path


def tensor_bytes(checkpoint: Path) -> int:
    """Of all tensors that a checkpoint holds, each counted once."""
    found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata.values()
    return sum(math.prod(one.size) * one.properties.dtype.itemsize for one in found
               if isinstance(one, TensorStorageMetadata))


# If this fails, a kind of parallelism cannot train on a cluster, the roles of a job over two partitions are misplaced,
# or the way from `submit` over a bad node, the time limit and drained nodes to the exported checkpoint, and to its
# conversion, ends before its end.
def test_a_twin_trains(submit, job: Job, tmp_path, capsys):
    job.cluster.power_off("node2")
    job.cluster.power_on("node2", hidden=tmp_path)  # where it sees no run's folder
    job.cluster.wait_idle()
    code, out, error = submit(
        twin_of("qwen3-30b-a3b-math", tmp_path), f"runs_dir={tmp_path}", "name=run", "steps=4", "checkpoint.every=100",
        "cluster.signal_seconds=240",  # on a busy machine a checkpoint takes long
        "cluster.learner_partition=learners", "cluster.rollout_partition=engines", "cluster.sbatch_args=[--gres=gpu:2]")
    assert code == 0, error
    job.id = out.split("queued as job ")[1].split(";")[0]
    job.out_path = tmp_path / f"run.slurm-{job.id}.out"
    job.until(job.steps, "the first step")
    assert "node2 failed the preflight" in job.events("requeue")[0].why  # and its place is taken by another
    for role in ("sao_megatron.cli learner", "sao_megatron.engine.cpu"):  # steps overlap: each sees the node's GPUs
        assert job.find(role).environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    places = {name: (job.log_dir / f"{name}.log").read_text().splitlines()[0].partition(":")[0]
              for name in ("learner-0", "learner-1", "learner-2", "learner-3", "engine-0", "controller")}
    first, second, other = places["learner-0"], places["learner-2"], places["engine-0"]
    assert places == {"learner-0": first, "learner-1": first, "learner-2": second, "learner-3": second,
                      "engine-0": other, "controller": first}
    assert len({first, second, other, "node2"}) == 4
    urls = job.run.engine_urls()
    assert urls[0].startswith(f"http://127.0.0.1{other.removeprefix('node')}:")

    job.cluster.drain(other)
    job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # what Slurm does before the time limit
    job.until(lambda: len(job.events("requeue")) == 2, "the end before the time limit")
    saved = job.run.checkpoints.latest().step
    job.until(lambda: len(job.events("start")) == 3, "the job to start again")
    assert job.events("start")[2].step == saved == job.steps() < 5
    job.until(lambda: job.run.engine_urls() != urls, "the engine to be placed elsewhere than on the drained node")
    job.cluster.drain(*job.cluster.nodes)  # in use, so they go on until the job ends

    job.until(lambda: job.events("end"), "the export and the launcher's end")
    assert job.exit_code() == "0:0"
    job.check_store()
    assert job.steps() == 5
    foretold = memory.checkpoint(job.run.config(), read_config(job.run.export_path))
    assert tensor_bytes(job.run.checkpoints.latest().path) == round(foretold * memory.GIB)
    assert cli.main(["status", str(job.run.path)]) == 0
    shown = capsys.readouterr().out
    assert "step       5 of 5" in shown and "time limit, with a checkpoint" in shown, shown

    job.cluster.restore()
    converted = job.run.path / "converted"
    job.submit_script("convert.sbatch", "--nodes=2", "--ntasks-per-node=1", "--mem=0", arguments=[
        "hf-to-megatron", str(job.run.export_path), str(converted)])
    job.until((converted / "state.json").exists, "the conversion of the export")
