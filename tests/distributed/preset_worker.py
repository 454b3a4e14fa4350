"""One rank of test_presets.py: two learner steps of every preset on each layout, written by rank 0."""
from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from sao_megatron.learner import runtime, trainer
from megatron.core import parallel_state as ps
from sao_megatron import config as configs
from sao_megatron.weights import hf

STEPS, MINI_BATCHES = 2, 2


def train(choices: dict, folder: Path, parallel: dict, trajectories: list) -> dict:
    """Metrics of both steps, the phases that were timed, and the first mini-batch's weights."""
    config = configs.parse(dict(
        name="t", model=dict(path=str(folder / "model"), dtype="float32"), parallel=parallel, task=dict(name="random"),
        algorithm=choices, batch=dict(trajectories=len(trajectories), mini_batches=MINI_BATCHES,
                                      tokens_per_micro_batch=90),
        steps=STEPS, policy_optimizer=dict(lr=1e-3), critic_optimizer=dict(lr=1e-3, warmup_steps=0)))
    learner = trainer.Trainer(config, hf.read_config(folder / "model"), hf.SafetensorsFolder(folder / "model"))
    for index, trajectory in enumerate(trajectories):
        trajectory.group_id = f"g{index // learner.preset.rollouts_per_prompt}"
    learner.begin_reinforcement()
    phases: list[str] = []

    @contextmanager
    def timer(phase: str):
        phases.append(phase)
        yield
    results = [learner.train_step(trajectories, version=1, timer=timer) for _ in range(STEPS)]
    weights = [] if not ps.is_pipeline_last_stage() else results[0].batches[0].results["tokens"].weight.tolist()
    return dict(metrics=[result.metrics for result in results], phases=sorted(set(phases)), weights=weights)


def main(folder: Path, layouts: dict[str, dict], algorithms: dict[str, dict]) -> None:
    trajectories = pickle.loads((folder / "trajectories.pkl").read_bytes())
    results = {}
    for layout, sizes in layouts.items():
        parallel = dict(ranks=int(os.environ["WORLD_SIZE"]), **sizes)
        runtime.initialize(configs.ParallelSection(**parallel), seed=0)
        results[layout] = {name: train(choices, folder, parallel, trajectories) for name, choices in algorithms.items()}
    if dist.get_rank() == 0:
        (folder / f"results-{dist.get_world_size()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    dist.destroy_process_group()
