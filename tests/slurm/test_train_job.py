"""Real Slurm jobs of real runs: from sbatch to the exported checkpoint, and through what a night can bring."""
from __future__ import annotations

import signal
import time

from job import Job

TWO_RANKS = ["parallel={ranks: 2, tp: 2, ep: 2}", "cluster.learner_nodes=2", "cluster.rollout_nodes=1"]


# If this fails, a job of two partitions does not place its roles, a run on several nodes does not come to its end, or
# several tasks do not convert what it made.
def test_heterogeneous_job_to_the_converted_export(job: Job):
    node = ["--mem=0", "--exclusive", "--gres=gpu:2"]
    job.submit("--partition=learners", "--nodes=2", *node, ":", "--partition=engines", "--nodes=1", *node, overrides=[
        "steps=3", "parallel={ranks: 4, tp: 2, ep: 2}", "cluster.learner_nodes=2", "cluster.rollout_nodes=1",
        "cluster.preflight_seconds=0"])
    job.until(job.steps, "the first step")
    for role in ("sao_megatron.cli learner", "sao_megatron.engine.cpu"):  # steps overlap: each sees the node's GPUs
        assert job.find(role).environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    job.until(job.run.export_path.exists, "the export")
    job.until(lambda: job.events("end"), "the launcher's end")
    job.check_store()
    assert job.steps() == 4
    places = {name: (job.log_dir / f"{name}.log").read_text().splitlines()[0].partition(":")[0]
              for name in ("learner-0", "learner-1", "learner-2", "learner-3", "engine-0", "controller")}
    assert places == {"learner-0": "node1", "learner-1": "node1", "learner-2": "node2", "learner-3": "node2",
                      "engine-0": "node3", "controller": "node1"}
    assert job.run.engine_urls()[0].startswith("http://127.0.0.13:")

    converted = job.run.path / "converted"
    job.submit_script("convert.sbatch", "--nodes=2", "--ntasks-per-node=1", "--mem=0", arguments=[
        "hf-to-megatron", str(job.run.export_path), str(converted)])
    job.until((converted / "state.json").exists, "the conversion of the export")


# If this fails, the script does not hand its arguments on, or a job that was refused says that it went well.
def test_evaluation_without_a_checkpoint(job: Job):
    job.submit_script("eval.sbatch", "--nodes=1", arguments=[str(job.run.path / "none"), "guess_number"])
    while job.cluster.state(job.id) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        time.sleep(0.3)
    assert job.cluster.job(job.id)["ExitCode"] == "2:0"
    assert "sao-megatron: " in job.out and str(job.run.path / "none") in job.out


# If this fails, a night on the cluster ends at the first engine that dies, rank that hangs, node that loses power, or
# time limit; or what was trained before is trained again, or lost.
def test_a_night(job: Job):
    cluster = job.cluster
    cluster.power_off("node3")
    cluster.power_on("node3", hidden=job.run.path.parent)  # its file system is not mounted
    cluster.wait_idle()
    job.submit("--nodes=5", "--mem=0", "--exclusive", overrides=[
        *TWO_RANKS, "steps=100000", "checkpoint.every=1", "restarts=2", "hang_timeout=20", "cluster.spare_nodes=2"])
    job.until(lambda: job.steps() >= 2, "the first steps")
    assert [event.what for event in job.events("node_excluded")] == ["node3"]
    assert "does not see the run's folder" in job.events("node_excluded")[0].why
    assert job.run.engine_urls()[0].startswith("http://127.0.0.14:")

    job.find("sao_megatron.engine.cpu").send_signal(signal.SIGKILL)
    job.find("sao_megatron.cli learner", rank=1).send_signal(signal.SIGSTOP)
    job.until(lambda: job.events("hang") and job.events("engine_restart"), "the hang and the engine to be noticed")
    hang = job.events("hang")[0].why
    assert "the others wait for rank 1 on node2" in hang and "rank 0 (node1) is in" in hang
    earlier = job.log_dir / "learner-0.1.log"
    job.until(earlier.exists, "the ranks to start again")
    assert "most recent call first" in earlier.read_text()
    job.until_more_steps(2, "after the hang")

    cluster.power_off("node4")
    job.until(lambda: len(job.events("engine_restart")) == 2, "the engine to move")
    assert job.run.engine_urls()[0].startswith("http://127.0.0.15:")
    job.until_more_steps(2, "with the engine elsewhere")

    cluster.power_on("node4")
    cluster.power_off("node2")
    job.until(lambda: job.events("requeue"), "the loss of a learner's node to be noticed")
    assert "node2 is down" in job.events("requeue")[0].why
    cluster.power_on("node2")
    job.until(lambda: len(job.events("start")) == 2, "the job to start again")
    job.until_more_steps(1, "after the loss of a learner's node")

    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.until(lambda: len(job.events("requeue")) == 2, "the end before the time limit")
    saved = job.run.checkpoints.latest().step
    job.until(lambda: len(job.events("start")) == 3, "the job to start again")
    assert job.events("start")[2].step == saved == job.steps()

    job.until(lambda: "logs are in" in job.out.rpartition("start 3")[2], "the roles to start")
    cluster.power_off("node1")
    job.until(lambda: job.cluster.job(job.id)["Restarts"] == "3", "the loss of the first node to be noticed")
    cluster.power_on("node1")
    job.until(lambda: len(job.events("start")) == 4, "the job to start again")
    job.until_more_steps(1, "after the loss of the first node")
    job.check_store()
