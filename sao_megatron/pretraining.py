"""`sao-megatron pretrain-value`: train the value model on recorded trajectories, before RL (ALGORITHM.md §3).

Needs no engine and no controller: learner ranks only, on this machine. The output folder holds config.yaml, logs/,
metrics.jsonl (one line a step) and, when it is done, critic/: the folder that a recipe's `critic.path` takes.
"""
from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from sao_megatron import config as run_config
from sao_megatron.config import RunConfig
from sao_megatron.device import gpu_names, has_gpu
from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.trajectory.recorded import find_store

POLL_SECONDS = 0.2


def pretrain_value(recipe: Path, overrides: list[str], trajectories: Path, steps: int, output: Path | None) -> None:
    """`trajectories`: a run's folder or its store. Raises UserError before a process starts, RunError if one fails."""
    config = run_config.load(recipe, overrides)
    if steps < 1:
        raise UserError(f"--steps {steps}: give at least 1")
    store = find_store(trajectories, config.batch.trajectories, dropped_too=True)
    folder = RunFolder(output or config.runs_dir / f"{config.name}-value")
    if folder.path.exists():
        raise UserError(f"{folder.path} exists already: choose another folder with --output, or delete it")
    folder.path.mkdir(parents=True)
    try:
        _prepare(config, folder)
    except BaseException:
        shutil.rmtree(folder.path)
        raise
    print(f"value pre-training: {steps} steps on {store}; outputs go to {folder.path}", flush=True)
    with Supervisor(folder.log_dir) as supervisor:
        supervisor.start(_ranks(config, folder, store, steps))
        _watch(supervisor, config.parallel.ranks, folder.path / "metrics.jsonl")
    print(f"done; start a run from it with critic.path={folder.path / 'critic'}")


def _prepare(config: RunConfig, folder: RunFolder) -> None:
    from sao_megatron.learner import layout
    from sao_megatron.weights import value_head
    from sao_megatron.weights.hf import prepare_model, read_config
    hf_config = read_config(prepare_model(config, folder.path))
    layout.check(config, hf_config)
    value_head.check(config, hf_config)
    if has_gpu() and len(gpu_names()) < config.parallel.ranks:
        raise UserError(f"this machine has {len(gpu_names())} GPUs, fewer than parallel.ranks={config.parallel.ranks}")
    run_config.save(config, folder.config_path)


def _ranks(config: RunConfig, folder: RunFolder, store: Path, steps: int) -> list[ProcessSpec]:
    from sao_megatron.engine.process import free_port
    command = [sys.executable, "-m", "sao_megatron.learner.value_pretraining", str(folder.path), str(store), str(steps)]
    common = {"WORLD_SIZE": str(config.parallel.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "PYTHONUNBUFFERED": "1"} | ({} if has_gpu() else {"OMP_NUM_THREADS": "1"})
    return [ProcessSpec(f"value-{rank}", command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(config.parallel.ranks)]


def _watch(supervisor: Supervisor, ranks: int, metrics: Path) -> None:
    """Show the steps until every rank has ended; raise as soon as one has failed."""
    shown = 0
    while True:
        ended = supervisor.poll()  # before the metrics are read, so that none is missed
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        for line in lines[shown:]:
            step = json.loads(line)
            print(f"step {step['step']}: mean squared error {step['critic/loss']:.4f}, explained variance "
                  f"{step['critic/explained_variance']:.3f}, gradient norm {step['critic/grad_norm']:.3f}", flush=True)
        shown = len(lines)
        if failed := [name for name, code in ended.items() if code]:
            raise supervisor.failure(failed)
        if len(ended) == ranks:
            return
        time.sleep(POLL_SECONDS)
