"""The supervisor over real child processes: nothing outlives a run, and a failure names its cause."""
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from children import DEADLINE, DEAF, FAMILY, SLEEP, alive, python, until, wait_ready

from sao_megatron.blame import last_words
from sao_megatron.supervisor import Supervisor


# If this fails, an engine's own subprocesses keep running, and keep the GPU, after the run has ended.
def test_stop_ends_children_and_grandchildren(tmp_path, descendants):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([python("family", FAMILY)])
        wait_ready(supervisor, "family")
        pids = descendants()
        assert len(pids) == 2
    assert not alive(pids)


# If this fails, what a crashed process had started is left behind: its parent can no longer be asked for it.
def test_stop_ends_what_a_dead_child_started(tmp_path, descendants):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([python("family", FAMILY)])
        wait_ready(supervisor, "family")
        pids = descendants()
        (leader,) = [process.pid for process in psutil.Process().children() if process.pid in pids]
        os.kill(leader, signal.SIGKILL)
        until(supervisor.poll, "the leader to end")
        assert supervisor.poll() == {"family": -signal.SIGKILL}
        assert len(alive(pids)) == 1
    assert not alive(pids)


# If this fails, a process that ignores SIGTERM hangs the end of the run.
def test_stop_kills_after_the_grace(tmp_path, descendants):
    with Supervisor(tmp_path, grace=0.3) as supervisor:
        supervisor.start([python("deaf", DEAF)])
        wait_ready(supervisor, "deaf")
        pids = descendants()
    assert not alive(pids)


# If one fails, Ctrl-C or a terminated launcher (even a killed one) leaves processes behind, deaf to SIGTERM though they
# may be, or hides why it ended.
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_to_the_launcher(tmp_path, number, code):
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from sao_megatron.supervisor import ProcessSpec, Supervisor
        try:
            with Supervisor(Path({str(tmp_path)!r}), grace=1.0) as supervisor:
                supervisor.start([ProcessSpec(name, [sys.executable, "-c", code]) for name, code in
                                  (("one", {SLEEP!r}), ("deaf", {DEAF!r}))])
                print("started", flush=True)
                while True:
                    supervisor.poll()
                    time.sleep(0.05)
        except KeyboardInterrupt:
            sys.exit(130)
        """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        pids = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(pids) == 2
        until(lambda: b"ready" in (tmp_path / "deaf.log").read_bytes(), "the deaf one to be ready")
        process.send_signal(number)
        assert process.wait(DEADLINE) == code
        until(lambda: not alive(pids), "the children to end")


# If this fails, a failed run says only that something failed.
def test_failure_names_process_code_reason_and_log(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([python("learner-0", "print('step 3'); raise ValueError('no such tensor')")])
        until(supervisor.poll, "the child to end")
        message = str(supervisor.failure(["learner-0"]))
    first = message.splitlines()[0]
    assert first.startswith("learner-0 ended unexpectedly with exit code 1: ValueError: no such tensor; its log is ")
    assert first.endswith("learner-0.log")
    assert "ValueError" in message.splitlines()[-1]


# If this fails, the blame falls on a process that died of another's death.
def test_failure_blames_the_first_to_die(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([python("learner-1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")])
        until(supervisor.poll, "learner-1 to end")
        supervisor.start([python("learner-0", "raise ConnectionError('peer closed')")])
        until(lambda: len(supervisor.poll()) == 2, "learner-0 to end")
        message = str(supervisor.failure(["learner-0", "learner-1"]))
    assert message.startswith("learner-1 ended unexpectedly with signal SIGKILL (then also learner-0): "
                              "its log is empty")


# If one fails, the reason that a log holds is not the one that is shown.
@pytest.mark.parametrize(("log", "reason"), [
    ("a\nsao-megatron: store x is locked\n", "store x is locked"),
    ("[t] Scheduler hit an exception: Traceback (most recent call last):\n  File \"a\", line 1\n    f()\n"
     "KeyError: 'x'\n\n[t] SIGQUIT received\n", "KeyError: 'x'"),
    ("Traceback (most recent call last):\n  f()\nA: 1\nDuring handling of the above exception, another exception "
     "occurred:\nTraceback (most recent call last):\n  g()\nB: 2\n", "B: 2"),
    ("one\ntwo\n", "two"),
    ("Traceback (most recent call last):\n  f(", "f("),
    ("", "its log is empty"),
])
def test_last_words(tmp_path, log, reason):
    (tmp_path / "x.log").write_text(log)
    assert last_words(tmp_path / "x.log")[0] == reason
