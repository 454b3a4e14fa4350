"""kill -9 of engines, one and then all: the run goes on with what is left, and with what comes back; and ends when
nothing may come back."""
from __future__ import annotations

import signal
from contextlib import suppress

import psutil
from real_run import END_SECONDS, START_SECONDS, Run, stored
from test_killed import ENDLESS, check_blamed, check_store, pick

from sao_megatron.trajectory.store import Store


def kill_scheduler(run: Run, engine: int) -> None:
    """SIGKILL to the process that holds engine number `engine`'s weights; its server ends by itself."""
    port = run.folder.engine_urls()[engine].rpartition(":")[2]
    for child in run.children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if "sglang::scheduler" in " ".join(child.cmdline()) and port in psutil.Process(child.ppid()).cmdline():
                child.kill()
                return
    raise AssertionError(f"engine {engine} has no scheduler")


# If this fails, the death of one engine of many ends a run, one that was started again never serves, or what was
# recorded of the routing is lost or mixed up on the way; or a run that has lost its last engine hangs, or hides why.
def test_engines_die_and_come_back(start_run):
    run = start_run("engines", *ENDLESS, "engine.count=2", "engine.restarts=1", "publication.verify_every=1",
                    "rollout.routing_replay=true")
    learner = run.folder.log_dir / "learner-0.log"

    def formed() -> int:
        """How often the learner formed groups with both engines after its start."""
        return sum(all(url in line for url in run.folder.engine_urls())
                   for line in learner.read_text().splitlines() if "forming new groups" in line)

    run.until(lambda: run.steps() >= 3, "three steps")
    kill_scheduler(run, 1)
    run.until(lambda: "engine-1 ended" in run.out, "the launcher to notice")
    steps = run.steps()
    run.until(lambda: run.steps() >= steps + 2, "steps with one engine")
    kill_scheduler(run, 0)
    run.until(lambda: "engine-0 ended" in run.out, "the launcher to notice")
    run.until(lambda: formed() >= 1, "both engines to have weights again", 2 * START_SECONDS)
    steps = run.steps()
    run.until(lambda: run.steps() >= steps + 3, "steps with both engines")
    appended = run.appended()
    for engine in range(2):  # which may not be started again: the run goes on without one, and ends with the other
        kill_scheduler(run, engine)
    assert run.wait(END_SECONDS) == 1
    last = "engine-0" if "engine-1 ended again" in run.out else "engine-1"
    check_blamed(run, last, "Subprocess scheduler_0")
    check_store(run, appended)
    check_routing(run)


# If this fails, a learner that looks for the engine it has just lost, for the only one there is, is not told that the
# run ends, and its steps are lost with it.
def test_the_learner_saves_when_the_last_engine_is_lost(start_run):
    run = start_run("last", *ENDLESS, "checkpoint.every=100000")
    run.until(lambda: run.steps() >= 3, "three steps")
    log, learner = run.folder.log_dir / "learner-0.log", pick(run, "sao_megatron.cli learner", "RANK=0")

    def looks_for_engines() -> bool:
        learner.send_signal(signal.SIGUSR2)  # it writes where it is
        return log.read_text().count(" in _choose") >= 3  # else it may be on its way through

    run.process.send_signal(signal.SIGSTOP)  # so that the learner is the first to notice
    kill_scheduler(run, 0)
    run.until(looks_for_engines, "the learner to look for engines")
    steps = run.steps()
    run.process.send_signal(signal.SIGCONT)
    assert run.wait(END_SECONDS) == 1
    check_blamed(run, "engine-0", "Subprocess scheduler_0")
    assert run.steps() == steps == run.folder.checkpoints.latest().step


def check_routing(run: Run) -> None:
    """Most tokens keep their routing, whichever engine sampled them, and the learner trained with it."""
    with Store(run.folder.store_path) as store:
        shares = [row.metrics["routing/replayed"] for row in store.steps()]
    # A publication retracts episodes of very few tokens here: a batch of those keeps about half.
    assert 0 < min(shares) and max(shares) == 1 and sum(shares) / len(shares) > 0.8, shares
    for trajectory in stored(run.folder.store_path):
        last = int(trajectory.action_mask.nonzero()[0][-1])
        assert len(trajectory.routing) == len(trajectory) and not trajectory.routing.recorded[last:].any()
