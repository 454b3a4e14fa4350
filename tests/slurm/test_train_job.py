"""Real Slurm jobs of the demo recipe: what is refused, and what a night can bring. (Whole runs: test_submit_job.py.)"""
from __future__ import annotations

import signal

from job import Job

TWO_RANKS = ["parallel={ranks: 2, tp: 2, ep: 2}", "cluster.learner_nodes=2", "cluster.rollout_nodes=1"]


# If this fails, the script does not hand its arguments on, or a job that was refused says that it went well.
def test_evaluation_without_a_checkpoint(job: Job):
    job.submit_script("eval.sbatch", "--nodes=1", arguments=[str(job.run.path / "none"), "guess_number"])
    assert job.exit_code() == "2:0"
    assert "sao-megatron: " in job.out and str(job.run.path / "none") in job.out


# If this fails, a night on the cluster ends at the first node that is bad, engine that dies (also on a drained
# node), rank that hangs, node that loses power, or node that is set down and back at once; or what was trained before
# is trained again, or lost.
def test_a_night(job: Job):
    cluster = job.cluster
    cluster.power_off("node3")
    cluster.power_on("node3", hidden=job.run.path.parent)  # its file system is not mounted
    cluster.wait_idle()
    job.submit("--nodes=5", "--mem=0", "--exclusive", overrides=[
        *TWO_RANKS, "steps=100000", "checkpoint.every=1", "restarts=2", "hang_timeout=10", "cluster.spare_nodes=2"])
    job.until(job.steps, "the first step")
    assert [event.what for event in job.events("node_excluded")] == ["node3"]
    assert "does not see the run's folder" in job.events("node_excluded")[0].why
    cluster.power_off("node3")
    cluster.power_on("node3")  # repaired
    assert job.run.engine_urls()[0].startswith("http://127.0.0.14:")

    cluster.drain("node4")
    job.find("sao_megatron.engine.cpu").send_signal(signal.SIGKILL)
    job.find("sao_megatron.cli learner", rank=1).send_signal(signal.SIGSTOP)
    job.until(lambda: job.events("hang") and job.events("engine_restart"), "the hang and the engine to be noticed")
    hang = job.events("hang")[0].why
    assert "the others wait for rank 1 on node2" in hang and "rank 0 (node1) is in" in hang
    earlier = job.log_dir / "learner-0.1.log"
    job.until(earlier.exists, "the ranks to start again")
    assert "most recent call first" in earlier.read_text()
    job.until_more_steps(1, "after the hang, with the engine still on the drained node")
    assert job.run.engine_urls()[0].startswith("http://127.0.0.14:")

    cluster.power_off("node4")
    job.until(lambda: len(job.events("engine_restart")) == 2, "the engine to move")
    assert job.run.engine_urls()[0].startswith("http://127.0.0.15:")
    job.until_more_steps(1, "with the engine elsewhere")

    cluster.power_on("node4")
    cluster.undrain("node4")
    cluster.power_off("node2")
    job.until(lambda: job.events("requeue"), "the loss of a learner's node to be noticed")
    assert "node2 is down" in job.events("requeue")[0].why
    cluster.power_on("node2")
    job.until(lambda: len(job.events("start")) == 2, "the job to start again")
    job.until_more_steps(1, "after the loss of a learner's node")

    assert job.run.engine_urls()[0].startswith("http://127.0.0.13:")
    cluster.set_down("node3")
    job.until(lambda: len(job.events("engine_restart")) == 3, "the engine to leave a node that Slurm took away")
    assert "node3 is down" in job.events("engine_restart")[2].why
    assert job.run.engine_urls()[0].startswith("http://127.0.0.14:")
    job.until_more_steps(1, "without that node")

    cluster.power_off("node1")  # which takes the launcher along
    job.until(lambda: job.cluster.job(job.id)["Restarts"] == "2", "the loss of the first node to be noticed")
    cluster.power_on("node1")
    job.until(lambda: len(job.events("start")) == 3, "the job to start again")
    assert job.events("start")[2].step == job.run.checkpoints.latest().step
    job.check_store()


# If this fails, a job that has lost the node of its only engine goes back into the queue without the steps that its
# learner, which lives, has made since the newest checkpoint.
def test_the_learner_saves_when_the_last_engine_is_lost(job: Job):
    job.submit("--nodes=3", "--mem=0", "--exclusive", overrides=[
        *TWO_RANKS, "steps=100000", "checkpoint.every=100000"])
    job.until(lambda: job.steps() >= 3, "three steps")
    job.cluster.set_down("node3")
    job.until(lambda: len(job.events("start")) == 2, "the job to start again")
    assert "node3 is down, where the last engine (engine-0) ran" in job.events("requeue")[0].why
    assert job.events("start")[1].step == job.steps() >= 3
