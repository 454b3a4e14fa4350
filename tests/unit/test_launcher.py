"""The supervisor and the watch over real child processes: nothing outlives a run, and a failure names its cause."""
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sao_megatron import config as run_config
from sao_megatron import launcher
from sao_megatron.blame import last_words
from sao_megatron.engine.process import engine_command, free_port
from sao_megatron.errors import RunError, Unfinished, UserError
from sao_megatron.placement.plan import OneMachine, Plan
from sao_megatron.sandbox_watch import MOST_RESTARTS
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import Store
from sao_megatron.watch import Watch

DEADLINE = 30.0

SLEEP = "import time; time.sleep(600)"
FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def python(name: str, code: str, *arguments: object) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code, *map(str, arguments)])


def until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE:.0f} s for {what}"
        time.sleep(0.02)


def wait_ready(supervisor: Supervisor, name: str) -> None:
    until(lambda: b"ready" in supervisor.log_path(name).read_bytes(), f"{name} to be ready")


def alive(pids) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def descendants():
    """descendants(): processes that this test has started; the session may have an engine of its own."""
    def pids() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}
    before = pids()
    return lambda: sorted(pids() - before)


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


@pytest.fixture
def config(tmp_path):
    return run_config.parse({"name": "test", "runs_dir": str(tmp_path), "steps": 2, "task": {"name": "guess_number"},
                             "model": {"path": "nowhere"}, "algorithm": {"critic_only_steps": 0}})


FINISH = """
import sys
from sao_megatron.trajectory.store import Store
Store(sys.argv[1]).set_state("finished", True)
"""
FOLLOW = """
import sys, time
from sao_megatron.trajectory.store import Store
store = Store(sys.argv[1])
while not store.get_state("finished", False):
    time.sleep(0.05)
"""


def watch(config, tmp_path: Path, learner: str, controller: str, engine: str = SLEEP) -> None:
    """Watch three small programs in the places of a run's processes."""
    path = tmp_path / "store.sqlite"
    plan = Plan([python("engine-0", engine)], python("controller", controller, path),
                [python("learner-0", learner, path)], ["http://127.0.0.1:9"])
    with Store(path) as store, Supervisor(tmp_path / "logs") as supervisor:
        watching = Watch(config, OneMachine(plan, tmp_path / "logs"), store, supervisor, Progress(2))
        watching.start()
        watching.until_done()


# If this fails, a run that is done never ends, or ends as failed.
def test_watch_ends_with_learner_and_controller(config, tmp_path, descendants):
    watch(config, tmp_path, FINISH, FOLLOW)
    assert not alive(descendants())


# If one fails, a run goes on without one of its parts, or says done though it is not.
@pytest.mark.parametrize(("name", "code", "how"), [
    ("learner", "raise RuntimeError('boom')", "learner-0 ended unexpectedly with exit code 1: RuntimeError: boom"),
    ("learner", "print('early')", "learner-0 ended unexpectedly with exit code 0: early"),
    ("controller", "print('early')", "controller ended unexpectedly with exit code 0: early"),
    ("engine", "raise SystemExit('no memory')", "engine-0 ended unexpectedly with exit code 1: no memory"),
])
def test_watch_stops_when_a_process_dies(config, tmp_path, name, code, how, descendants):
    programs = {"learner": SLEEP, "controller": SLEEP, "engine": SLEEP} | {name: code}
    with pytest.raises(RunError, match=how):
        watch(config, tmp_path, **programs)
    assert not alive(descendants())


STOP = """
import sys
from sao_megatron.trajectory.store import STOPPED, Store
Store(sys.argv[1]).set_state(STOPPED, "mask_share = 0.4")
raise SystemExit("stopped by an alarm at step 4")
"""


# If this fails, a run that an alarm ended is started again, to be ended by the same alarm.
def test_an_alarm_that_ends_a_run_is_no_failure_to_recover_from(config, tmp_path, descendants):
    config.restarts = 3
    with pytest.raises(RunError, match="exit code 1: stopped by an alarm at step 4"):
        watch(config, tmp_path, STOP, SLEEP)
    assert (tmp_path / "logs" / "learner-0.log").read_text().count("stopped by an alarm") == 1


