"""What a finished run leaves behind, and that it was what it says: asynchronous, each trajectory trained once."""
from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from real_run import BATCH, CRITIC_ONLY, EVALUATED, FINISHED, RECIPE, STEPS, query, stored
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sao_megatron import config as run_config
from sao_megatron.telemetry import metrics
from sao_megatron.trajectory.store import StepRow, Store

TOTAL = STEPS + CRITIC_ONLY
EVERY_STEP = ["reward/mean", "reward/solve_rate", "lag/mean", "critic/explained_variance", "critic/grad_norm",
              "learner/tokens_per_second", "engine/tokens_per_second", "seconds/publish", "queue/ready",
              "learner/flops_per_second", "engine/flops_per_second", "machine/cores", "pacing/max_lag",
              "sglang/running 0", "sglang/cache_used 0", "publication/paused"]
EVERY_UPDATE = ["mask/dropped", "mask/dropped_low", "mask/dropped_high", "policy/grad_norm", "experts/busiest"]


@pytest.fixture(scope="session")
def steps(finished) -> list[StepRow]:
    with Store(finished.folder.store_path) as store:
        return store.steps()


@pytest.fixture(scope="session")
def summary(finished) -> dict:
    return json.loads(finished.folder.summary_path.read_text())


@pytest.fixture(scope="session")
def events(finished) -> EventAccumulator:
    events = EventAccumulator(str(finished.folder.path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


# If this fails, a run leaves no token records, or they are of other tokens than those that it trained on.
def test_token_records(finished, steps):
    records = pq.read_table(finished.folder.tokens_dir).to_pylist()
    assert {row["step"] for row in records} == set(range(0, TOTAL, 2))  # tokens.every
    recorded = {row["trajectory"]: [] for row in records}
    for row in records:
        recorded[row["trajectory"]].append(row)
    trained = {t.id: t for t in stored(finished.folder.store_path)}
    words = {5: "win", 3: "higher", 4: "lower", 2: "<eot>"}
    for name, rows in recorded.items():
        assert [row["token_id"] for row in rows] == trained[name].tokens.tolist()
        assert all(row["token"] == words.get(row["token_id"], row["token"]) != "" for row in rows)
        assert (rows[0]["fate"] is None) and all((row["fate"] is not None) == (row["step"] >= CRITIC_ONLY)
                                                 for row in rows if row["kind"] == "action")
    assert TOTAL / 2 * 12 <= len(recorded) <= TOTAL / 2 * 16  # a quarter of the places is for those that lost tokens


# If this fails, processes of a run go on, and keep their memory, after it has said that it is done.
def test_nothing_runs_on(finished):
    assert len(finished.seen) >= 6  # two ranks, controller, engine, its scheduler and detokenizer
    assert finished.survivors() == []


# If this fails, the folder does not say with which settings the run was made.
def test_config_is_resolved(finished):
    overrides = [f"runs_dir={finished.folder.path.parent}", "name=finished", *FINISHED]
    assert finished.folder.config() == run_config.load(RECIPE, overrides)
    assert "malformed_reward" in finished.folder.config_path.read_text()
    written = yaml.safe_load(finished.folder.config_path.read_text())
    assert written["rollout"]["environment_retries"] == 2  # a default that the recipe does not name


# If this fails, somebody who looks for why a process did something finds no log of it.
def test_one_log_per_process(finished):
    logs = {path.name for path in finished.folder.log_dir.iterdir()}
    assert logs == {"engine-0.log", "controller.log", "learner-0.log", "learner-1.log", "sandbox-0.log"}
    assert "sandbox server at http://127.0.0.1:" in (finished.folder.log_dir / "sandbox-0.log").read_text()


# If this fails, the curves that the README shows are not there, or show something else than the run recorded.
@pytest.mark.parametrize("tag", EVERY_STEP + EVERY_UPDATE)
def test_scalar_in_tensorboard(events, steps, tag):
    recorded = {row.step: row.metrics[tag] for row in steps if tag in row.metrics}
    shown = {point.step: point.value for point in events.Scalars(tag)}
    assert list(recorded) == list(range(0 if tag in EVERY_STEP else CRITIC_ONLY, TOTAL))
    assert shown == pytest.approx(recorded, rel=1e-6)


# If this fails, a run writes a metric that docs/metrics.md does not explain.
def test_every_metric_is_documented(steps, events):
    written = {name for row in steps for name in row.metrics} | set(events.Tags()["scalars"])
    assert {name for name in written if not metrics.known(name)} == set()
    assert {"sglang/running 0", "sglang/cache_used 0"} <= steps[-1].metrics.keys()
    assert written.isdisjoint({"learner/mfu", "engine/mfu"}), "a CPU has no peak"


# If this fails, pictures that docs/metrics.md names are missing.
def test_images_in_tensorboard(events):
    assert set(events.Tags()["images"]) == {"heat/lag", "heat/position", "heat/turn", "heat/seconds",
                                            "heat/advantage_ratio"}


# If this fails, whoever reads metrics.jsonl sees another run.
def test_json_lines(finished, steps):
    lines = [json.loads(line) for line in (finished.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(TOTAL))
    assert all(line.items() >= row.metrics.items() for line, row in zip(lines, steps, strict=True))


# If this fails, the histograms lose or invent tokens.
@pytest.mark.parametrize("tag", ["lag/tokens", "ratio/log"])
def test_histogram_in_tensorboard(events, steps, tag):
    shown = {point.step: sum(point.histogram_value.bucket) for point in events.Histograms(tag)}
    assert shown == {row.step: row.metrics["tokens/action"] for row in steps[CRITIC_ONLY:]}


# If this fails, the summary lacks a number, or the run was synchronous and proves nothing.
def test_summary(summary):
    assert set(summary) == {
        "solve_rate_start", "solve_rate_end", "eval_episodes", "steps", "trajectories_trained", "mask_rate_mean",
        "lag_mean", "lag_max", "mixed_version_trajectories", "seconds", "tokens_per_second", "evaluations",
        "not_trained"}
    assert summary["steps"] == TOTAL
    assert summary["trajectories_trained"] == TOTAL * BATCH
    assert summary["eval_episodes"] == EVALUATED
    assert 0 <= summary["solve_rate_start"] <= 1 and 0 <= summary["solve_rate_end"] <= 1
    assert summary["lag_max"] >= 1 and summary["lag_mean"] > 0
    assert summary["mixed_version_trajectories"] > 0
    assert 0 <= summary["mask_rate_mean"] < 1


# If this fails, an evaluation of a real run is left out, trained on, or lost to whoever looks for it.
def test_evaluations(finished, summary, events):
    assert [one["name"] for one in summary["evaluations"]] == ["start", "update 3", "end"]
    for one, version in zip(summary["evaluations"], (0, 3, STEPS), strict=True):
        assert one["version"] == one["first_version"] == one["last_version"] == version  # evaluation.pinned
        assert one["set"] == "guess_number" and one["episodes"] == EVALUATED
        assert one["pass@1"] == one["avg@1"] == one["solve_rate"]
    shown = events.Scalars("evaluation/guess_number/solve_rate")
    assert [point.value for point in shown] == pytest.approx([one["solve_rate"] for one in summary["evaluations"]])
    assert [point.step for point in shown] == [0, CRITIC_ONLY + 3, TOTAL]
    assert query(finished.folder.store_path, "SELECT COUNT(*) FROM trajectories")[0][0] <= 9 * BATCH + TOTAL * BATCH


# If this fails, the summary's times do not add up, so that nobody can say where a run's time went.
def test_summary_accounts_for_its_seconds(summary, steps):
    seconds = summary["seconds"]
    names = {"wait", "critic", "recompute", "policy", "publish", "checkpoint", "other"}
    phases = [seconds[name] for name in names]
    assert set(seconds) == names | {"total", "start_up"}
    assert all(phase >= 0 for phase in phases) and seconds["start_up"] > 0
    assert sum(phases) == pytest.approx(sum(row.metrics["seconds/step"] for row in steps))
    assert sum(phases) + seconds["start_up"] <= seconds["total"]
    assert summary["tokens_per_second"]["learner"] > 0 and summary["tokens_per_second"]["engine"] > 0


# If this fails, a trajectory was trained twice, or is marked as trained in a step that never saw it.
def test_every_trained_trajectory_was_trained_once(finished, steps):
    assert [row.step for row in steps] == list(range(TOTAL))
    assert [row.version for row in steps] == [max(0, step + 1 - CRITIC_ONLY) for step in range(TOTAL)]
    marked = query(finished.folder.store_path, "SELECT step, COUNT(DISTINCT id), COUNT(*), SUM(num_actions), "
                   "SUM(min_version < max_version) FROM trajectories WHERE state = 'trained' GROUP BY step "
                   "ORDER BY step")
    assert marked == [(row.step, BATCH, BATCH, row.metrics["tokens/action"], row.metrics["trajectories/mixed_version"])
                      for row in steps]
    assert query(finished.folder.store_path, "SELECT COUNT(*) FROM trajectories WHERE state = 'leased'") == [(0,)]


# If this fails, a token claims to come from weights that did not exist when it was trained, so that lags are wrong.
def test_versions_are_of_the_past(finished, steps):
    newest = query(finished.folder.store_path, "SELECT step, MAX(max_version), MIN(min_version) FROM trajectories "
                   "WHERE state = 'trained' GROUP BY step ORDER BY step")
    for (step, newest_version, oldest_version), row in zip(newest, steps, strict=True):
        before = max(0, step - CRITIC_ONLY)
        assert 0 <= oldest_version <= newest_version <= before
        assert before - oldest_version == row.metrics["lag/max"]


# If this fails, a run in a file or in CI shows nothing, or fills the log with control characters.
def test_progress_without_a_terminal(finished):
    lines = [line for line in finished.out.splitlines() if line.startswith("step ")]
    shown = [int(re.match(rf"step +(\d+)/{TOTAL} ", line)[1]) for line in lines]
    assert np.all(np.diff(shown) > 0) and shown[-1] == TOTAL
    for part in ("reward ", "solved ", "masked ", "lag ", "tok/s ", "left "):
        assert part in lines[-1]
    assert "–" not in lines[-1]  # every number was there
    assert "\r" not in finished.out and "\x1b" not in finished.out
    assert finished.err == ""
