"""Small programs in the places of a run's processes, and whether they live."""
import sys
import time

import psutil

from sao_megatron.supervisor import ProcessSpec, Supervisor

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
