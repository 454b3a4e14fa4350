"""One rank of value pre-training: the critic's own training step, once per batch, on recorded returns.

The whole critic trains here: its attention is frozen during RL only. A step's metrics are those of its first forward,
so during the first pass over the set they are of trajectories that the critic has not seen.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from sao_megatron.learner import runtime
from sao_megatron.algorithm.presets import PRESETS
from sao_megatron.errors import RunError, UserError
from sao_megatron.learner.critic import Critic
from sao_megatron.learner.passes import local_batches, reduce_statistics
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory, decode, encode
from sao_megatron.weights import hf

TRAINING = replace(PRESETS["sao"], critic_updates=1, freeze_critic_attention=False)


def main(folder: RunFolder, store_path: Path, steps: int) -> None:
    """Train on `steps` batches and write `critic/`. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from outside."""
    config = folder.config()
    runtime.initialize(config.parallel, config.seed)
    model_dir = folder.model_dir(config)
    hf_config = hf.read_config(model_dir)
    critic = Critic(config, hf_config, TRAINING, steps)
    if config.critic.path is not None:
        critic.start_from_critic(config.critic.path)
    else:
        critic.start_from_weights(hf.initial_weights(config, model_dir))
    recorded = _Recorded(store_path, hf_config["vocab_size"], config.batch.trajectories, config.seed)
    for step in range(steps):
        batches, statistics = local_batches(recorded.next(), config), Statistics()
        metrics = critic.train(batches, statistics)
        metrics |= reduce_statistics(statistics).metrics()
        if dist.get_rank() == 0:
            with (folder.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step} | metrics) + "\n")
    critic.save(folder.path / "critic", model_dir)
    dist.destroy_process_group()


class _Recorded:
    """Batches of a store's trajectories in random order, pass after pass; rank 0 reads and tells the others."""

    def __init__(self, path: Path, vocab_size: int, count: int, seed: int):
        self.vocab_size = vocab_size
        if dist.get_rank() == 0:
            self.store = Store(path)
            self.batches = self._shuffled(np.array(self.store.recorded()), count, np.random.default_rng(seed))

    def next(self) -> list[Trajectory]:
        """The next batch, the same on every rank."""
        message: list = [self._read() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(message, src=0)
        return [decode(blob) for blob in message[0]]

    def _read(self) -> list[bytes]:
        trajectories = self.store.read(next(self.batches))
        for trajectory in trajectories:
            trajectory.check_vocabulary(self.vocab_size)
        return [encode(trajectory) for trajectory in trajectories]

    def _shuffled(self, rows: np.ndarray, count: int, rng: np.random.Generator) -> Iterator[list[int]]:
        """`count` rows at a time; the rest of a pass that does not fill a batch waits for another pass."""
        while True:
            order = rng.permutation(rows)
            for start in range(0, len(order) - count + 1, count):
                yield order[start:start + count].tolist()


if __name__ == "__main__":
    try:
        main(RunFolder(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
    except (UserError, RunError) as error:
        sys.exit(f"sao-megatron: {error}")
