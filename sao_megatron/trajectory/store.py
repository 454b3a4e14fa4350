"""The trajectory store: one SQLite file between the rollout side and the training side (DESIGN.md §3).

A trajectory is `ready` when it is appended, `leased` by a learner, then `trained`; a stale one is `dropped`, one whose
environment failed is `error`. Every method is one transaction, and writers queue for SQLite's single write lock, so any
number of processes may open the file and any of them may be killed at any time, or the power cut: what `append`
returned for is on the disk (synchronous=FULL). The journal is a write-ahead log, one sync of the disk a write; on a
network file system, which cannot share the memory that this log needs, it is a rollback journal, several times slower
(trajectory/journal.py). All processes that use a store run on one host. min_version and max_version count the policy
updates in a trajectory's weights (trajectory/versions.py).

A learner that died leaves leases, and perhaps steps that its surviving weights do not contain: `rewind` gives back what
those weights have not trained, and remembers in which batches, so that they are trained again in the same ones.
Blobs have a table of their own, so that changing a state never rewrites them, and triggers keep the running totals,
so that counting costs the same at the first trajectory and at the millionth. No trajectory is ever deleted.
"""
from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sao_megatron.errors import RunError
from sao_megatron.trajectory.journal import journal_mode
from sao_megatron.trajectory.types import Status, Trajectory, decode, encode
from sao_megatron.trajectory.versions import updates_in

SCHEMA_VERSION = 2
STATES = ("ready", "leased", "trained", "dropped", "error")
MAX_LAG = "max_lag"
"""Key of the state: the lag that pacing may admit now, where the learner has lowered it (alarms.on_alarm=slow)."""
ALARMS = "alarms"
"""Key of the state: [[step, sentence], ...] of the last alarms."""
STOPPED = "stopped"
"""Key of the state: the sentence of the alarm that ended the run (alarms.on_alarm=stop)."""
ENGINES = "engines"
"""Key of the state: metrics of the engines and their GPUs, by name, as they were a moment ago."""
LOCK_TIMEOUT = 60.0  # seconds to wait for another process's write, which takes milliseconds

_SCHEMA = f"""
CREATE TABLE trajectories (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, seq INTEGER NOT NULL, task TEXT NOT NULL, prompt_id TEXT NOT NULL,
    group_id TEXT NOT NULL, status TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, reward REAL, solved INTEGER,
    num_tokens INTEGER NOT NULL, num_actions INTEGER NOT NULL, min_version INTEGER, max_version INTEGER,
    created REAL NOT NULL, leased_by TEXT, step INTEGER);
CREATE INDEX by_state ON trajectories (state, seq);
CREATE INDEX by_group ON trajectories (group_id);
CREATE TABLE blobs (row INTEGER PRIMARY KEY REFERENCES trajectories, blob BLOB NOT NULL);
CREATE TABLE steps (step INTEGER PRIMARY KEY, version INTEGER NOT NULL, time REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE evaluations (name TEXT NOT NULL, version INTEGER NOT NULL, episodes INTEGER NOT NULL,
                          solved INTEGER NOT NULL, mean_reward REAL NOT NULL, time REAL NOT NULL,
                          task_set TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE half_done (seq INTEGER NOT NULL, turn INTEGER NOT NULL, data TEXT NOT NULL, PRIMARY KEY (seq, turn));
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE totals (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO totals VALUES ('action_tokens', 0), {", ".join(f"('{state}', 0)" for state in STATES)};
CREATE TRIGGER appended AFTER INSERT ON trajectories BEGIN
    UPDATE totals SET value = value + 1 WHERE key = NEW.state;
    UPDATE totals SET value = value + NEW.num_actions WHERE key = 'action_tokens'; END;
CREATE TRIGGER moved AFTER UPDATE OF state ON trajectories BEGIN
    UPDATE totals SET value = value - 1 WHERE key = OLD.state;
    UPDATE totals SET value = value + 1 WHERE key = NEW.state; END;
PRAGMA user_version = {SCHEMA_VERSION};
"""


class StepRow(NamedTuple):
    step: int
    version: int
    """Weight version after the step."""
    time: float
    """Unix seconds."""
    metrics: dict[str, Any]


