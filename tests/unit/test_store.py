"""The trajectory store: states, one transaction each, several processes, kill -9."""
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from sao_megatron.errors import RunError
from sao_megatron.rollout.pacing import Deal
from sao_megatron.trajectory.journal import journal_mode
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder
from sao_megatron.trajectory.versions import lag, updates_in, version_of


def make(version: int = 0, last_version: int | None = None, status: Status = Status.COMPLETED, **info) -> Trajectory:
    builder = TrajectoryBuilder([1], "prompt", "task")
    builder.add_action([6, 2], [-1.0, -0.1], [version, version if last_version is None else last_version])
    builder.add_reward(1.0)
    return builder.build(status, **info)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store.db") as store:
        yield store


def child(code: str, path, journal: str = "WAL") -> subprocess.Popen:
    """A Python process with `Store` opened at `path` and `make`-able trajectories."""
    prelude = """
        import sys
        from sao_megatron.trajectory.store import Store
        from sao_megatron.trajectory.types import TrajectoryBuilder
        def make():
            builder = TrajectoryBuilder([1], "prompt", "task")
            builder.add_action([6, 2], [-1.0, -0.1], [0, 0])
            return builder.build()
        store = Store(*sys.argv[1:])
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program, str(path), journal],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_lease_takes_exactly_count_oldest_first(store):
    """Fails if a batch is short, out of admission order, or holds a failed episode."""
    by_seq = {seq: make() for seq in (5, 1, 4, 2)}
    for seq, trajectory in by_seq.items():
        store.append(trajectory, seq)
    store.append(make(status=Status.ERROR, error="no host"), 0)
    assert store.lease(5, "learner", version=0) == []
    leased = store.lease(3, "learner", version=0)
    assert [t.id for t in leased] == [by_seq[seq].id for seq in (1, 2, 4)]
    assert store.counts() == {"ready": 1, "leased": 3, "trained": 0, "dropped": 0, "error": 1}


def test_append_is_idempotent(store):
    """Fails if a repeated append adds a row, makes a leased one ready again, or counts its tokens twice."""
    trajectory = make()
    store.append(trajectory, 0)
    [leased] = store.lease(1, "learner", version=0)
    store.append(leased, 7)
    assert store.counts()["leased"] == 1 and store.counts()["ready"] == 0
    assert store.appended_tokens() == 2


def test_stale_are_dropped_even_when_the_batch_is_short(store):
    """Fails if a trajectory older than the limit is trained, or if stale ones hold pacing's places for ever."""
    for seq, version in enumerate((0, 2, 5)):
        store.append(make(version, last_version=5), seq)
    assert store.lease(3, "learner", version=5, max_token_lag=3) == []
    assert store.counts()["dropped"] == 1 and store.counts()["ready"] == 2
    assert len(store.lease(2, "learner", version=5, max_token_lag=3)) == 2
    assert store.summary_rows().reasons == {"stale": 1}


def train_step(store: Store, step: int, count: int, owner: str = "learner-0") -> list[str]:
    """One learner step; returns the ids it trained."""
    ids = [trajectory.id for trajectory in store.lease(count, owner, version=step, step=step)]
    store.mark_trained(step, step + 1, ids, {}, owner)
    return ids


def test_rewind_gives_back_what_the_checkpoint_has_not_trained(store):
    """Fails if a learner that starts again loses trajectories, trains some twice, or trains them in other batches."""
    for seq in (5, 3, 4, 1, 2, 0, 6, 7):
        store.append(make(), seq)
    trained = [train_step(store, step, 2) for step in range(3)]
    held = store.lease(2, "learner-0", version=3, step=3)
    for seq in (8, 9):
        store.append(make(), seq - 100)  # admitted before all others, ended late
    assert store.rewind(1) == 0 and store.rewind(1) == 1
    assert store.counts() == {"ready": 8, "leased": 0, "trained": 2, "dropped": 0, "error": 0}
    assert [row.step for row in store.steps()] == [0]
    assert store.get_state("first_step") == 1
    assert [train_step(store, step, 2, "learner-1") for step in (1, 2)] == trained[1:]
    late, again = train_step(store, 3, 2, "learner-1"), train_step(store, 4, 2, "learner-1")
    assert again == [trajectory.id for trajectory in held] and not set(late) & {i for ids in trained for i in ids}


