"""What a run reports: the summary computed from its store, and the lines that are shown while it runs."""
import io
import json

import numpy as np
import pytest

from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry import summary as run_summary
from sao_megatron.telemetry.progress import Progress, duration, step_line
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory

CRITIC_ONLY = {"policy_updated": False, "mask/dropped": 0.5, "lag/mean": 0.0, "lag/max": 0, "seconds/step": 1.0,
               "seconds/wait": 0.5, "seconds/critic": 0.5, "learner/tokens_per_second": 100.0,
               "engine/tokens_per_second": 10.0}
UPDATE = {"policy_updated": True, "mask/dropped": 0.02, "lag/mean": 1.0, "lag/max": 2, "seconds/step": 3.0,
          "seconds/wait": 1.0, "seconds/critic": 0.5, "seconds/recompute": 0.25, "seconds/policy": 0.75,
          "seconds/publish": 0.25, "seconds/other": 0.25, "learner/tokens_per_second": 200.0,
          "engine/tokens_per_second": None, "reward/mean": 0.25, "reward/solve_rate": 0.5}


def trajectory(versions: tuple[int, int]) -> Trajectory:
    return Trajectory(tokens=np.array([1, 2, 3]), action_mask=np.array([False, True, True]),
                      rollout_logprobs=np.array([np.nan, -1.0, -1.0]), versions=np.array([-1, *versions]),
                      turns=np.zeros(3), rewards=np.array([0.0, 0.0, 1.0]), prompt_id="p", task="t")


@pytest.fixture
def folder(tmp_path):
    """A run of one critic-only step and one policy update, with both evaluations."""
    folder = RunFolder(tmp_path)
    with Store(folder.store_path) as store:
        for seq, versions in enumerate([(0, 0), (0, 1), (1, 1)]):
            store.append(trajectory(versions), seq)
        store.add_evaluation("start", 0, 40, 10, 0.25)
        for step, metrics in enumerate([CRITIC_ONLY, UPDATE]):
            (leased,) = store.lease(1, "learner", step)
            store.mark_trained(step, step, [leased.id], metrics, "learner")
        first = store.steps()[0].time - CRITIC_ONLY["seconds/step"]
        store.set_state(run_summary.STARTED_AT, first - 20.0)
        store.add_evaluation("end", 1, 40, 30, 0.75)
    return folder


# If this fails, a number of summary.json does not mean what its name says.
def test_summary(folder):
    summary = run_summary.write_summary(folder.path)
    assert json.loads(folder.summary_path.read_text()) == summary
    assert (summary["solve_rate_start"], summary["solve_rate_end"], summary["eval_episodes"]) == (0.25, 0.75, 40)
    assert (summary["steps"], summary["trajectories_trained"], summary["mixed_version_trajectories"]) == (2, 2, 1)
    assert summary["mask_rate_mean"] == 0.02  # nothing is masked for the policy in a critic-only step
    assert (summary["lag_mean"], summary["lag_max"]) == (0.5, 2)
    assert summary["tokens_per_second"] == {"learner": 175.0, "engine": 10.0}
    seconds = summary["seconds"]
    assert seconds["start_up"] == pytest.approx(20.0)
    assert seconds["total"] >= 21.0
    assert {name: spent for name, spent in seconds.items() if name not in ("start_up", "total")} == {
        "wait": 1.5, "critic": 1.0, "recompute": 0.25, "policy": 0.75, "publish": 0.25, "checkpoint": 0.0,
        "other": 0.25}


# If this fails, the table at the end of a run leaves a number out or shows another.
def test_summary_table(folder, capsys):
    run_summary.show(run_summary.write_summary(folder.path))
    shown = capsys.readouterr().out
    for text in ("25.0% → 75.0%", "40 evaluation episodes", "2 trajectories", "1 of mixed versions", "2.00%", "0.50",
                 "learner 175, engines 10", "start-up 20s, wait 2s, critic 1s"):
        assert text in " ".join(shown.split())


# If this fails, a run that failed before its first step has no summary but a traceback.
def test_summary_of_a_run_without_steps(tmp_path, capsys):
    Store(RunFolder(tmp_path).store_path).close()
    summary = run_summary.write_summary(tmp_path)
    run_summary.show(summary)
    assert (summary["steps"], summary["solve_rate_end"], summary["mask_rate_mean"]) == (0, None, None)
    assert "– → –" in capsys.readouterr().out


# If this fails, a mistyped folder gives an empty store instead of a sentence.
def test_summary_of_no_run(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run"):
        run_summary.write_summary(tmp_path)
    assert not list(tmp_path.iterdir())


# If this fails, the line of a step shows a number under another name, or breaks where the learner wrote none.
def test_step_line():
    line = step_line(3, 110, UPDATE, 185.0)
    assert line == ("step   3/110  reward 0.250  solved 50%  masked 2.00%  lag 1.0  tok/s 200 learn, – sample  "
                    "left 3m05s")
    assert step_line(1, 9, CRITIC_ONLY, 1.0).endswith("left 1s  (critic only)")


# If one fails, the time left is shown in the wrong unit.
@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")])
def test_duration(seconds, text):
    assert duration(seconds) == text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# If this fails, a log file fills with a line per step, or the last step is not shown.
def test_plain_lines_are_spaced_and_the_last_step_is_shown():
    clock, out = Clock(), io.StringIO()
    progress = Progress(10, out, clock)
    for step in range(1, 11):
        clock.now += 0.5
        progress.step(step, UPDATE)
        progress.flush(now=False)
    shown = [int(line.split("/")[0].removeprefix("step")) for line in out.getvalue().splitlines()]
    assert shown == [4, 8, 10]


# If this fails, the time left does not follow from the time that steps take.
def test_time_left():
    out = io.StringIO()
    progress = Progress(100, out, Clock())
    progress.step(1, UPDATE)
    progress.step(2, UPDATE | {"seconds/step": 1.0})
    progress.flush()
    assert out.getvalue().strip().endswith("left 3m16s")  # 98 steps of 2 s


# If this fails, a stage that takes long looks like a hang, or one that lasts fills the screen.
def test_status_is_repeated_only_after_a_silence():
    clock, out = Clock(), io.StringIO()
    progress = Progress(10, out, clock)
    for clock.now in (0.0, 1.0, 4.9, 5.0, 6.0, 9.9, 10.5):
        progress.status("start-up: engines 0/1 ready")
    progress.status("start-up: engines 1/1 ready")
    times = [line.split("]")[0] for line in out.getvalue().splitlines()]
    assert times == ["[    0 s", "[    5 s", "[   10 s", "[   10 s"]


# If this fails, a terminal is filled with a line per step instead of one that is rewritten.
def test_terminal_line_is_rewritten():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(3, out, Clock())
    progress.note("started")
    progress.step(1, UPDATE)
    progress.step(2, UPDATE)
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r\x1b[2Kstep") == 2
