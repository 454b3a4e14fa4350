"""kill -9 of a process that may not be started again: the run ends, says why, loses no finished trajectory."""
from __future__ import annotations

import signal
from pathlib import Path

import psutil
from real_run import BATCH, END_SECONDS, START_SECONDS, Run, query, stored

from sao_megatron.rollout.tasks.guess_number import BOS, EOT, HIGHER, LOWER
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status

AGENT = Path(__file__).with_name("guessing_agent.py")
ENDLESS = ["steps=100000", "algorithm.critic_only_steps=0", f"batch.trajectories={BATCH}", "evaluation.episodes=0",
           "warmup.steps=1", "publication.verify_every=0", "engine.restarts=0"]


def pick(run: Run, *words: str) -> psutil.Process:
    """The one process of the run whose command line (or environment, as NAME=value) holds all the words."""
    (found,) = [child for child in run.children() if all(word in description(child) for word in words)]
    return found


def description(process: psutil.Process) -> str:
    environment = [f"{name}={value}" for name, value in process.environ().items() if name == "RANK"]
    return " ".join([*process.cmdline(), *environment])


def check_blamed(run: Run, name: str, reason: str = "") -> None:
    """A run that has ended names the process that was killed, in one sentence, and nothing of it lives on."""
    assert run.err.startswith(f"sao-megatron: {name} ended unexpectedly with signal SIGKILL")
    sentence = run.err.splitlines()[0]
    assert reason in sentence and f"its log is {run.folder.log_dir / name}.log" in sentence
    assert "Traceback" not in sentence
    assert run.survivors() == []


def check_store(run: Run, appended: set[str]) -> None:
    """The store is whole: it holds `appended`, each can be read, and none was trained in two steps."""
    path = run.folder.store_path
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    trajectories = stored(path)
    assert appended <= {trajectory.id for trajectory in trajectories}
    with Store(path) as store:
        steps, counts = store.steps(), store.counts()
    assert sum(counts.values()) == len(trajectories)
    assert [row.step for row in steps] == list(range(len(steps)))
    trained = query(path, "SELECT step, COUNT(*), SUM(num_actions) FROM trajectories WHERE state = 'trained' "
                    "GROUP BY step ORDER BY step")
    assert trained == [(row.step, BATCH, row.metrics["tokens/action"]) for row in steps]
    assert counts["leased"] in (0, BATCH)  # a batch was being trained, or none was


# If this fails, a run whose learner was killed hangs or leaves processes behind, hides the cause, or loses what was
# sampled; or what agents say at a run's gateway does not reach the learner as it was sampled.
def test_killed_learner_ends_a_run_of_agents_at_the_gateway(start_run):
    run = start_run("killed", *ENDLESS, f"task.name={AGENT}:GuessingAgent", "task.options={}",
                    "rollout.concurrency=16")
    run.until(lambda: run.steps() >= 3, "three steps")
    victim, appended = pick(run, "sao_megatron.cli learner", "RANK=0"), run.appended()
    victim.kill()
    assert run.wait(END_SECONDS) == 1
    check_blamed(run, "learner-0")
    assert len(appended) >= 3 * BATCH
    check_store(run, appended)
    for trajectory in stored(run.folder.store_path):
        assert (trajectory.task, trajectory.status) == ("guessing_agent", Status.COMPLETED)
        first, *observed = trajectory.tokens[~trajectory.action_mask].tolist()
        hints = [token for token in observed if token != EOT]  # which closes a turn that was cut off
        assert first == BOS and set(hints) <= {HIGHER, LOWER} and trajectory.segments.tolist() == [0]
        assert len(hints) + 1 == trajectory.info["turns"] == trajectory.turns.max() + 1


# If this fails, steps are lost with a controller that brings nothing any more, since the learner gives up without them.
def test_a_learner_without_trajectories_saves_its_steps(start_run):
    run = start_run("starved", *ENDLESS, "checkpoint.every=100000", "rollout.starvation_timeout=20")
    run.until(lambda: run.steps() >= 2, "two steps")
    pick(run, "sao_megatron.cli controller").send_signal(signal.SIGSTOP)
    assert run.wait(START_SECONDS) == 1
    assert "no batch of 16 trajectories became ready within rollout.starvation_timeout=20 s" in run.err
    assert run.folder.checkpoints.latest().step == run.steps() >= 2