def test_rewind_refuses_a_store_that_is_older_than_the_checkpoint(store):
    """Fails if weights are trained once more on what they were trained on already."""
    store.append(make(), 0)
    train_step(store, 0, 1)
    with pytest.raises(RunError, match="records 1 steps, the checkpoint holds 2"):
        store.rewind(2)
    assert store.counts()["trained"] == 1 and store.get_state("generation") is None


def test_a_learner_that_was_replaced_records_nothing(store):
    """Fails if a learner that was thought dead marks the batch of its successor as trained."""
    store.append(make(), 0)
    [leased] = store.lease(1, "learner-0", version=0, step=0)
    store.rewind(0)
    store.lease(1, "learner-1", version=0, step=0)
    with pytest.raises(RunError, match="learner-0 leases 0"):
        store.mark_trained(0, 1, [leased.id], {}, "learner-0")
    store.mark_trained(0, 1, [leased.id], {}, "learner-1")


def test_replay_copy_trains_the_same_batches(store, tmp_path):
    """Fails if a replay sees other batches than the run, or changes the store that it reads."""
    for seq in (3, 1, 2, 0, 4):
        store.append(make(), seq)
    store.append(make(status=Status.ERROR, error="no host"), 5)
    trained = [train_step(store, step, 2) for step in range(2)]
    store.lease(1, "learner-0", version=2)
    store.copy_for_replay(tmp_path / "copy.db")
    with Store(tmp_path / "copy.db") as copy:
        assert copy.counts() == {"ready": 5, "leased": 0, "trained": 0, "dropped": 0, "error": 1}
        assert copy.steps() == [] and copy.get_state("generation") is None
        assert [train_step(copy, step, 2) for step in range(2)] == trained
    assert store.counts()["trained"] == 4 and store.counts()["leased"] == 1


def test_versions_of_two_generations():
    """Fails if a restarted learner reuses a version number, or if a restart changes how stale a token is."""
    before, after = version_of(0, 7), version_of(1, 5)
    assert after not in {version_of(0, updates) for updates in range(100000)}
    assert lag(after, np.array([version_of(0, 3), before, version_of(1, 4)])).tolist() == [2, 0, 1]
    assert updates_in(after) == 5


def test_staleness_counts_updates_of_any_generation(store):
    """Fails if a restart makes what it gives back look older than it is, so that it is dropped."""
    store.append(make(version_of(0, 4), version_of(1, 2)), 0)
    assert len(store.lease(1, "learner-1", version_of(1, 5), max_token_lag=3)) == 1
    store.append(make(version_of(1, 1)), 1)
    assert store.lease(1, "learner-1", version_of(1, 5), max_token_lag=3) == []
    assert store.counts()["dropped"] == 1


def test_journal_fits_the_file_system(tmp_path, monkeypatch):
    """Fails if a store on a network file system uses shared memory, which corrupts it, or if a local one is slow."""
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert journal_mode(Path("/store.db")) == "WAL"
    mounts.append(SimpleNamespace(mountpoint="/", fstype="lustre"))  # over the other
    assert journal_mode(Path("/store.db")) == "TRUNCATE"
    with pytest.raises(RunError, match="keeps the journal memory, .* only WAL is safe"):
        Store(":memory:", journal="WAL")  # the one kind of store that takes neither
    for _ in range(2):  # also one that a local file system has left in the other mode
        with Store(tmp_path / "store.db") as store:
            store.append(make(), 0)
            assert store._one("PRAGMA journal_mode") == ("truncate",) and store._one("PRAGMA synchronous") == (2,)
        with Store(tmp_path / "store.db", journal="WAL") as store:
            assert store._one("PRAGMA journal_mode") == ("wal",)


