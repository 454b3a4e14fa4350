"""The thread in which a learner's files are written."""
from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from sao_megatron.telemetry.beside import MOST_WAITING, Beside


# If this fails, a step waits for its own files, or their lines are in another order than the steps.
def test_calls_are_made_in_order_and_nobody_waits():
    beside, gate, made = Beside(), threading.Event(), []
    beside.call(gate.wait, 10)
    for number in range(MOST_WAITING - 1):
        beside.call(made.append, number)
    assert made == []
    gate.set()
    beside.wait()
    assert made == list(range(MOST_WAITING - 1))


# If this fails, steps pile up in memory before a disk that is slower than they are.
def test_at_most_a_few_wait():
    beside, gate, made = Beside(), threading.Event(), []
    beside.call(gate.wait, 10)
    threading.Timer(0.2, gate.set).start()
    for number in range(2 * MOST_WAITING):
        beside.call(made.append, number)
    assert gate.is_set() and len(made) >= MOST_WAITING - 1
    beside.wait()


# If this fails, a run goes on for days without its files, and nobody learns of it.
def test_what_a_call_raises_is_raised(tmp_path):
    beside, made = Beside(), []
    with pytest.raises(FileNotFoundError):
        beside.call((tmp_path / "none" / "file").write_text, "")
        beside.wait()
    beside.call(made.append, 1)
    beside.wait()
    assert made == [1]


# If this fails, the last steps of a run that ends with an error are missing from its files.
def test_a_process_ends_after_its_calls():
    code = ("import time\nfrom sao_megatron.telemetry.beside import Beside\nbeside = Beside()\n"
            "beside.call(time.sleep, 0.2)\nbeside.call(print, 'written')\nraise SystemExit(3)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (3, "written\n")
