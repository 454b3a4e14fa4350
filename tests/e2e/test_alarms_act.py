"""alarms.on_alarm: a real run that an alarm pauses, and one that it gives fresher samples.

That one ends with `stop` is held by tests/unit/test_reporting.py (the learner) and test_launcher.py (the launcher).
"""
from __future__ import annotations

import time

from real_run import BATCH
from test_killed import ENDLESS, check_store

from sao_megatron.trajectory.store import Store

ALARMED = [*ENDLESS, "alarms.effective_sample_size=0.9999999"]
"""The fifth update in a row with any staleness is one too many."""


# If this fails, a run that should wait for a person trains on, samples on without end, or never goes on again; or a
# `train` that is killed, as by the kernel for want of memory, leaves engines and ranks running, or the store in pieces.
def test_an_alarm_pauses_the_run_until_its_file_is_deleted(start_run):
    run = start_run("paused", *ALARMED, "alarms.on_alarm=pause")
    run.until(run.folder.paused_path.exists, "an alarm")
    run.until(lambda: "paused until" in run.out, "the terminal to say so", 60)
    steps = run.steps()
    time.sleep(3)
    assert run.steps() == steps
    assert len(run.appended()) <= (steps + run.folder.config().rollout.max_lag + 1) * BATCH
    assert "effective_sample_size" in run.folder.paused_path.read_text()
    run.folder.paused_path.unlink()
    run.until(lambda: run.steps() > steps, "another step")
    appended = run.appended()
    run.kill_launcher()
    check_store(run, appended)


# If this fails, alarms.on_alarm=slow changes a number in TensorBoard, and the engines sample as far ahead as before.
def test_an_alarm_slows_pacing_until_samples_are_fresh(start_run):
    run = start_run("slowed", *ALARMED, "rollout.max_lag=1", "alarms.on_alarm=slow")
    run.until(lambda: run.steps() >= 18, "18 steps")
    with Store(run.folder.store_path) as store:
        steps = store.steps()
    admitted = [row.metrics["pacing/max_lag"] for row in steps]
    lags = [row.metrics["lag/max"] for row in steps]
    assert admitted[:5] == [1] * 5 and 0 in admitted, (admitted, lags)
    slow = admitted.index(0)
    assert max(lags[:slow]) >= 1, lags
    fresh = lags[slow + 2:slow + 4]  # what was admitted before is trained first; later the alarm may be over
    assert len(fresh) == 2 and max(fresh) == 0, (admitted, lags)
    assert "pacing admits lag 0 from now on, it was 1" in (run.folder.log_dir / "learner-0.log").read_text()
