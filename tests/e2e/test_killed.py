"""kill -9 of any process in the middle of a run: the run ends, says why, loses no finished trajectory.

Of the controller and the launcher: test_kill_and_resume.py; Ctrl-C: test_engines_killed.py.
"""
from __future__ import annotations

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
