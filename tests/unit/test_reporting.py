"""What rank 0 does with alarms: pacing, the launcher's terminal, and the memory of a run that goes on."""
from __future__ import annotations

import json

import pytest

from sao_megatron import config as configs
from sao_megatron.errors import RunError
from sao_megatron.learner.reporting import Reporter
from sao_megatron.placement.plan import OneMachine, Plan
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import Supervisor
from sao_megatron.telemetry.progress import Progress
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.trajectory.store import ALARMS, MAX_LAG, Store
from sao_megatron.watch import Watch

HEALTHY, STALE = {"mask/dropped": 0.01, "lag/mean": 1.0}, {"mask/dropped": 0.4, "lag/mean": 1.0}


def config(tmp_path, on_alarm: str):
    return configs.parse(dict(name="t", runs_dir=str(tmp_path), model=dict(path="m"), task=dict(name="random"),
                              rollout=dict(max_lag=2), alarms=dict(on_alarm=on_alarm),
                              writers=dict(tensorboard=False, jsonl=True)), "test")


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    return folder


def play(reporter: Reporter, first: int, steps: list[dict]) -> list[float]:
    """Record these steps from `first` on; returns pacing/max_lag of each."""
    pacing = []
    for step, metrics in enumerate(steps, first):
        metrics = metrics | reporter.pacing()
        reporter.store.mark_trained(step, step + 1, [], metrics, "learner")
        reporter.step(step, 0, metrics, Statistics(), [])
        pacing.append(metrics["pacing/max_lag"])
    return pacing


# If this fails, on_alarm=slow changes nothing, or a learner that goes on forgets that the run was in trouble.
def test_slow_survives_a_restart(tmp_path, folder):
    settings, steps = config(tmp_path, "slow"), [*[STALE] * 9, *[HEALTHY] * 9]
    with Store(folder.store_path) as store:
        one = Reporter(settings, folder, store, 0)
        assert store.get_state(MAX_LAG) == 2
        in_one = play(one, 0, steps)
        one.close()
        assert in_one == [2] * 5 + [1] * 6 + [2] * 7, "raised by the fifth, over with the tenth"
        store.rewind(7)
        again = Reporter(settings, folder, store, 7)
        assert again.alarms.raised == {"mask_share"} and store.get_state(MAX_LAG) == 1
        assert store.get_state(ALARMS)[0][0] == 4, "an alarm of a step that is kept"
        assert play(again, 7, steps[7:]) == in_one[7:]
        again.close()
        assert [step for step, _ in store.get_state(ALARMS)] == [4], "it does not ring again"
        store.rewind(3)
        assert Reporter(settings, folder, store, 3).alarms.raised == set() and store.get_state(ALARMS) == []
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


# If this fails, an alarm is seen only by whoever reads the learner's log, or many times.
def test_an_alarm_is_said_in_the_terminal(tmp_path, folder, capsys):
    settings = config(tmp_path, "warn")
    with Store(folder.store_path) as store, Supervisor(folder.log_dir) as supervisor:
        watch = Watch(settings, OneMachine(Plan([], None, [], []), folder.log_dir), store, supervisor, Progress(9))
        play(Reporter(settings, folder, store, 0), 0, [STALE] * 6)
        for _ in range(3):
            watch._show_alarms()
        assert capsys.readouterr().out.count("alarm at step 5: mask_share = 0.4 (limit 0.3): the gate drops") == 1
        placement = OneMachine(Plan([], None, [], []), folder.log_dir)
        Watch(settings, placement, store, supervisor, Progress(9))._show_alarms()
        assert capsys.readouterr().out == "", "a resumed run begins with what is new"


# If this fails, a run that should have ended or waited burns a night.
@pytest.mark.parametrize("on_alarm", ["stop", "pause"])
def test_stop_and_pause(tmp_path, folder, on_alarm):
    settings = config(tmp_path, on_alarm)
    with Store(folder.store_path) as store:
        reporter = Reporter(settings, folder, store, 0)
        play(reporter, 0, [STALE] * 4)
        assert not folder.paused_path.exists()
        if on_alarm == "stop":
            with pytest.raises(RunError, match="stopped by an alarm at step 4 .*: mask_share"):
                play(reporter, 4, [STALE])
        else:
            play(reporter, 4, [STALE])
            assert folder.paused_path.read_text().startswith("step 4: mask_share")