def test_a_trajectory_is_trained_at_most_once(store):
    """Fails if a step could count a trajectory twice or be recorded in part."""
    for seq in range(3):
        store.append(make(), seq)
    first, second = store.lease(2, "learner", version=0)
    store.mark_trained(0, 1, [first.id], {"reward/mean": 1.0}, "learner")
    for step, ids in ((0, [second.id]), (1, [first.id]), (1, [second.id, "unknown"]), (1, [second.id, second.id])):
        with pytest.raises(RunError):
            store.mark_trained(step, 2, ids, {}, "learner")
    assert store.counts()["leased"] == 1 and store.counts()["trained"] == 1
    [row] = store.steps()
    assert row[:2] == (0, 1) and row.metrics == {"reward/mean": 1.0}
    store.mark_trained(1, 2, [second.id], {}, "learner")
    assert [row.step for row in store.steps(after=0)] == [1]


def test_summary_counts_mixed_versions(store):
    """Fails if the share of trajectories that span a weight update is misreported."""
    for seq, trajectory in enumerate((make(0, 1), make(1, 1), make(1, 2, status=Status.TRUNCATED), make(0, 1))):
        store.append(trajectory, seq)
    store.mark_trained(0, 1, [t.id for t in store.lease(3, "learner", version=1)], {}, "learner")
    summary = store.summary_rows()
    assert summary[:5] == (3, 2, 1, 6, 1.0)


def test_state_publication_and_evaluations_come_back(store):
    """Fails if one process does not read what another one said."""
    assert store.published() is None and store.get_state("stop", False) is False
    store.set_published(3, 2)
    store.set_state("stop", True)
    store.add_evaluation("start", 3, 30, 8, 0.25, "games", {"pass@1": 0.5})
    with Store(store.path) as other:
        assert other.published() == (3, 2) and other.get_state("stop") is True
        [evaluation] = other.evaluations()
    assert evaluation[:5] == ("start", 3, 30, 8, 0.25)
    assert (evaluation.task_set, evaluation.metrics) == ("games", {"pass@1": 0.5})


# If this fails, an episode that a dead controller had half played goes on from other turns than were played.
def test_turns_of_episodes_under_way_are_kept_until_they_end(store):
    store.keep_turns([(3, 0, {"tokens": [1]}), (3, 1, {"tokens": [2]}), (4, 0, "other")])
    with Store(store.path) as other:
        assert other.kept_turns(3) == [{"tokens": [1]}, {"tokens": [2]}]
    store.keep_turns([(3, 0, "again")])
    assert store.kept_turns(3) == ["again"]
    store.append(make(), 3)
    assert store.kept_turns(3) == [] and store.kept_turns(4) == ["other"]
    store.keep_turns([(5, 0, "new")], given_up=[4])
    assert store.kept_turns(4) == [] and store.kept_turns(5) == ["new"]


def test_other_files_are_refused(tmp_path, store):
    """Fails if a store of another schema, or no store at all, is read as if it were one."""
    sqlite3.connect(store.path).execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="schema version 99, expected 2"):
        Store(store.path)
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(RunError, match="cannot be opened"):
        Store(tmp_path / "text")


