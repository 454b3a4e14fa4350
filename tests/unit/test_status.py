"""`sao-megatron status`: what a person at a login node learns of a run from its folder alone."""
import hashlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from sao_megatron import cli
from sao_megatron import config as run_config
from sao_megatron.checkpoints import KEYS
from sao_megatron.engine.process import free_port
from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry import status
from sao_megatron.telemetry.events import Events
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory


def metrics(step: int) -> dict:
    return {"reward/mean": 0.1 * step, "reward/solve_rate": 0.25, "mask/dropped": 0.02, "lag/mean": 1.5, "lag/max": 3,
            "learner/tokens_per_second": 2000.0, "engine/tokens_per_second": 1000.0, "seconds/step": 10.0,
            "seconds/wait": 6.0, "seconds/policy": 4.0}


def add_step(store: Store, step: int) -> None:
    store.append(Trajectory(
        tokens=np.array([1, 2]), action_mask=np.array([False, True]), rollout_logprobs=np.array([np.nan, -1.0]),
        versions=np.array([-1, 0]), turns=np.zeros(2), rewards=np.array([0.0, 1.0]), prompt_id="p", task="t"), step)
    (leased,) = store.lease(1, "learner", step)
    store.mark_trained(step, step, [leased.id], metrics(step), "learner")


@pytest.fixture
def folder(tmp_path):
    """A run of 40 steps that has made 25."""
    folder = RunFolder(tmp_path / "first")
    folder.path.mkdir()
    run_config.save(run_config.parse({
        "name": "first", "runs_dir": str(tmp_path), "steps": 40, "model": {"path": "m"}, "task": {"name": "t"},
        "algorithm": {"critic_only_steps": 0}, "checkpoint": {"every": 20}}), folder.config_path)
    with Store(folder.store_path) as store:
        for step in range(25):
            add_step(store, step)
        store.set_state("in_flight/0", 7)
    return folder


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        """Nothing on stderr."""


@pytest.fixture
def server():
    """URL of an HTTP server that is healthy as SGLang is."""
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def shown(folder) -> dict[str, str]:
    """Text by label; the lines under the restarts joined."""
    texts: dict[str, str] = {}
    label = ""
    for name, text in status.rows(status.collect(folder.path)):
        label = name or label
        texts[label] = f"{texts[label]} {text}" if label in texts else text
    return texts


# If this fails, a number of the status is not the run's.
def test_numbers_of_a_run(folder):
    texts = shown(folder)
    assert texts["step"].startswith("25 of 40, the last ") and "10.0 s a step, 2m30s left" in texts["step"]
    assert texts["reward"] == "2.400, 20-step mean 1.450; solved 25%"
    assert texts["tokens/s"] == "learner 2,000, engines 1,000"
    assert texts["lag"] == "mean 1.5, largest 3 versions"
    assert texts["masked"] == "2.00% of action tokens"
    assert texts["queue"] == "0 trajectories ready of 128, 7 episodes in flight"
    assert texts["time"] == "wait 6.0 s (60%), policy 4.0 s (40%)"
    assert (texts["checkpoint"], texts["engines"], texts["restarts"]) == ("none yet", "not placed yet", "none")


# If this fails, an engine that died stays unnoticed until somebody looks into its log, or a living one is missed.
def test_engines_are_asked(folder, server):
    dead = f"http://127.0.0.1:{free_port()}"
    folder.place_engines([server, dead])
    assert shown(folder)["engines"] == f"1 of 2 answer; silent: {dead}"


# If this fails, nobody learns in the morning what happened in the night.
def test_restarts_and_their_causes(folder):
    events = Events(folder.events_path)
    events.add("start", "learner-0")
    for number in range(7):
        events.add("restart", "learner-0", f"it ended with exit code {number}")
    text = shown(folder)["restarts"]
    assert text.startswith("7, the last 5:")
    assert "restart learner-0: it ended with exit code 6" in text and "exit code 1" not in text


# If one fails, a run that ended, waits or is back in the queue looks like one that trains.
@pytest.mark.parametrize(("kind", "text"), [("failure", "ended "), ("requeue", "back in the queue since ")])
def test_what_a_run_does_that_does_not_train(folder, kind, text):
    Events(folder.events_path).add(kind, "", "the time limit is near")
    assert text in shown(folder)["run"] and "the time limit is near" in shown(folder)["run"]


# If this fails, a run that an alarm has paused looks like one that hangs.
def test_a_paused_run(folder):
    folder.paused_path.write_text("step 12: the reward fell\n")
    assert "paused until the file PAUSED is deleted: step 12: the reward fell" in shown(folder)["run"]


# If this fails, the reader does not know how much would be lost.
def test_the_newest_checkpoint(folder):
    for step in (20, 25):
        partial = folder.checkpoints.begin(step, 0)
        folder.checkpoints.finish(partial, dict.fromkeys(KEYS - {"format"}) | {"written": time.time() - 90}, keep=2)
    assert shown(folder)["checkpoint"] == "step 25, written 1m30s ago"


# If this fails, a look from another machine changes the run's files, or waits for (or holds up) the learner's writing.
def test_looking_changes_nothing_and_waits_for_nobody(folder):
    with Store(folder.store_path) as writer, writer._transaction():
        writer._db.execute("INSERT INTO state VALUES ('half', '1')")
        before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.path.rglob("*.sqlite*")
                  if not path.name.endswith("-shm")}
        assert shown(folder)["step"].startswith("25 of 40")
        assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in before} == before
    with Store(folder.store_path, read_only=True) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.set_state("half", 2)


# If this fails, a run that has not begun yet, or another folder, gives a traceback.
def test_nothing_there_yet(folder, tmp_path):
    folder.store_path.unlink()
    texts = shown(folder)
    assert texts["step"] == "0 of 40" and texts["run"].endswith("nothing was started yet")
    with pytest.raises(UserError, match="not the folder of a run"):
        status.collect(tmp_path / "nowhere")
    (tmp_path / "nowhere.submitted.yaml").touch()
    with pytest.raises(UserError, match="its job has not begun yet: look at `squeue --me --name=nowhere"):
        status.collect(tmp_path / "nowhere")


# If this fails, `status` in a script or a log is full of control characters, or the table is cut at 80 columns.
def test_plain_lines_without_a_terminal(folder, capsys):
    assert cli.main(["status", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "step       25 of 40" in out


# If this fails, --watch shows the run once, or Ctrl-C ends it with a traceback.
def test_watch_shows_it_again(folder):
    code = ("import sys\nfrom sao_megatron import cli\nfrom sao_megatron.telemetry import status\n"
            "status.WATCH_SECONDS = 0.05\nsys.exit(cli.main(['status', sys.argv[1], '--watch']))")
    watching = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored by `&`
    try:
        assert sum(watching.stdout.readline().startswith("step ") for _ in range(30)) >= 2
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 130
        assert "Traceback" not in watching.stderr.read()
    finally:
        watching.kill()
        watching.communicate()
