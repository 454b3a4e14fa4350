"""Checkpoint folders as files, what a run may change when it goes on, and who may run it."""
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_saving import count_calls

from sao_megatron import config as run_config
from sao_megatron import launcher
from sao_megatron.checkpoints import KEYS, CheckpointFolder, check_same_run, keeps_optimizer
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole
from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import TrajectoryBuilder

MOE = {"num_experts": 8}


def config(**sections) -> run_config.RunConfig:
    return run_config.parse({"name": "test", "task": {"name": "guess_number"}, "model": {"path": "nowhere"}} | sections)


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def save(folder: CheckpointFolder, step: int, generation: int = 0, keep: int = 2) -> None:
    partial = folder.begin(step, generation)
    (partial / "__0_0.distcp").write_text(f"weights of {step}, generation {generation}")
    folder.finish(partial, dict.fromkeys(KEYS - {"format"}) | {"step": step}, keep)


# If this fails, a checkpoint that a crash cut off is loaded, or its remains fill the disk.
def test_unfinished_is_never_a_checkpoint(folder):
    assert folder.latest() is None and folder.complete() == []
    folder.clean()
    save(folder, 10)
    (folder.begin(20, 0) / "state.json").write_text("{}")
    (folder.path / "step-00000005.removed").mkdir()
    assert folder.latest().step == 10
    folder.clean()
    assert [child.name for child in folder.path.iterdir()] == ["step-00000010"]


# If this fails, the disk fills up, or the newest checkpoint goes.
def test_the_newest_stay(folder):
    for step in (2, 4, 10, 100):
        save(folder, step)
    assert [checkpoint.step for checkpoint in folder.complete()] == [10, 100]


# If this fails, what a failed save has written fills the disk until the learner starts again, or the next save of the
# same step fails.
def test_a_failed_save_leaves_nothing(folder):
    save(folder, 10)
    for _ in range(2):
        partial = folder.begin(20, 0)
        (partial / "__0_0.distcp").write_text("half")
        folder.discard(partial)
    assert [child.name for child in folder.path.iterdir()] == ["step-00000010"]


# If this fails, a learner that went back cannot save a step that its predecessor had saved.
def test_a_step_is_saved_again(folder):
    for generation in (0, 1):
        save(folder, 10, generation)
    assert (folder.latest().path / "__0_0.distcp").read_text() == "weights of 10, generation 1"


# If this fails, kill -9 at some point of a save leaves a checkpoint that is torn, or one that the store does not fit:
# trajectories would be lost, or trained twice in weights that survive.
@pytest.mark.slow
def test_killed_at_every_point_of_a_save(tmp_path):
    def save_fourth(run: Path) -> None:
        save(CheckpointFolder(run / "checkpoints"), 4)

    begun = tmp_path / "begun"
    begun.mkdir()
    with Store(begun / "store.db") as store:
        store.append_all([(demonstration(seq), seq) for seq in range(5)])
        for step in range(4):
            train(store, step)
    save(CheckpointFolder(begun / "checkpoints"), 2)
    (begun / "checkpoints" / "step-00000001").mkdir()  # to be removed, as `keep` is 2
    shutil.copytree(begun, tmp_path / "counted")
    total, latest = count_calls(lambda: save_fourth(tmp_path / "counted")), []
    for call in np.linspace(1, total, 30).astype(int):
        run = shutil.copytree(begun, tmp_path / f"killed-{len(latest)}")
        if (child := os.fork()) == 0:
            count_calls(lambda: save_fourth(run), call)  # noqa: B023
            os._exit(0)
        os.waitpid(child, 0)
        folder = CheckpointFolder(run / "checkpoints")
        folder.clean()
        latest.append(folder.latest().step)
        assert folder.latest().state()["step"] == latest[-1]
        assert (folder.latest().path / "__0_0.distcp").read_text() == f"weights of {latest[-1]}, generation 0"
        assert [child.name for child in folder.path.iterdir() if "." in child.name] == []
        with Store(run / "store.db") as store:
            store.rewind(latest[-1])
            assert [row.step for row in store.steps()] == list(range(latest[-1]))
            for step in range(latest[-1], 5):  # each on the trajectory that it had, or would have had
                train(store, step)
    assert set(latest) == {2, 4} and latest == sorted(latest)


def demonstration(seq: int):
    builder = TrajectoryBuilder([1], "prompt", "task")
    builder.add_action([6, 2], [-1.0, -0.1], [0, 0])
    trajectory = builder.build()
    trajectory.id = f"t{seq}"
    return trajectory


def train(store: Store, step: int) -> None:
    """Learner step `step`, on trajectory number `step`."""
    (leased,) = store.lease(1, "learner", version=step, step=step)
    assert leased.id == f"t{step}"
    store.mark_trained(step, step + 1, [leased.id], {}, "learner")


# If this fails, a damaged or a foreign checkpoint gives a traceback.
@pytest.mark.parametrize(("text", "message"), [
    ("{", "no readable state.json"), ('{"format": 9}', "format 9, exp"), ("[]", "expected a JSON object, found list"),
    ('{"format": 1, "step": 3}', r"no readable state.json \(no config, hf_config, parallel, ")])
