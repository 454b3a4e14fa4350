"""Counters of this machine, whatever it is."""
from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import psutil
import pytest

from sao_megatron.engine.client import EngineClient
from sao_megatron.rollout.engine_metrics import watch_engines
from sao_megatron.telemetry import engine_gpus, metrics
from sao_megatron.telemetry.machine import GPU_FIELDS, Gpus, host
from sao_megatron.trajectory.store import ENGINES, Store


# If this fails, a host that runs out of memory or cores looks idle.
def test_host():
    host()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    seen = host()
    assert all(metrics.known(name) for name in seen)
    assert 0.5 < seen["machine/cores"] <= psutil.cpu_count()
    assert 0 < seen["machine/process_memory"] < seen["machine/memory"] < psutil.virtual_memory().total / 1e9
    assert 0 < seen["machine/memory_share"] < 1


# If this fails, a run on a machine without NVIDIA's library ends in its first step, or one with it sees no GPU.
def test_gpus():
    gpus = Gpus()
    if not (uuids := gpus.uuids()):
        assert gpus.read("GPU-none") == {}
        pytest.skip("no NVIDIA GPU, or no nvidia-ml-py: that nothing is read was tested")
    gpus.read(uuids[0])
    time.sleep(0.5)
    seen = gpus.read(uuids[0])
    assert {"utilisation", "memory", "power", "temperature"} <= seen.keys() <= GPU_FIELDS.keys()
    assert 0 <= seen["utilisation"] <= 1 and 5 < seen["power"] < 2000 and 0 < seen["temperature"] < 120


def write(folder, name: str, age: float, *powers: float) -> None:
    (folder / name).write_text(json.dumps({"time": time.time() - age, "gpus": [{"power": power} for power in powers]}))


# If this fails, the GPUs of a machine that only runs engines are not seen, or those of an engine that is long gone are.
async def test_gpus_of_engines_reach_the_learner(tmp_path):
    for name, age, powers in (("7001-0.json", 1, (300, 310)), ("7002-10.json", 0, (4,)), ("7002-2.json", 0, (3,)),
                              ("7003-0.json", 3600, (9,)), ("70011-0.json", 0, (9,))):
        write(tmp_path, name, age, *powers)
    (tmp_path / "7003-1.json").write_text('{"time": 17')
    clients = [EngineClient(f"http://127.0.0.1:{port}", 8, 1.0) for port in (7001, 7002, 7003)]
    with Store(tmp_path / "store") as store:
        watching = asyncio.create_task(watch_engines(lambda: clients, store, tmp_path))
        while (found := store.get_state(ENGINES)) is None:
            await asyncio.sleep(0.05)
        watching.cancel()
    await asyncio.gather(*(client.close() for client in clients))
    assert found == {"gpu/power engine-0.0": 300, "gpu/power engine-0.1": 310, "gpu/power engine-1.0": 3,
                     "gpu/power engine-1.1": 4}
    assert all(metrics.known(name) for name in found)


# If this fails, an engine is said to use GPUs that belong to another.
def test_which_gpus_are_an_engines():
    uuids = ["GPU-aa", "GPU-bb", "GPU-cc"]
    assert engine_gpus.own(uuids, "2,0") == ["GPU-cc", "GPU-aa"] and engine_gpus.own(uuids, "GPU-b") == ["GPU-bb"]
    assert engine_gpus.own(uuids, None) == engine_gpus.own(uuids, "") == uuids and engine_gpus.own([], None) == []


# If this fails, an engine on a GPU does not start, or its reader outlives it.
def test_an_engine_and_its_reader(tmp_path):
    code = "import os, sys; print(sys.argv[1:]); raise SystemExit(5)"
    command = [sys.executable, "-m", "sao_megatron.telemetry.engine_gpus", str(tmp_path), "7001"]
    done = subprocess.run([*command, "-c", code, "--port", "7001"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (5, "['--port', '7001']\n"), done.stderr
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or [])]
    assert psutil.wait_procs(left, 10)[1] == []