@pytest.mark.parametrize("journal", ["WAL", "TRUNCATE"])
def test_kill_9_loses_no_appended_trajectory(tmp_path, journal):
    """Fails if a trajectory whose append returned is gone after its writer was killed."""
    writer = child("""
        for seq in range(10**6):
            trajectory = make()
            store.append(trajectory, seq)
            print(trajectory.id, flush=True)
        """, tmp_path / "store.db", journal)
    acknowledged = [writer.stdout.readline().strip() for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    with Store(tmp_path / "store.db", journal) as store:
        ready = store.counts()["ready"]
        found = {trajectory.id for trajectory in store.lease(ready, "learner", version=0)}
    assert len(acknowledged) >= 200 and set(acknowledged) <= found


def test_concurrent_learners_never_lease_the_same(tmp_path):
    """Fails if two processes can get one trajectory, or if opening a new store from several processes fails."""
    path = tmp_path / "store.db"
    code = """
        for _ in range(400):
            store.append(make(), 0)
        print("appended", flush=True)
        sys.stdin.readline()
        while leased := store.lease(1, "x", version=0):
            print(*[trajectory.id for trajectory in leased], flush=True)
        """
    learners = [child(code, path) for _ in range(2)]
    for learner in learners:
        assert learner.stdout.readline().strip() == "appended"
    for learner in learners:
        learner.stdin.write("go\n")
        learner.stdin.flush()
    leased = [word for learner in learners for word in learner.communicate()[0].split()]
    assert [learner.returncode for learner in learners] == [0, 0]
    assert len(leased) == 800 and len(set(leased)) == 800


def member(group: str, version: int = 0, status: Status = Status.COMPLETED, **info) -> Trajectory:
    builder = TrajectoryBuilder([1], "prompt", "task", group)
    builder.add_action([6, 2], [-1.0, -0.1], [version, version])
    return builder.build(status, **info)


def test_lease_takes_complete_groups_only(store):
    """Fails if a group advantage is computed over part of a group, or its members are torn apart in the batch."""
    order = [("b", 2), ("a", 0), ("c", 4), ("b", 3), ("c", 5)]
    for group, seq in order:
        store.append(member(group), seq)
    assert store.lease(6, "learner", version=0, group_size=2) == []
    assert [t.group_id for t in store.lease(4, "learner", version=0, group_size=2)] == ["b", "b", "c", "c"]
    store.append(member("a"), 1)
    assert [t.group_id for t in store.lease(2, "learner", version=0, group_size=2)] == ["a", "a"]


def test_broken_groups_are_dropped_and_counted(store):
    """Fails if what is left of a group with a failed or stale member waits for ever, in pacing's places."""
    store.append(member("failed", status=Status.ERROR, error="no host"), 0)
    store.append(member("failed", 9), 1)
    for seq, version in ((2, 1), (3, 9)):
        store.append(member("stale", version), seq)
    for seq in (4, 5):
        store.append(member("whole", 9), seq)
    assert {t.group_id for t in store.lease(2, "learner", 9, max_token_lag=3, group_size=2)} == {"whole"}
    store.append(member("failed", 9), 6)  # a member that was in flight when its group broke
    assert store.lease(2, "learner", 9, max_token_lag=3, group_size=2) == []
    assert store.counts()["ready"] == 0
    assert store.summary_rows().reasons == {"incomplete group": 3, "no host": 1, "stale": 1}


# If this fails, a group of which one rollout failed is lost although a redundant one stands in for it, or is trained
# without enough of them.
def test_redundant_rollouts_stand_in_for_failed_ones(store):
    for seq in (0, 1):
        store.append(member("whole"), seq)
        store.append(member("broken"), 3 + seq)
    store.append(member("whole", status=Status.ERROR, error="no host"), 2)
    for seq in (6, 7):
        store.append(member("broken", status=Status.ERROR, error="no host"), seq)
    assert {t.group_id for t in store.lease(2, "learner", 0, group_size=2, redundancy=1)} == {"whole"}
    assert store.summary_rows().reasons == {"incomplete group": 2, "no host": 3}


# If this fails, a restarted controller repeats prompts, skips some, or leaves groups that nobody completes.
def test_a_new_controller_deals_what_the_dead_one_had_in_flight(store):
    for group, seq in (("whole", 0), ("whole", 1), ("whole", 2), ("lost", 5), ("trained", 6), ("trained", 8),
                       ("trained", 7)):
        store.append(member(group), seq)
    store.append(member("failed", status=Status.ERROR, error="no host"), 9)
    store.append(member("failed"), 10)
    store.append(member("later"), 15)

    def dealt(count: int, index: int = 0, controllers: int = 1) -> list[int]:
        deal = Deal(store, 3, 0, index, controllers, skip=lambda group: False)
        return [deal.start()[0] for _ in range(count)]
    assert dealt(11) == [3, 4, 12, 13, 14, 16, 17, 18, 19, 20, 21]  # nothing of the group in which one failed
    assert dealt(5, 0, 2) == [12, 13, 14, 18, 19] and dealt(8, 1, 2) == [3, 4, 16, 17, 21, 22, 23, 27]
    assert [Deal(store, 3, 0, index, 2, lambda group: False).live(0) for index in (0, 1)] == [6, 3]