# If this fails, in-place updates leave episodes on keys and values of ever older weights, or label tokens wrongly.
def test_in_place_engines_keep_no_cache_and_do_not_overlap(config, tmp_path):
    config.publication.mode = "in_place"
    command = engine_command(config, tmp_path, 1, gpu=True)
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= set(command)


MORTAL = """
import http.server, sys, threading, time
lives = open(sys.argv[1], "a+")
print("life", file=lives, flush=True)
lives.seek(0)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if len(lives.readlines()) < int(sys.argv[3]):
            lives.seek(0)
            threading.Thread(target=lambda: (time.sleep(1.5), __import__("os")._exit(3))).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Health).serve_forever()
"""
OUTLIVE = """
import sys, time
from pathlib import Path
from sao_megatron.trajectory.store import Store
while Path(sys.argv[2]).read_text().count("life") < int(sys.argv[3]):
    time.sleep(0.05)
Store(sys.argv[1]).set_state("finished", True)
"""


# If this fails, one engine that dies ends a run, or one that dies again and again keeps it for ever.
@pytest.mark.parametrize(("restarts", "ends"), [(2, True), (1, False)])
def test_watch_starts_an_engine_again(config, tmp_path, restarts, ends, capsys):
    config.engine.restarts = restarts
    store_path, lives, port = tmp_path / "store.sqlite", tmp_path / "lives", free_port()
    lives.touch()
    plan = Plan([python("engine-0", MORTAL, lives, port, 3)], python("controller", FOLLOW, store_path),
                         [python("learner-0", OUTLIVE, store_path, lives, 3)], [f"http://127.0.0.1:{port}"])
    with Store(store_path) as store, Supervisor(tmp_path / "logs") as supervisor:
        watched = Watch(config, OneMachine(plan, tmp_path / "logs"), store, supervisor, Progress(2))
        watched.start()
        if ends:
            watched.until_done()
        else:
            with pytest.raises(RunError, match="engine-0 ended unexpectedly with exit code 3"):
                watched.until_done()
    assert lives.read_text().count("life") == 1 + restarts
    assert f"is started again ({restarts} of engine.restarts={restarts})" in "".join(capsys.readouterr())


# If one fails, a sandbox server that dies ends a run, or one that cannot live is started for ever.
@pytest.mark.parametrize(("deaths", "ends"), [(2, True), (99, False)])
def test_watch_starts_a_sandbox_server_again(config, tmp_path, deaths, ends, capsys):
    store_path, lives = tmp_path / "store.sqlite", tmp_path / "lives"
    lives.touch()
    server = "import sys, time\nprint('life', file=open(sys.argv[1], 'a'), flush=True)\n" \
             "if open(sys.argv[1]).read().count('life') <= int(sys.argv[2]):\n    sys.exit('cannot isolate')\n" \
             "time.sleep(600)"
    plan = Plan([], python("controller", FOLLOW, store_path), [python("learner-0", OUTLIVE, store_path, lives, 3)], [],
                sandboxes=[python("sandbox-0", server, lives, deaths)])
    if not ends:
        plan.learners[0] = python("learner-0", SLEEP)
    with Store(store_path) as store, Supervisor(tmp_path / "logs") as supervisor:
        watched = Watch(config, OneMachine(plan, tmp_path / "logs"), store, supervisor, Progress(2))
        watched.start()
        if ends:
            watched.until_done()
        else:
            with pytest.raises(RunError, match="sandbox-0 ended unexpectedly with exit code 1: cannot isolate"):
                watched.until_done()
    assert lives.read_text().count("life") == (3 if ends else 1 + MOST_RESTARTS)
    assert f"is started again ({2 if ends else MOST_RESTARTS} of {MOST_RESTARTS})" in "".join(capsys.readouterr())


# If this fails, an engine that never gets ready holds the run for ever.
def test_watch_gives_an_engine_a_deadline(config, tmp_path):
    config.engine.start_timeout = 0.1
    with pytest.raises(RunError, match=r"engine-0 at http://127.0.0.1:9 is not healthy after 0 s"):
        watch(config, tmp_path, SLEEP, SLEEP)