class EvaluationRow(NamedTuple):
    name: str
    version: int
    episodes: int
    solved: int
    mean_reward: float
    time: float
    """Unix seconds."""
    task_set: str
    """Name of the set of prompts."""
    metrics: dict[str, float]
    """What rollout/evaluate.py computes besides: pass@k, avg@k, the versions of its tokens."""


class Summary(NamedTuple):
    trained: int
    """Trajectories trained, over all steps."""
    mixed_version: int
    """Those whose action tokens were sampled from more than one weight version."""
    truncated: int
    """Trained trajectories that a budget cut off."""
    trained_tokens: int
    """Action tokens of the trained trajectories."""
    mean_reward: float | None
    """Over the trained trajectories; None before the first step."""
    reasons: dict[str, int]
    """Trajectories that were dropped or failed, by reason."""


def within(updates: int) -> str:
    """Name of the evaluation within a run, of the weights after so many policy updates; others are start and end."""
    return f"update {updates}"


def is_within(name: str) -> bool:
    return name.startswith("update ")


class Store:
    """A handle for one thread of one process. Raises RunError if the file is not a store of this schema version."""

    def __init__(self, path: str | Path, journal: str | None = None, read_only: bool = False):
        """`journal`: WAL or TRUNCATE; by default what the file system allows. `read_only`: for a look at a store that
        others write, from any machine; it must exist, and every method that writes raises."""
        self.path = Path(path)
        try:
            if read_only:
                self._db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_TIMEOUT,
                                           isolation_level=None)
                self._check_version()
                return
            self._db = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT, isolation_level=None)
            self._set_journal(journal or journal_mode(self.path))
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._create_or_check()
        except sqlite3.Error as error:
            raise RunError(f"trajectory store {self.path} cannot be opened: {error}") from None

    def _set_journal(self, mode: str) -> None:
        """SQLite keeps the mode that a store has, without an error, where it cannot change it. And it does not wait for
        another process that changes it at the same time."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                found = self._one(f"PRAGMA journal_mode = {mode}")[0]
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if found.upper() != mode:
            raise RunError(f"trajectory store {self.path} keeps the journal {found}, but where it lies only {mode} is "
                           f"safe: end all processes that use it, and try again")

    def _create_or_check(self) -> None:
        (found,), (tables,) = self._one("PRAGMA user_version"), self._one("SELECT COUNT(*) FROM sqlite_schema")
        if found == 0 and tables == 0:
            statement = ""
            for line in _SCHEMA.splitlines():  # executescript would commit the transaction
                statement += line + "\n"
                if sqlite3.complete_statement(statement):
                    self._db.execute(statement)
                    statement = ""
        else:
            self._check_version()

    def _check_version(self) -> None:
        found = self._one("PRAGMA user_version")[0]
        if found != SCHEMA_VERSION:
            raise RunError(f"trajectory store {self.path} has schema version {found}, expected {SCHEMA_VERSION}: "
                           "start a new run, or use the package version that wrote it")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _transaction(self):
        """The write lock from the first statement on: all or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise RunError(f"trajectory store {self.path}: waited {LOCK_TIMEOUT:.0f} s for the write lock that another "
                           f"process holds ({error})") from None
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _one(self, sql: str, *values) -> tuple:
        return self._db.execute(sql, values).fetchone()

    # Trajectories

    def append(self, trajectory: Trajectory, seq: int) -> None:
        """Add a finished trajectory; `seq` is its place in admission order. Adding an id again changes nothing."""
        self.append_all([(trajectory, seq)])

    def append_all(self, finished: list[tuple[Trajectory, int]]) -> None:
        """`append` each of them, all or none: one sync of the disk, however many they are."""
        added = [(_row(trajectory, seq), encode(trajectory)) for trajectory, seq in finished]
        with self._transaction():
            for row, blob in added:
                inserted = self._db.execute(_INSERT, row)
                if inserted.rowcount:
                    self._db.execute("INSERT INTO blobs VALUES (?, ?)", (inserted.lastrowid, blob))
                self._db.execute("DELETE FROM half_done WHERE seq = ?", (row["seq"],))

    def lease(self, count: int, owner: str, version: int, max_token_lag: int | None = None, group_size: int = 1,
              step: int | None = None, redundancy: int = 0) -> list[Trajectory]:
        """Take exactly `count` ready trajectories, lowest seq first; [] if fewer are ready.

        `version` is the learner's weight version. Ready trajectories with a token from weights with over
        `max_token_lag` fewer updates are first marked dropped, reason "stale" (also where the answer is [], so that
        pacing gives their places to new episodes). With `group_size` > 1, which must divide `count`, only complete
        groups are taken, each one's members together; what is left of a group of which a member was dropped, or more
        than `redundancy` failed, is itself dropped, reason "incomplete group", so that it cannot hold pacing's places.
        `step` is the learner step that they are for: if lost weights were trained in it (see `rewind`), then it is on
        the same trajectories.
        """
        with self._transaction():
            if max_token_lag is not None:
                self._db.execute("UPDATE trajectories SET state = 'dropped', reason = 'stale' "
                                 "WHERE state = 'ready' AND min_version < ?", (updates_in(version) - max_token_lag,))
            if group_size > 1:
                self._db.execute(_DROP_BROKEN_GROUPS, (redundancy,))
            rows = [row for row, in self._db.execute(_READY_AGAIN, (step,))]
            if len(rows) != count:
                rows = [row for row, in self._db.execute(_READY_GROUPS, dict(count=count, size=group_size))]
            if len(rows) < count:
                return []
            self._db.execute("UPDATE trajectories SET state = 'leased', leased_by = ? "
                             "WHERE row IN (SELECT value FROM json_each(?))", (owner, json.dumps(rows)))
        # Outside the transaction: reading large blobs must not keep the controller from appending.
        return self.read(rows)

    def groups(self, width: int) -> dict[int, tuple[list[int], int, bool]]:
        """Of every group of `width` consecutive seqs: which are there, how many of these have an outcome, and whether
        one was dropped. Reads all rows: for a controller that starts."""
        groups: dict[int, tuple[list[int], int, bool]] = {}
        for seq, state in self._db.execute("SELECT seq, state FROM trajectories ORDER BY seq"):
            seqs, outcomes, dropped = groups.get(seq // width, ([], 0, False))
            groups[seq // width] = [*seqs, seq], outcomes + (state != "error"), dropped or state == "dropped"
        return groups

    def dropped(self, width: int, index: int, controllers: int) -> int:
        """Dropped trajectories of the groups that controller `index` of `controllers` deals: g with g % n = index."""
        if controllers == 1:
            return self.counts()["dropped"]
        return self._one("SELECT COUNT(*) FROM trajectories WHERE state = 'dropped' AND (seq / ?) % ? = ?",
                         width, controllers, index)[0]

    # Episodes under way, of tasks that can be replayed

    def keep_turns(self, turns: list[tuple[int, int, Any]], given_up: list[int] = ()) -> None:
        """Remember finished turns (seq, turn, JSON-able) of episodes under way; turn 0 begins its episode anew.
        `given_up`: seqs of episodes that will not go on."""
        with self._transaction():
            for seq, turn, data in turns:
                if turn == 0:
                    self._db.execute("DELETE FROM half_done WHERE seq = ?", (seq,))
                self._db.execute("INSERT OR REPLACE INTO half_done VALUES (?, ?, ?)", (seq, turn, json.dumps(data)))
            self._db.executemany("DELETE FROM half_done WHERE seq = ?", [(seq,) for seq in given_up])

    def kept_turns(self, seq: int) -> list[Any]:
        """What `keep_turns` remembers of an episode, in order; nothing once its trajectory is appended."""
        rows = self._db.execute("SELECT data FROM half_done WHERE seq = ? ORDER BY turn", (seq,))
        return [json.loads(data) for data, in rows]

    def rewind(self, step: int) -> int:
        """Take back what weights that include `step` learner steps have not trained. Returns the learner's generation.

        For a learner that begins: leases of its predecessors and what they trained in steps `step` and later become
        ready again, these for the same steps, and the records of those steps go. Generations count from 0; version
        numbers of different ones differ (trajectory/versions.py). Raises RunError, and changes nothing, if the store
        records fewer steps than the weights include: it is older than the checkpoint.
        """
        with self._transaction():
            recorded = self._one("SELECT COALESCE(MAX(step), -1) + 1 FROM steps")[0]
            if recorded < step:
                raise RunError(f"trajectory store {self.path} records {recorded} steps, the checkpoint holds {step}: "
                               f"trajectories would be trained twice; remove the checkpoints after step {recorded}, "
                               f"or bring back the store that belongs to them")
            self._db.execute("UPDATE trajectories SET state = 'ready', leased_by = NULL "
                             "WHERE state = 'leased' OR (state = 'trained' AND step >= ?)", (step,))
            self._db.execute("DELETE FROM steps WHERE step >= ?", (step,))
            generation = self.get_state("generation", -1) + 1
            self._set("generation", generation)
            self._set("first_step", step)
        return generation

    def copy_for_replay(self, path: Path) -> None:
        """Write a store that holds the same trajectories, all yet to be trained, in the steps in which they were.

        Failed and dropped ones stay what they are. Steps, evaluations and the state are left out.
        """
        with closing(sqlite3.connect(path)) as target:
            self._db.backup(target)
        with Store(path) as copy, copy._transaction():
            copy._db.execute("UPDATE trajectories SET state = 'ready', leased_by = NULL "
                             "WHERE state IN ('leased', 'trained')")
            for table in ("steps", "evaluations", "state", "half_done"):
                copy._db.execute(f"DELETE FROM {table}")

    def recorded(self) -> list[int]:
        """Rows of all trajectories with an outcome, whatever became of them, in admission order."""
        rows = self._db.execute("SELECT row FROM trajectories WHERE state != 'error' ORDER BY seq, row")
        return [row for row, in rows]

    def read(self, rows: list[int]) -> list[Trajectory]:
        """Trajectories by row; changes nothing."""
        return [decode(self._one("SELECT blob FROM blobs WHERE row = ?", row)[0]) for row in rows]

    def mark_trained(self, step: int, version: int, ids: list[str], metrics: dict[str, Any], owner: str) -> None:
        """Record learner step `step`, in which `owner` trained `ids`, and which led to weight version `version`.

        Raises RunError, and changes nothing, if the step exists or if any id is not leased by `owner`: a trajectory is
        trained at most once.
        """
        with self._transaction():
            if self._one("SELECT 1 FROM steps WHERE step = ?", step):
                raise RunError(f"trajectory store {self.path}: step {step} is already recorded: does another learner "
                               "write to this run?")
            marked = self._db.execute("UPDATE trajectories SET state = 'trained', step = ? "
                                      "WHERE state = 'leased' AND leased_by = ? "
                                      "AND id IN (SELECT value FROM json_each(?))",
                                      (step, owner, json.dumps(ids))).rowcount
            if marked != len(ids):
                raise RunError(f"trajectory store {self.path}: step {step} names {len(ids)} trajectories, of which "
                               f"{owner} leases {marked}: each must be leased, and is trained once (has another "
                               f"learner of this run begun?)")
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, version, time.time(), json.dumps(metrics)))

    def counts(self) -> dict[str, int]:
        """Number of trajectories in each of STATES."""
        totals = dict(self._db.execute("SELECT key, value FROM totals"))
        return {state: totals[state] for state in STATES}

    def appended_tokens(self) -> int:
        """Action tokens of all trajectories ever appended."""
        return self._one("SELECT value FROM totals WHERE key = 'action_tokens'")[0]

    # What the learner and the evaluation report

    def steps(self, after: int = -1) -> list[StepRow]:
        """Recorded steps above `after`, in order."""
        rows = self._db.execute("SELECT step, version, time, metrics FROM steps WHERE step > ? ORDER BY step", (after,))
        return [StepRow(step, version, when, json.loads(metrics)) for step, version, when, metrics in rows]

    def last_steps(self, count: int) -> list[StepRow]:
        """The newest `count` recorded steps, in order."""
        newest = self._one("SELECT COALESCE(MAX(step), -1) FROM steps")[0]
        return self.steps(after=newest - count)

    def add_evaluation(self, name: str, version: int, episodes: int, solved: int, mean_reward: float,
                       task_set: str = "", metrics: dict[str, float] | None = None) -> None:
        with self._transaction():
            self._db.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                             (name, version, episodes, solved, mean_reward, time.time(), task_set,
                              json.dumps(metrics or {})))

    def evaluations(self) -> list[EvaluationRow]:
        """In the order in which they were added."""
        rows = self._db.execute("SELECT * FROM evaluations ORDER BY rowid")
        return [EvaluationRow(*row, json.loads(metrics)) for *row, metrics in rows]

    def summary_rows(self) -> Summary:
        """What a run's summary needs of the trajectories; decodes no blob."""
        totals = self._one("SELECT COUNT(*), COALESCE(SUM(min_version < max_version), 0), "
                           "COALESCE(SUM(status = 'truncated'), 0), COALESCE(SUM(num_actions), 0), AVG(reward) "
                           "FROM trajectories WHERE state = 'trained'")
        reasons = self._db.execute("SELECT COALESCE(reason, ''), COUNT(*) FROM trajectories "
                                   "WHERE state IN ('dropped', 'error') GROUP BY 1 ORDER BY 2 DESC")
        return Summary(*totals, reasons=dict(reasons))

    # Small shared facts

    def get_state(self, key: str, default: Any = None) -> Any:
        row = self._one("SELECT value FROM state WHERE key = ?", key)
        return default if row is None else json.loads(row[0])

    def set_state(self, key: str, value: Any) -> None:
        """Set `key` to a JSON-able value."""
        with self._transaction():
            self._set(key, value)

    def _set(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))

    def sum_of(self, key: str) -> int:
        """Of what each controller says under key/<its index>: "in_flight" (episodes), "redundant" (cancelled ones)."""
        return self._one("SELECT COALESCE(SUM(value), 0) FROM state WHERE key GLOB ?", f"{key}/*")[0]

    def set_published(self, version: int, step: int) -> None:
        """Say that the engines now serve weight `version`, which includes `step` learner steps."""
        self.set_state("published", [version, step])

    def published(self) -> tuple[int, int] | None:
        """(version, number of learner steps it includes), or None before the first publication."""
        row = self.get_state("published")
        return None if row is None else (row[0], row[1])

    def unpublish(self) -> None:
        """Say that the engines serve nothing: they start."""
        self.forget("published")

    def forget(self, *keys: str) -> None:
        """Remove keys of the state."""
        with self._transaction():
            self._db.execute("DELETE FROM state WHERE key IN (SELECT value FROM json_each(?))", (json.dumps(keys),))


