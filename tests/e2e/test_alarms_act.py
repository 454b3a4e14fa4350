"""alarms.on_alarm: a real run that an alarm pauses, or ends."""
from __future__ import annotations

import time

from real_run import BATCH, START_SECONDS

ALARMED = ["steps=8", "algorithm.critic_only_steps=0", f"batch.trajectories={BATCH}", "evaluation.episodes=0",
           "warmup.steps=5", "checkpoint.every=0", "alarms.effective_sample_size=0.9999999"]
"""The fifth update with any staleness is one too many."""


# If this fails, a run that should wait for a person trains on, or never goes on again.
def test_an_alarm_pauses_the_run_until_its_file_is_deleted(start_run):
    run = start_run("paused", *ALARMED, "alarms.on_alarm=pause")
    run.until(run.folder.paused_path.exists, "an alarm")
    run.until(lambda: "paused until" in run.out + run.err, "the terminal to say so", 60)
    steps = run.steps()
    time.sleep(6)
    assert run.steps() == steps < 8
    assert "effective_sample_size" in run.folder.paused_path.read_text()
    run.folder.paused_path.unlink()
    assert run.wait(START_SECONDS) == 0, f"{run.out}\n{run.err}"
    assert run.steps() == 8


# If this fails, alarms.on_alarm=stop burns a night on a run that has gone wrong.
def test_an_alarm_ends_the_run(start_run):
    run = start_run("stopped", *ALARMED, "alarms.on_alarm=stop")
    assert run.wait(START_SECONDS) == 1
    assert "stopped by an alarm at step" in run.err and "effective_sample_size" in run.err
    assert 0 < run.steps() < 8
