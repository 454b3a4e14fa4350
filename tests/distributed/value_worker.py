"""A rank of test_value_pretraining.py: a learner whose critic starts from `critic.path`; prints its first step."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron import config as configs
from sao_megatron.learner.trainer import Trainer
from sao_megatron.trajectory.store import Store
from sao_megatron.weights import hf


def main(recipe: Path, store_path: Path, overrides: list[str]) -> None:
    config = configs.load(recipe, overrides)
    runtime.initialize(config.parallel, config.seed)
    with Store(store_path) as store:
        trajectories = store.read(store.recorded())
    trainer = Trainer(config, hf.read_config(config.model.path), hf.initial_weights(config, config.model.path))
    trainer.begin_reinforcement()
    metrics = trainer.train_step(trajectories, version=0).metrics
    if dist.get_rank() == 0:
        print("METRICS " + json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
