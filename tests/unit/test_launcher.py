"""The watch over real child processes, and what a run is refused for."""
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from children import SLEEP, alive, python

from sao_megatron import config as run_config
from sao_megatron import launcher
from sao_megatron import watch as watches
from sao_megatron.engine.process import engine_command, free_port
from sao_megatron.errors import RunError, Unfinished, UserError
from sao_megatron.placement.plan import OneMachine, Plan
from sao_megatron.run_folder import RunFolder
from sao_megatron.sandbox_watch import MOST_RESTARTS
from sao_megatron.supervisor import Supervisor
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import Store
from sao_megatron.watch import Watch


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(watches, "POLL_SECONDS", 0.05)


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


def follow(config, tmp_path: Path, plan: Plan, machine: type[OneMachine] = OneMachine) -> None:
    """Start what is planned, over the store at tmp_path / store.sqlite, and watch it to its end."""
    with Store(tmp_path / "store.sqlite") as store, Supervisor(tmp_path / "logs") as supervisor:
        watching = Watch(config, machine(plan, tmp_path / "logs"), store, supervisor, Progress(2))
        watching.start()
        watching.until_done()


def watch(config, tmp_path: Path, learner: str, controller: str, engine: str = SLEEP) -> None:
    """Watch three small programs in the places of a run's processes."""
    path = tmp_path / "store.sqlite"
    follow(config, tmp_path, Plan([python("engine-0", engine)], python("controller", controller, path),
                                  [python("learner-0", learner, path)], ["http://127.0.0.1:9"]))


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
            threading.Thread(target=lambda: (time.sleep(0.3), __import__("os")._exit(3))).start()
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
@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "ends"), [(2, True), (1, False)])
def test_watch_starts_an_engine_again(config, tmp_path, restarts, ends, capsys):
    config.engine.restarts = restarts
    store_path, lives, port = tmp_path / "store.sqlite", tmp_path / "lives", free_port()
    lives.touch()
    plan = Plan([python("engine-0", MORTAL, lives, port, 3)], python("controller", FOLLOW, store_path),
                [python("learner-0", OUTLIVE, store_path, lives, 3)], [f"http://127.0.0.1:{port}"])
    with nullcontext() if ends else pytest.raises(RunError, match="engine-0 ended unexpectedly with exit code 3"):
        follow(config, tmp_path, plan)
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
    sentence = "sandbox-0 ended unexpectedly with exit code 1: cannot isolate"
    with nullcontext() if ends else pytest.raises(RunError, match=sentence):
        follow(config, tmp_path, plan)
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


LEARNS = """
import sys, time
from pathlib import Path
from sao_megatron.trajectory.store import Store
store, saved = Store(sys.argv[1]), Path(sys.argv[2])
if saved.exists():
    if store.get_state("stop"):
        raise SystemExit("told to end at once")
    store.set_state("finished", True)
    raise SystemExit(0)
for step in range(3):
    store.mark_trained(step, step + 1, [], {}, "learner")
while not store.get_state("stop"):
    time.sleep(0.05)
if sys.argv[3] == "saves":
    time.sleep(0.3)
    saved.mkdir(parents=True)
else:
    time.sleep(600)
"""
AFTER_THREE = """
import os, signal, sys, time
from sao_megatron.trajectory.store import Store
store = Store(sys.argv[1])
while len(store.steps()) < 3:
    time.sleep(0.05)
"""
TERM = "\nos.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"


class LosingNodes(OneMachine):
    """Whose engines' nodes are down as soon as the engines have ended."""

    def lost(self, name: str) -> str | None:
        return "node7" if name.startswith("engine") else None


def lose(config, tmp_path: Path, learner: str = "saves", controller: str = SLEEP, engine: str = SLEEP,
         machine: type[OneMachine] = OneMachine) -> Path:
    """Watch a learner of three steps, and what ends it; returns where its checkpoint is to be."""
    path, saved = tmp_path / "store.sqlite", RunFolder(config.run_dir).checkpoints.path / "step-00000003"
    plan = Plan([python("engine-0", engine, path)], python("controller", controller, path),
                [python("learner-0", LEARNS, path, saved, learner)], ["http://127.0.0.1:9"])
    follow(config, tmp_path, plan, machine)
    return saved


# If one fails, a run that ends for a fault that is not the learner's loses the steps since the newest checkpoint.
@pytest.mark.parametrize(("fault", "error"), [
    ({"controller": AFTER_THREE + "sys.exit('no sandbox')"}, "controller ended unexpectedly with exit code 1: no san"),
    ({"engine": AFTER_THREE + "sys.exit('no memory')"}, "engine-0 ended unexpectedly with exit code 1: no memory"),
    ({"engine": AFTER_THREE, "machine": LosingNodes}, r"node7 is down, where the last engine \(engine-0\) ran"),
])
def test_the_learner_saves_before_the_end(config, tmp_path, fault, error, descendants, capsys):
    with pytest.raises((RunError, Unfinished), match=error):
        lose(config, tmp_path, **fault)
    assert [checkpoint.step for checkpoint in RunFolder(config.run_dir).checkpoints.complete()] == [3]
    assert "the learner saves a checkpoint of its steps first" in capsys.readouterr().out
    assert not alive(descendants())


# If this fails, a learner that cannot save any more keeps a job that has lost a node from going back into the queue.
def test_the_end_does_not_wait_for_ever(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watches, "HASTE_SECONDS", 0.5)
    config.cluster.signal_seconds = 1
    with pytest.raises(Unfinished, match="node7 is down"):
        lose(config, tmp_path, learner="does not", engine=AFTER_THREE, machine=LosingNodes)
    assert "the learner saved no checkpoint in time" in capsys.readouterr().out


# If one fails, a Ctrl-C, or a run that keeps no checkpoints, waits for a checkpoint.
@pytest.mark.parametrize(("every", "end", "error"), [(50, TERM, SystemExit), (0, "sys.exit(1)", RunError)])
def test_nobody_waits_for_a_checkpoint_that_is_not_wanted(config, tmp_path, every, end, error):
    config.checkpoint.every = every
    with pytest.raises(error):
        lose(config, tmp_path, controller=AFTER_THREE + end)
    with Store(tmp_path / "store.sqlite") as store:
        assert store.get_state("stop") is None and len(store.steps()) == 3


# If this fails, everything starts again without the steps of a learner that was well, or as if it were to end at once.
def test_the_learner_saves_before_it_starts_again(config, tmp_path, capsys):
    config.restarts, config.engine.start_timeout = 1, 60
    once = AFTER_THREE + "from pathlib import Path\nif not Path(sys.argv[1] + '.tried').exists():\n" \
        "    Path(sys.argv[1] + '.tried').touch()\n    sys.exit('no memory')\ntime.sleep(600)"
    assert lose(config, tmp_path, engine=once, controller=FOLLOW).exists()
    assert "; starting controller, engine-0, learner-0 again (1 of restarts=1)" in capsys.readouterr().out
