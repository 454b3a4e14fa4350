"""Counters of this machine, whatever it is."""
from __future__ import annotations

import time

import psutil
import pytest

from sao_megatron.telemetry import metrics
from sao_megatron.telemetry.machine import GPU_FIELDS, Gpus, host


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
