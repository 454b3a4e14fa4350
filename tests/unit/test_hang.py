"""The watchdog over real processes: a rank that is stopped is found, named, and started again."""
import sys

import pytest

from sao_megatron import config as run_config
from sao_megatron import hang, watch
from sao_megatron.hang import where
from sao_megatron.placement.plan import OneMachine, Plan
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.telemetry.events import Events, read
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import Store
from sao_megatron.watch import Watch

RANK = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR2, all_threads=True)
from sao_megatron.heartbeat import Heart
from sao_megatron.trajectory.store import Store
rank, store = os.environ["RANK"], sys.argv[1]
mark = f"{store}.lived-{rank}"
if not os.path.exists(mark):
    heart = Heart(int(rank))
    while rank == "0" and not os.path.exists(f"{store}.lived-1"):
        time.sleep(0.02)  # else it could pass for one that waits, while rank 1 still starts
    heart.beat("policy of step 3")
    open(mark, "w").close()
    if rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
Store(store).set_state("finished", True)
"""
FOLLOW = """
import sys, time
from sao_megatron.trajectory.store import Store
while not Store(sys.argv[1]).get_state("finished", False):
    time.sleep(0.2)
"""


# If this fails, a learner of which one rank hangs burns its nodes until somebody looks, or nobody learns which rank.
@pytest.mark.slow
def test_a_stopped_rank_is_named_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "STACK_SECONDS", 1.0)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    config = run_config.parse({
        "name": "hangs", "runs_dir": str(tmp_path), "steps": 2, "task": {"name": "guess_number"}, "restarts": 1,
        "model": {"path": "nowhere"}, "parallel": {"ranks": 2}, "hang_timeout": 1.0})
    path, journal = tmp_path / "store.sqlite", tmp_path / "events.jsonl"

    def python(name: str, code: str, **environment: str) -> ProcessSpec:
        return ProcessSpec(name, [sys.executable, "-c", code, str(path)], environment)
    ranks = [python(f"learner-{rank}", RANK, RANK=str(rank), MASTER_ADDR="127.0.0.1") for rank in range(2)]
    placement = OneMachine(Plan([], python("controller", FOLLOW), ranks, []), tmp_path / "logs")
    with Store(path) as store, Supervisor(placement.log_dir, grace=0.5) as supervisor:
        watched = Watch(config, placement, store, supervisor, Progress(2, journal=Events(journal)))
        watched.start()
        store.set_published(0, 0)
        watched.until_done()
    (event,) = read(journal)
    assert event.kind == "hang" and "starting learner-0, learner-1 again (1 of restarts=1)" in event.why
    assert "the others wait for rank 1 on " in event.why and "gives no sign of life, in policy of step 3" in event.why
    assert "most recent call first" in (placement.log_dir / "learner-0.1.log").read_text()


DUMP = """\
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 10 in run

Current thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/y/sao_megatron/learner/passes.py", line 120 in reduce_statistics
  File "/y/sao_megatron/cli.py", line 70 in main
"""


# If one fails, the report does not say in which collective a rank waits, or takes silence for an answer.
@pytest.mark.parametrize(("dump", "place"), [
    (DUMP, "is in all_reduce at learner/passes.py:120"), ("step 3\n", None),
    (DUMP[:DUMP.index("Current")], "writes only other threads' stacks")])
def test_where(dump, place):
    assert where(dump) == place
