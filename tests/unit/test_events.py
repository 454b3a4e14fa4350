"""The journal of a run's restarts, which outlives the processes that it tells of."""
from sao_megatron.telemetry.events import Events, read


# If this fails, `status` cannot say what happened in the night, or in which job.
def test_events_are_read_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    journal = Events(tmp_path / "events.jsonl")
    journal.add("start")
    journal.add("restart", "learner-0, learner-1", "learner-1 ended with signal SIGKILL:\n  no memory")
    events = read(journal.path)
    assert [(event.kind, event.what, event.job) for event in events] == [
        ("start", "", "17"), ("restart", "learner-0, learner-1", "17")]
    assert events[1].why == "learner-1 ended with signal SIGKILL: no memory"
    assert events[0].time <= events[1].time


# If this fails, a launcher that was killed while it wrote leaves a journal that nobody can read.
def test_half_a_line_is_left_out(tmp_path):
    journal = Events(tmp_path / "events.jsonl")
    journal.add("start")
    with journal.path.open("a") as file:
        file.write('{"time": 17.0, "ki')
    assert [event.kind for event in read(journal.path)] == ["start"]
    journal.add("end")
    assert [event.kind for event in read(journal.path)] == ["start", "end"]
    assert read(tmp_path / "nothing.jsonl") == []
