"""One rank of test_gathered_records.py: a critic-only step and a policy update on each layout, everything recorded."""
from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from sao_megatron.learner import runtime, trainer
from sao_megatron import config as configs
from sao_megatron.learner.records import gather_records
from sao_megatron.telemetry.records import Recorder
from sao_megatron.weights import hf

VERSION = 2  # the test's; it does not import this module, whose CPU shim would make Transformers wrong there


def main(folder: Path, layouts: dict[str, dict]) -> None:
    trajectories = pickle.loads((folder / "trajectories.pkl").read_bytes())
    metrics, few = {}, {}
    for layout, sizes in layouts.items():
        parallel = dict(ranks=int(os.environ["WORLD_SIZE"]), **sizes)
        runtime.initialize(configs.ParallelSection(**parallel), seed=0)
        config = configs.parse(dict(
            name="t", model=dict(path=str(folder / "model"), dtype="float32"), parallel=parallel, steps=2,
            algorithm=dict(preset="sao_recover"), task=dict(name="random"), batch=dict(tokens_per_micro_batch=70),
            policy_optimizer=dict(lr=1e-3), critic_optimizer=dict(lr=1e-3, warmup_steps=0)))
        learner = trainer.Trainer(config, hf.read_config(folder / "model"), hf.SafetensorsFolder(folder / "model"))
        learner.begin_reinforcement()
        recorder = Recorder(folder / layout, limit_mb=10, tokenizer=folder / "tokenizer.json")
        for step, update_policy in enumerate((False, True)):
            result = learner.train_step(trajectories, VERSION, update_policy)
            recorder.write(step, VERSION, gather_records(result.batches, trajectories, len(trajectories), (0, step)))
        metrics[layout] = result.metrics
        few[layout] = [(r.trajectory.id, r.chosen) for r in gather_records(result.batches, trajectories, 4, (0, 1))]
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps({"metrics": metrics, "few": few}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    dist.destroy_process_group()
