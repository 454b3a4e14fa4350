"""kill -9 of every part of a run, again and again: it goes on, and ends with the weights of an undisturbed one.

18 kills in two runs: one without engines, on a recorded stream, and a live one, whose own record is then replayed.
"""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import psutil
from real_run import BATCH, END_SECONDS, START_SECONDS, Run, query, recorded, stored
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sao_megatron.trajectory.store import Store

STEPS = 20
LIVE_STEPS = 26
"""While a controller starts again, the learner makes up to rollout.max_lag + 1 steps: enough for all kills."""
MODEL = ["parallel={ranks: 1}", f"steps={STEPS - 2}", "algorithm.critic_only_steps=2", f"batch.trajectories={BATCH}",
         "warmup.steps=3", "warmup.trajectories=16", "policy_optimizer.warmup_steps=5"]
SAVING = ["checkpoint.every=2", "restarts=20"]
LEARNER, CONTROLLER, ENGINE = "sao_megatron.cli learner", "sao_megatron.cli controller", "sglang::scheduler"
RANDOM = np.random.default_rng(0)


def soon(run: Run, condition: Callable[[], object], what: str) -> None:
    """Like Run.until, but for moments that pass quickly."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert run.process.poll() is None, f"the run ended before {what}:\n{run.out}\n{run.err}"
        assert time.monotonic() < deadline, f"waited for {what}:\n{run.out}\n{run.err}"
        time.sleep(0.005)


def is_saving(run: Run) -> bool:
    return any(run.folder.checkpoints.path.glob("*.partial-*"))


def find(run: Run, words: str) -> psutil.Process | None:
    """The process of the run with these words in its command line; not a copy that it forked, which is younger."""
    found = []
    for child in run.children():
        with suppress(psutil.NoSuchProcess):
            if words in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid, child))
    return min(found)[-1] if found else None


def writers(run: Run) -> list[psutil.Process]:
    """The forked copies of the rank that write its checkpoint."""
    with suppress(psutil.NoSuchProcess):
        if learner := find(run, LEARNER):
            return [child for child in learner.children() if child.cmdline() == learner.cmdline()]
    return []


def kill(run: Run, words: str, after: int) -> None:
    """Kill the process with these words `after` steps from now, or up to 0.3 s later."""
    wanted = run.steps() + after
    soon(run, lambda: run.steps() >= wanted, f"step {wanted}")
    time.sleep(RANDOM.uniform(0.0, 0.3) if after else 0.0)
    soon(run, lambda: find(run, words), f"a process with {words}")
    find(run, words).kill()


def kill_rank_while_saving(run: Run) -> None:
    soon(run, lambda: not is_saving(run), "a checkpoint to be complete")
    soon(run, lambda: is_saving(run), "the next checkpoint")
    find(run, LEARNER).kill()


def kill_writer(run: Run) -> None:
    while True:
        soon(run, lambda: writers(run), "a checkpoint's writer")
        try:
            writers(run)[0].kill()
            return
        except (IndexError, psutil.NoSuchProcess):
            continue  # it was done already: the next one


def weights(run: Run) -> dict[str, np.ndarray]:
    found = {}
    for file in (run.folder.path / "hf").glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def check_finished(run: Run, count: int = STEPS) -> None:
    """Every step once and in order, in the store as in TensorBoard, each on a batch of its own."""
    assert run.wait(START_SECONDS) == 0, f"{run.out}\n{run.err}"
    path = run.folder.store_path
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    with Store(path) as store:
        steps = store.steps()
    assert [row.step for row in steps] == list(range(count))
    trained = query(path, "SELECT step, COUNT(*), SUM(num_actions) FROM trajectories WHERE state = 'trained' "
                    "GROUP BY step ORDER BY step")
    assert trained == [(row.step, BATCH, row.metrics["tokens/action"]) for row in steps]
    events = EventAccumulator(str(run.folder.path / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("reward/mean")] == list(range(count))
    assert [checkpoint.step for checkpoint in run.folder.checkpoints.complete()][-1] == count


def check_same_weights(run: Run, other: Run) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


# If this fails, a learner that was killed (at its start, in a step, while it saves) trains something twice or not at
# all, or goes on from a torn checkpoint; or Ctrl-C leaves processes behind, or a run that cannot be continued.
def test_killed_replay_ends_with_the_same_bits(start_run, tmp_path):
    stream = ["--trajectories", str(recorded(tmp_path / "recorded.sqlite", STEPS * BATCH))]
    straight = start_run("straight", *MODEL, *stream, verb="replay")
    run = start_run("killed", *MODEL, *SAVING, *stream, verb="replay")
    kill(run, LEARNER, after=0)  # at its start
    kill_writer(run)
    kill(run, LEARNER, after=3)
    kill_rank_while_saving(run)
    kill_writer(run)
    kill(run, LEARNER, after=3)
    kill_rank_while_saving(run)
    kill_writer(run)
    kill_writer(run)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(END_SECONDS) == 130
    assert run.err == "sao-megatron: interrupted\n"
    assert run.survivors() == []
    run = start_run("killed", verb="resume")
    check_finished(run)
    assert straight.wait(START_SECONDS) == 0, f"{straight.out}\n{straight.err}"
    logs = "".join(path.read_text() for path in run.folder.log_dir.iterdir())
    assert logs.count("was not saved (the writer of rank 0 ended with exit code -9)") >= 1
    check_same_weights(run, straight)


# If this fails, a run that lost a part goes on with other weights than it says: a trajectory was lost, was trained
# twice, or was sampled by weights that carry another one's version.
def test_killed_live_run_trains_what_it_records(start_run):
    live = [*MODEL, f"steps={LIVE_STEPS - 2}"]
    run = start_run("live", *live, *SAVING, "evaluation.episodes=0", "publication.verify_every=1")
    seen: set[str] = set()
    for words, after in [(CONTROLLER, 1), (LEARNER, 1), (CONTROLLER, 1), (CONTROLLER, 1), (ENGINE, 1), (CONTROLLER, 1),
                         (LEARNER, 2), (CONTROLLER, 1), (LEARNER, 2)]:
        kill(run, words, after)
        seen |= run.appended()
    check_finished(run, LIVE_STEPS)
    trajectories = stored(run.folder.store_path)
    assert seen <= {trajectory.id for trajectory in trajectories}
    seqs = [seq for seq, in query(run.folder.store_path, "SELECT seq FROM trajectories")]
    assert len(set(seqs)) == len(seqs)
    again = start_run("again", *live, "--trajectories", str(run.folder.path), verb="replay")
    assert again.wait(START_SECONDS) == 0, f"{again.out}\n{again.err}"
    check_same_weights(run, again)