def test_broken_state_is_named(folder, text, message):
    save(folder, 10)
    (folder.latest().path / "state.json").write_text(text)
    with pytest.raises(UserError, match=message):
        folder.latest().state()


# If this fails, a run goes on with a running mean, a schedule or a layout that a flipped bit has made up.
def test_every_flipped_bit_of_the_state_is_found(folder):
    save(folder, 10)
    path = folder.latest().path / "state.json"
    whole, right = path.read_bytes(), folder.latest().state()
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            try:
                now = folder.latest().state()
            except UserError:
                continue
            assert now == right or whole[position - 12:position + 12].count(b"checksum"), (position, bit)


# If this fails, a run goes on as another experiment under the same name, or cannot move to another machine.
def test_what_a_run_may_change():
    check_same_run(config(), config(steps=7, parallel={"ranks": 2}, rollout={"max_lag": 5}, restarts=2, runs_dir="x"))
    with pytest.raises(UserError) as refused:
        check_same_run(config(), config(seed=1, policy_optimizer={"lr": 0.5}))
    assert "cannot change policy_optimizer.lr (1e-06 → 0.5), seed (0 → 1): start a new run" in str(refused.value)


# If this fails, optimizer state that cannot be resharded is loaded, or is thrown away without need.
@pytest.mark.parametrize(("before", "now", "kept"), [
    (dict(), dict(), True), (dict(), dict(pp=2), True), (dict(), dict(tp=2, etp=2), True), (dict(), dict(tp=2), False),
    (dict(ep=2), dict(tp=2, ep=2), True), (dict(), dict(ep=2), False), (dict(ep=2), dict(ep=4), False)])
def test_layouts_among_which_the_optimizer_moves(before, now, kept):
    before = run_config.ParallelSection(ranks=4, **before).model_dump()
    now = config(parallel=dict(ranks=4, **now))
    assert keeps_optimizer({"parallel": before, "hf_config": MOE}, now) == kept
    assert keeps_optimizer({"parallel": before, "hf_config": {}}, now)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """The folder of a run that made 2 of its 12 steps."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    run_config.save(config(steps=2), folder.config_path)
    Store(folder.store_path).close()
    return folder


# If this fails, two learners write to one run.
def test_a_run_that_runs_is_not_resumed(run):
    with run.lock(), pytest.raises(UserError, match="is running: end that `sao-megatron` first"):
        launcher.resume(run.path, [])


# If one fails, a resume that cannot mean anything starts processes, or damages the run's folder.
@pytest.mark.parametrize(("override", "message"), [
    ("seed=3", r"cannot change seed \(0 → 3\)"), ("batch.trajectories=3", "cannot change batch.trajectories"),
    ("steps=0", "steps"), ("parallel.ranks=0", "parallel.ranks")])
def test_refused_resume(run, override, message):
    before = run.config_path.read_text()
    with pytest.raises(UserError, match=message):
        launcher.resume(run.path, [override])
    assert run.config_path.read_text() == before


# If this fails, kill -9 while a run is started again costs its config, and with it the run.
@pytest.mark.slow
def test_killed_at_every_point_of_writing_a_file(tmp_path):
    path, found = tmp_path / "config.yaml", []
    write_whole(path, "before")
    total = count_calls(lambda: write_whole(path, "before"))
    for call in range(1, total, 2):
        if (child := os.fork()) == 0:
            count_calls(lambda: write_whole(path, "after"), call)  # noqa: B023
            os._exit(0)
        os.waitpid(child, 0)
        found.append(path.read_text())
        path.write_text("before")
    assert set(found) == {"before", "after"} and found == sorted(found, reverse=True)


# If this fails, a run that is done starts everything to do nothing, or its exported weights are in danger.
def test_a_finished_run_is_not_resumed(run):
    run_config.save(config(steps=1, algorithm={"critic_only_steps": 0}), run.config_path)
    run.export_path.mkdir()
    with Store(run.store_path) as store:
        store.set_state("finished", True)
        store.mark_trained(0, 1, [], {}, "learner-0")
    with pytest.raises(UserError, match="has finished its 1 steps: give more with steps="):
        launcher.resume(run.path, [])


# If this fails, a folder that is no run's gives a traceback.
def test_not_a_run(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run"):
        launcher.resume(tmp_path, [])


# If one fails, a replay or a rollout that lacks its input is found out by a process that has started.
def test_refused_replay_and_rollout(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"name": "refused", "runs_dir": str(tmp_path), "task": {"name": "guess_number"},
                                  "model": {"fresh": {}}, "batch": {"trajectories": 4}, "steps": 2}))
    Store(tmp_path / "empty.sqlite").close()
    for trajectories, message in (("nowhere", "does not exist"), ("empty.sqlite", "holds 0 finished .* 48 are needed")):
        with pytest.raises(UserError, match=message):
            launcher.replay(recipe, [], tmp_path / trajectories)
    with pytest.raises(UserError, match="model.fresh has no weights that an engine could load"):
        launcher.rollout(recipe, [])
    assert not (tmp_path / "refused").exists()
