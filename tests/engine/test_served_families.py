"""HF folder -> two Megatron ranks -> published to a real engine that began with random weights -> HF's log-probs.

Every family that SGLang serves on a CPU: all but GLM-5, whose sparse attention has kernels for GPUs only.
"""
from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import World
from served import QUICK, START_SECONDS, VOCAB, engine_process

from sao_megatron.engine.client import EngineClient

HERE = Path(__file__).parent
DENSE, EXPERTS, CHUNKS = dict(tp=2), dict(tp=2, ep=2), dict(pp=2, vpp=2)
LAYOUTS = {"qwen2": DENSE, "qwen3": DENSE, "llama": CHUNKS, "qwen3_moe": CHUNKS, "mixtral": EXPERTS,
           "glm4_moe": EXPERTS, "deepseek_v3": EXPERTS, "kimi_k2": EXPERTS}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, text=True, timeout=400, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder with the models, and the URL of the engine of each, to which the learner has published it."""
    folder = tmp_path_factory.mktemp("families")
    engines = {name: engine_process(folder / "begin" / name) for name in LAYOUTS}
    server = engines["qwen2"]
    server.command = [sys.executable, str(HERE / "forked_servers.py"),
                      json.dumps([engine.command[3:] for engine in engines.values()])]
    server.environment |= {"TORCHDYNAMO_DISABLE": "1"}  # SGLang compiles GLM's router at its first token, for 20 s
    server.start(folder / "engines.log")
    try:
        run(str(HERE.parent / "distributed" / "family_models.py"), str(folder), *LAYOUTS)
        for name in LAYOUTS:  # config.json alone: the engine starts with random weights
            (folder / "begin" / name).mkdir(parents=True)
            config = json.loads((folder / name / "config.json").read_text())
            if "kv_lora_rank" in config:  # what DeepSeek's own config.json says, and Transformers takes for granted
                config |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
            (folder / "begin" / name / "part").write_text(json.dumps(config))
            (folder / "begin" / name / "part").rename(folder / "begin" / name / "config.json")
        for engine in engines.values():
            engine.log_path, engine._process = server.log_path, server._process
            engine.wait_healthy(time.monotonic() + START_SECONDS)
        jobs = {name: {"layout": LAYOUTS[name], "url": engine.url} for name, engine in engines.items()}
        worker = HERE / "served_families_worker.py"
        with World(worker, 2, (str(folder), json.dumps(jobs)), folder / "ranks.log") as world:
            world.wait(400)
        yield folder, {name: engine.url for name, engine in engines.items()}
    finally:
        server.stop(QUICK)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_engine_equals_hf(published, name):
    """If this fails, engines sample a family from another model than the checkpoint, under success messages."""
    folder, urls = published
    want, worst = np.load(folder / f"{name}.npz"), 0.0
    async with EngineClient(urls[name], VOCAB, 60) as client:
        for index, trajectory in enumerate(pickle.loads((folder / "trajectories.pkl").read_bytes())):
            starts, scores = trajectory.segments[1:], []
            for ids, mask in zip(np.split(trajectory.tokens, starts), np.split(trajectory.action_mask, starts),
                                 strict=True):
                scores.append(np.array(await client.score(ids.tolist()))[mask[1:]])
            worst = max(worst, float(np.abs(np.concatenate(scores) - want[f"logprobs/{index}"]).max()))
        assert await client.model_version() == 1
    assert worst < 1e-4
