"""The trajectory store: states, one transaction each, several processes, kill -9."""
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from sao_megatron.errors import RunError
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder


def make(version: int = 0, last_version: int | None = None, status: Status = Status.COMPLETED, **info) -> Trajectory:
    builder = TrajectoryBuilder([1], "prompt", "task")
    builder.add_action([6, 2], [-1.0, -0.1], [version, version if last_version is None else last_version])
    builder.add_reward(1.0)
    return builder.build(status, **info)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store.db") as store:
        yield store


def child(code: str, path) -> subprocess.Popen:
    """A Python process with `Store` opened at `path` and `make`-able trajectories."""
    prelude = """
        import sys
        from sao_megatron.trajectory.store import Store
        from sao_megatron.trajectory.types import TrajectoryBuilder
        def make():
            builder = TrajectoryBuilder([1], "prompt", "task")
            builder.add_action([6, 2], [-1.0, -0.1], [0, 0])
            return builder.build()
        store = Store(sys.argv[1])
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), str(path)],
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
    assert store.next_seq() == 6


def test_append_is_idempotent(store):
    """Fails if a repeated append adds a row, makes a leased one ready again, or counts its tokens twice."""
    trajectory = make()
    store.append(trajectory, 0)
    [leased] = store.lease(1, "learner", version=0)
    store.append(leased, 7)
    assert store.counts()["leased"] == 1 and store.counts()["ready"] == 0
    assert store.appended_tokens() == 2 and store.next_seq() == 1


def test_stale_are_dropped_even_when_the_batch_is_short(store):
    """Fails if a trajectory older than the limit is trained, or if stale ones hold pacing's places for ever."""
    for seq, version in enumerate((0, 2, 5)):
        store.append(make(version, last_version=5), seq)
    assert store.lease(3, "learner", version=5, max_token_lag=3) == []
    assert store.counts()["dropped"] == 1 and store.counts()["ready"] == 2
    assert len(store.lease(2, "learner", version=5, max_token_lag=3)) == 2
    assert store.summary_rows().reasons == {"stale": 1}


def test_release_returns_only_the_dead_learners_leases(store):
    """Fails if a restarted learner could not train what its predecessor held, or steals from another."""
    for seq in range(3):
        store.append(make(), seq)
    store.lease(1, "dead", version=0)
    store.lease(1, "alive", version=0)
    assert store.release("dead") == 1
    assert store.counts()["ready"] == 2 and store.counts()["leased"] == 1
    assert store.release() == 1 and store.counts()["ready"] == 3


def test_a_trajectory_is_trained_at_most_once(store):
    """Fails if a step could count a trajectory twice or be recorded in part."""
    for seq in range(3):
        store.append(make(), seq)
    first, second = store.lease(2, "learner", version=0)
    store.mark_trained(0, 1, [first.id], {"reward/mean": 1.0})
    for step, ids in ((0, [second.id]), (1, [first.id]), (1, [second.id, "unknown"]), (1, [second.id, second.id])):
        with pytest.raises(RunError):
            store.mark_trained(step, 2, ids, {})
    assert store.counts()["leased"] == 1 and store.counts()["trained"] == 1
    [row] = store.steps()
    assert row[:2] == (0, 1) and row.metrics == {"reward/mean": 1.0}
    store.mark_trained(1, 2, [second.id], {})
    assert [row.step for row in store.steps(after=0)] == [1]


def test_summary_counts_mixed_versions(store):
    """Fails if the share of trajectories that span a weight update is misreported."""
    for seq, trajectory in enumerate((make(0, 1), make(1, 1), make(1, 2, status=Status.TRUNCATED), make(0, 1))):
        store.append(trajectory, seq)
    store.mark_trained(0, 1, [t.id for t in store.lease(3, "learner", version=1)], {})
    summary = store.summary_rows()
    assert summary[:5] == (3, 2, 1, 6, 1.0)


def test_state_publication_and_evaluations_come_back(store):
    """Fails if one process does not read what another one said."""
    assert store.published() is None and store.get_state("stop", False) is False
    store.set_published(3, 2)
    store.set_state("stop", True)
    store.add_evaluation("start", 3, 30, 8, 0.25)
    with Store(store.path) as other:
        assert other.published() == (3, 2) and other.get_state("stop") is True
        [evaluation] = other.evaluations()
    assert (evaluation.name, evaluation.episodes, evaluation.solved, evaluation.mean_reward) == ("start", 30, 8, 0.25)


def test_other_files_are_refused(tmp_path, store):
    """Fails if a store of another schema, or no store at all, is read as if it were one."""
    sqlite3.connect(store.path).execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="schema version 99, expected 1"):
        Store(store.path)
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(RunError, match="cannot be opened"):
        Store(tmp_path / "text")


def test_kill_9_loses_no_appended_trajectory(tmp_path):
    """Fails if a trajectory whose append returned is gone after its writer was killed."""
    writer = child("""
        for seq in range(10**6):
            trajectory = make()
            store.append(trajectory, seq)
            print(trajectory.id, flush=True)
        """, tmp_path / "store.db")
    acknowledged = [writer.stdout.readline().strip() for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    with Store(tmp_path / "store.db") as store:
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


def test_groups_that_lost_a_member_in_flight_are_dropped(store):
    """Fails if a restarted controller leaves groups that nobody completes, or drops one that is whole."""
    for group, seq in (("whole", 0), ("whole", 1), ("lost", 2)):
        store.append(member(group), seq)
    store.drop_unfinishable(2)
    assert store.counts()["dropped"] == 1 and store.summary_rows().reasons == {"incomplete group": 1}
    assert len(store.lease(2, "learner", version=0, group_size=2)) == 2
