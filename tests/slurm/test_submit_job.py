"""`sao-megatron submit` before a real Slurm: what it refuses, what it queues, and twins of the recipes that run.

The cluster's nodes say that they have eight GPUs each, which nobody opens: the twins run on its CPUs.
"""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster, missing

from sao_megatron import cli

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MATH = CONFIGS / "qwen3-30b-a3b-math.yaml"
RUN_SECONDS = 240.0
"""For a twin: start-up, one or two steps, checkpoint, export."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=4, gpus=8) as cluster:
        yield cluster


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
    ("cluster.spare_nodes=1", ["needs 5 nodes of partition learners", "which has 4"]),
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


# If one fails, a recipe's kind of parallelism cannot train on a cluster: its layout over nodes, its algorithm, or the
# way from `submit` to the exported checkpoint.
@pytest.mark.parametrize("name", ["qwen3-30b-a3b-math", "qwen3-30b-a3b-coding", "glm-4.5-air-math", "glm-5-coding"])
def test_a_twin_trains(submit, cluster, tmp_path, name, capsys):
    code, out, error = submit(twin_of(name, tmp_path), "name=twin")
    assert code == 0, error
    job = out.split("queued as job ")[1].split(";")[0]
    deadline = time.monotonic() + RUN_SECONDS
    while (state := cluster.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, (tmp_path / f"runs/twin.slurm-{job}.out").read_text()
        time.sleep(1)
    assert state == "COMPLETED", (tmp_path / f"runs/twin.slurm-{job}.out").read_text()
    assert (tmp_path / "runs/twin/hf/config.json").is_file()
    assert cli.main(["status", "runs/twin"]) == 0
    shown = capsys.readouterr().out
    assert "step       2 of 2" in shown and "restarts   none" in shown, shown