def _row(trajectory: Trajectory, seq: int) -> dict[str, Any]:
    failed = trajectory.status is Status.ERROR
    versions, solved = updates_in(trajectory.action_versions), trajectory.info.get("solved")
    return dict(
        id=trajectory.id, seq=seq, task=trajectory.task, prompt_id=trajectory.prompt_id,
        group_id=trajectory.group_id, status=trajectory.status, state="error" if failed else "ready",
        reason=trajectory.info.get("error") if failed else None,
        reward=None if failed else trajectory.reward, solved=None if solved is None else int(solved),
        num_tokens=len(trajectory), num_actions=len(versions),
        min_version=int(versions.min()) if len(versions) else None,
        max_version=int(versions.max()) if len(versions) else None, created=time.time())


_DROP_BROKEN_GROUPS = """
    UPDATE trajectories SET state = 'dropped', reason = 'incomplete group' WHERE state = 'ready' AND (
        SELECT SUM(other.state = 'error') > ? OR SUM(other.state = 'dropped') > 0 FROM trajectories AS other
        WHERE other.group_id = trajectories.group_id AND other.state IN ('dropped', 'error'))"""
_READY_AGAIN = "SELECT row FROM trajectories WHERE state = 'ready' AND step = ? ORDER BY seq, row"
# A group's seqs are consecutive, so that ordering by seq keeps its members together.
_READY_GROUPS = """
    SELECT row FROM trajectories WHERE state = 'ready' AND (:size = 1 OR group_id IN (
        SELECT group_id FROM trajectories WHERE state = 'ready' GROUP BY group_id HAVING COUNT(*) = :size))
    ORDER BY seq, row LIMIT :count"""
_COLUMNS = ("id", "seq", "task", "prompt_id", "group_id", "status", "state", "reason", "reward", "solved", "num_tokens",
            "num_actions", "min_version", "max_version", "created")
_INSERT = (f"INSERT INTO trajectories ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)}) "
           f"ON CONFLICT (id) DO NOTHING")
