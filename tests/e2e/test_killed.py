"""kill -9 of any process in the middle of a run, and Ctrl-C: the run ends, says why, loses no finished trajectory."""
from __future__ import annotations

import signal
import time

import psutil
import pytest
from real_run import BATCH, END_SECONDS, Run, query, stored

from sao_megatron.trajectory.store import Store

ENDLESS = ["steps=100000", "algorithm.critic_only_steps=0", f"batch.trajectories={BATCH}", "evaluation.episodes=0",
           "warmup.steps=1", "publication.verify_every=0", "engine.restarts=0"]


def pick(run: Run, *words: str) -> psutil.Process:
    """The one process of the run whose command line (or environment, as NAME=value) holds all the words."""
    (found,) = [child for child in run.children() if all(word in description(child) for word in words)]
    return found


def description(process: psutil.Process) -> str:
    environment = [f"{name}={value}" for name, value in process.environ().items() if name == "RANK"]
    return " ".join([*process.cmdline(), *environment])


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


# If one fails, a run that lost a part hangs or leaves processes behind, hides the cause, or loses what was sampled.
@pytest.mark.parametrize(("words", "name", "reason"), [
    (["sao_megatron.cli controller"], "controller", ""),
    (["sao_megatron.cli learner", "RANK=0"], "learner-0", ""),
    (["sglang::scheduler"], "engine-0", "Subprocess scheduler_0"),
])
def test_killed_process_ends_the_run(start_run, words, name, reason):
    run = start_run("killed", *ENDLESS)
    run.until(lambda: run.steps() >= 3, "three steps")
    victim, appended = pick(run, *words), run.appended()
    victim.kill()
    assert run.wait(END_SECONDS) == 1
    log = run.folder.log_dir / f"{name}.log"
    assert run.err.startswith(f"sao-megatron: {name} ended unexpectedly with signal SIGKILL")
    sentence = run.err.splitlines()[0]
    assert reason in sentence and f"its log is {log}" in sentence and "Traceback" not in sentence
    assert run.survivors() == []
    assert len(appended) >= 3 * BATCH
    check_store(run, appended)


# If this fails, Ctrl-C leaves processes behind, or the store in pieces.
def test_ctrl_c(start_run):
    run = start_run("interrupted", *ENDLESS)
    run.until(lambda: run.steps() >= 3, "three steps")
    appended = run.appended()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(END_SECONDS) == 130
    assert run.err == "sao-megatron: interrupted\n"
    assert run.survivors() == []
    check_store(run, appended)


# If this fails, a `train` that is killed, as by the kernel for want of memory, leaves engines and ranks running.
def test_killed_launcher(start_run):
    run = start_run("orphaned", *ENDLESS)
    run.until(lambda: run.steps() >= 3, "three steps")
    run.children()
    appended = run.appended()
    run.process.kill()
    deadline = time.monotonic() + END_SECONDS
    while run.survivors() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.survivors() == []
    check_store(run, appended)
