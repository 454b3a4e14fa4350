"""The writers beside TensorBoard: JSON lines and Weights & Biases, and what is refused."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sao_megatron import config as configs
from sao_megatron.errors import UserError
from sao_megatron.telemetry import writers
from sao_megatron.telemetry.statistics import Statistics

HAS_WANDB = importlib.util.find_spec("wandb") is not None
STEPS = """
import sys
from pathlib import Path
from sao_megatron import config as configs
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry import writers
from sao_megatron.telemetry.statistics import Statistics
config = configs.parse(dict(name="t", model=dict(path="m"), task=dict(name="random"), writers=dict(
    tensorboard=False, wandb="project", wandb_mode=sys.argv[2])), "test")
(writer,) = writers.open_writers(config, RunFolder(Path(sys.argv[1])), 0, [])
for step in (0, 1, 1):
    writer.write(step, {"reward/mean": 0.5 + step}, Statistics(), [])
writer.alarm(1, "mask_share = 0.4 (limit 0.3): too old")
writer.close()
"""


def recipe(**section):
    return configs.parse(dict(name="t", model=dict(path="m"), task=dict(name="random"), writers=section), "test")


# If this fails, a run that went on from a checkpoint has steps twice, or out of order; or it never goes on, for a line
# that a crash cut off.
def test_json_lines_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, last in ((0, 4), (2, 5)):
        writer = writers.JsonLines(path, first)
        for step in range(first, last):
            writer.write(step, {"reward/mean": step + 0.25 * first}, Statistics(), [])
            if step == 2:
                writer.alarm(step, "reward_drop = 0.6: it fell")
        writer.close()
        with path.open("a") as file:
            file.write('{"step": 5, "rew' * (first == 0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(0, 0), (1, 1), (2, 2.5), (3, 3.5), (4, 4.5)]
    assert [line["alarms"] for line in lines] == [[], [], [], ["reward_drop = 0.6: it fell"], []]


# If this fails, a run starts and dies in its first step for want of a package.
@pytest.mark.skipif(HAS_WANDB, reason="wandb is installed")
def test_wandb_missing():
    with pytest.raises(UserError, match="writers.wandb=project: the package wandb is not installed"):
        writers.check(recipe(wandb="project"))


# If this fails, a run is started that nobody will see, or one without a key waits for somebody to type it.
@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_wandb_without_a_key(monkeypatch, tmp_path):
    for name, value in (("HOME", str(tmp_path)), ("XDG_CONFIG_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match="no key on this machine: run `wandb login`"):
        writers.check(recipe(wandb="project"))
    writers.check(recipe(wandb="project", wandb_mode="offline"))


# If this fails, nothing of a run reaches W&B, or its processes outlive the run's.
@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_offline_and_unreachable(tmp_path, mode):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_SILENT": "true"}
    if mode == "online":
        environment |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    done = subprocess.run([sys.executable, "-c", STEPS, str(tmp_path), mode], capture_output=True, text=True,
                          timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("cannot be reached" in done.stderr) == (mode == "online")
    (file,) = tmp_path.glob("wandb/offline-run-*-t/run-t.wandb")
    written = file.read_bytes()
    assert b"reward/mean" in written and b"learner step" in written and b"model.path" in written
