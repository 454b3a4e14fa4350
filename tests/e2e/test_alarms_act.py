"""alarms.on_alarm: a real run that an alarm pauses, and one that an alarm ends."""
from __future__ import annotations

import time

from real_run import BATCH, START_SECONDS, recorded
from test_killed import ENDLESS, check_store


# If this fails, a run that should wait for a person trains on, or never goes on again; or a `train` that is killed, as
# by the kernel for want of memory, leaves engines and ranks running, or the store in pieces.
def test_an_alarm_pauses_the_run_until_its_file_is_deleted(start_run):
    # The fifth update with any staleness is one too many.
    run = start_run("paused", *ENDLESS, "alarms.effective_sample_size=0.9999999", "alarms.on_alarm=pause")
    run.until(run.folder.paused_path.exists, "an alarm")
    run.until(lambda: "paused until" in run.out, "the terminal to say so", 60)
    steps = run.steps()
    time.sleep(3)
    assert run.steps() == steps
    assert "effective_sample_size" in run.folder.paused_path.read_text()
    run.folder.paused_path.unlink()
    run.until(lambda: run.steps() > steps, "another step")
    appended = run.appended()
    run.kill_launcher()
    check_store(run, appended)


# If this fails, alarms.on_alarm=stop burns a night on a run that has gone wrong. (The model learns from play that is
# said to be its own and is not.)
def test_an_alarm_ends_the_run(start_run, tmp_path):
    run = start_run("stopped", "parallel={ranks: 1}", "steps=8", "algorithm.critic_only_steps=0", "warmup.steps=1",
                    f"batch.trajectories={BATCH}", "alarms.on_alarm=stop",
                    "--trajectories", str(recorded(tmp_path / "recorded.sqlite", 8 * BATCH)), verb="replay")
    assert run.wait(START_SECONDS) == 1
    assert "stopped by an alarm at step 0" in run.err and "logprobs_misplaced" in run.err
    assert run.steps() == 1
