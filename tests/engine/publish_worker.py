"""One learner rank of test_publication.py: TP2·EP2, trains a little, publishes to the engine, scores trajectories.

It and the test take turns through files in one folder: each writes a file whose name says what is ready.
"""
from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron import config as configs
from sao_megatron.learner.trainer import Trainer
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher
from sao_megatron.weights.shards import save_hf


def wait_for(path: Path):
    """Content that the test wrote to `path`."""
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within 120 s")
        time.sleep(0.02)
    return pickle.loads(path.read_bytes())


def tell(path: Path, content) -> None:
    """Write `path` for the test, complete when it appears."""
    if dist.get_rank() == 0:
        path.with_suffix(".part").write_bytes(pickle.dumps(content))
        path.with_suffix(".part").rename(path)


def main(folder: Path) -> None:
    order = wait_for(folder / "start.pkl")
    config = configs.parse(order["config"])
    runtime.initialize(config.parallel, seed=0)
    model_dir = config.model.path
    hf_config = hf.read_config(model_dir)
    trainer = Trainer(config, hf_config, hf.SafetensorsFolder(model_dir))
    before = trainer.score(order["trajectories"])
    trainer.begin_reinforcement()
    publisher = Publisher(trainer.policy_shards, lambda: [order["url"]], 1, hf_config["vocab_size"],
                          config.publication, runtime.backend(), 60.0, folder / "publication", model_dir)
    for _ in range(3):
        trainer.train_step(order["trajectories"], version=order["version"])
    dist.barrier()
    tell(folder / "trained.pkl", before)
    wait_for(folder / "publish.pkl")
    publisher.publish(order["version"] + 1)
    difference = publisher.verify(order["version"] + 1, trainer.score)
    save_hf(trainer.policy_shards, folder / "hf", model_dir)
    tell(folder / "published.pkl", difference)
    tell(folder / "after.pkl", trainer.score(wait_for(folder / "score.pkl")))
    publisher.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