# If this fails, a second run writes into the first one's folder.
def test_run_folder_is_never_reused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{{name: used, runs_dir: {tmp_path}, task: {{name: guess_number}}, model: {{path: nowhere}}}}")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").touch()
    with pytest.raises(UserError, match="used exists already: give this run another name"):
        launcher.train(recipe, [])


# If one fails, a mistake is found only after the processes have started, or a refused try keeps the name.
@pytest.mark.parametrize(("override", "message"), [
    ("model.path=nowhere", "model.path: folder nowhere does not exist"),
    ("algorithm.preset=soa", "algorithm: unknown preset 'soa'; known: sao"),
    ("task.name=guess_nmber", "guess_nmber"),
    ("task.options={trns: 3}", "trns"),
    ("parallel={ranks: 3, tp: 3}", "parallel.tp=3 does not divide the model's attention heads"),
    ("model.fresh.vocab_size=16", "the model's vocabulary has 16"),
    ("engine.port=1", "engine.port=1: port 1 of 192.0.2.1 cannot be used"),
])
def test_refused_before_anything_starts(tmp_path, override, message):
    fresh = json.dumps(
        {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "head_dim": 16, "intermediate_size": 64, "norm_topk_prob": True,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
         "attention_bias": False, "max_position_embeddings": 512, "rope_theta": 1e4})
    recipe = tmp_path / "recipe.yaml"
    model = "{}" if override.startswith("model.path") else f'{{"fresh": {fresh}}}'
    recipe.write_text(f"{{name: refused, runs_dir: {tmp_path}, task: {{name: guess_number}}, model: {model}, "
                      f"engine: {{host: 192.0.2.1}}}}")  # an address of no machine: no port of it can be bound
    with pytest.raises(UserError, match=message):
        launcher.train(recipe, [override])
    assert not (tmp_path / "refused").exists()


ONCE = """
import sys, time
from pathlib import Path
from sao_megatron.trajectory.store import Store
if not Path(sys.argv[1] + ".tried").exists():
    Path(sys.argv[1] + ".tried").touch()
    raise SystemExit("the first time")
Store(sys.argv[1]).set_state("finished", True)
"""


# If this fails, `restarts` does not save a run, or the log that says why a process died is gone.
def test_watch_starts_again_what_died(config, tmp_path):
    config.restarts = 1
    watch(config, tmp_path, ONCE, FOLLOW)
    assert "the first time" in (tmp_path / "logs" / "learner-0.1.log").read_text()
    assert (tmp_path / "logs" / "learner-0.log").read_text() == ""
    assert not (tmp_path / "logs" / "controller.1.log").exists()


WORSE = """
import sys
from pathlib import Path
lives = Path(sys.argv[1] + ".lives")
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
raise RuntimeError(f"fault number {len(lives.read_text())}")
"""


# If this fails, a run that can only fail is started for ever, or what went wrong first is lost among what followed.
def test_watch_gives_up_after_the_restarts(config, tmp_path, capsys):
    config.restarts = 2
    with pytest.raises(RunError, match="^learner-0 ended unexpectedly .*: RuntimeError: fault number 1") as end:
        watch(config, tmp_path, WORSE, SLEEP)
    assert "after 2 restarts without a step the last cause is: learner-0" in str(end.value)
    assert "RuntimeError: fault number 3" in str(end.value)
    assert "starting learner-0 again (2 of restarts=2)" in capsys.readouterr().out


STOPS = """
import os, signal, sys, time
from sao_megatron.trajectory.store import Store
store = Store(sys.argv[1])
os.kill(os.getppid(), signal.SIGUSR1)
while not store.get_state("stop"):
    time.sleep(0.05)
"""


# If this fails, the warning before a time limit ends a run as failed, or as finished, or not at all.
def test_watch_ends_early_when_asked(config, tmp_path, descendants):
    with pytest.raises(Unfinished, match="with a checkpoint"):
        watch(config, tmp_path, STOPS, STOPS)
    assert not alive(descendants())
