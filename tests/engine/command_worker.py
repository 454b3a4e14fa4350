"""One learner rank that does what a test writes into a folder: 0.pkl, 1.pkl … in order; answers in 0.answer.pkl …

Commands (dicts): `publication` makes a new Publisher with that section; `shift` moves all weights at random; `fault`
changes the export until the next command; `publish` a version; `verify` it; `save` the weights as an HF folder.
"""
from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sao_megatron import config as configs
from sao_megatron.config import PublicationSection
from sao_megatron.errors import RunError
from sao_megatron.learner import runtime
from sao_megatron.learner.trainer import Trainer
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher
from sao_megatron.weights.shards import save_hf


class Faulty:
    """A ShardMap whose export has one fault: ("rename" | "drop" | "alter" | "alter twice", tensor), ("swap", two
    tensors) or ("kill", pid)."""

    def __init__(self, shards):
        self.shards, self.owners, self.tied, self.fault, self.passes = shards, shards.owners, shards.tied, None, 0

    def export(self, owner=None):
        self.passes += 1
        kind, what = self.fault or ("", None)
        for i, (name, tensor) in enumerate(self.shards.export(owner)):
            if kind == "kill" and i == 8:
                os.killpg(what, signal.SIGKILL)
            if kind == "swap" and name in what:
                yield what[1 - what.index(name)], tensor
            elif name != what or kind == "alter" and self.passes > 1:
                yield name, tensor
            elif kind == "rename":
                yield name.replace("down_proj", "w2"), tensor
            elif kind != "drop":
                yield name, tensor * 1.5


class Worker:
    def __init__(self, folder: Path, config):
        self.folder, self.config = folder, config
        self.model_dir = config.model.path
        self.hf_config = hf.read_config(self.model_dir)
        self.trainer = Trainer(config, self.hf_config, hf.SafetensorsFolder(self.model_dir))
        self.trainer.begin_reinforcement()
        self.shards = Faulty(self.trainer.policy_shards)
        self.publisher = None

    def obey(self, publication=None, unchanged=False, shift=None, fault=None, publish=None, verify=None, save=None):
        if publication is not None:
            if self.publisher:
                self.publisher.close()
            self.publisher = Publisher(
                self.shards, lambda: (self.folder / "urls.txt").read_text().split(), 1, self.hf_config["vocab_size"],
                PublicationSection(**publication), runtime.backend(), 20.0, self.folder / "publication", self.model_dir,
                unchanged)
        if shift is not None:
            torch.manual_seed(shift)
            for parameter in self.trainer.policy_shards.parameters:
                parameter.tensor.data.add_(torch.randn_like(parameter.tensor) * 0.02)
        self.shards.fault, self.shards.passes = fault, 0
        try:
            if publish is not None:
                self.publisher.publish(publish)
            if verify is not None:
                return self.publisher.verify(verify, self.trainer.score)
        except RunError as error:
            return error
        if save is not None:
            save_hf(self.trainer.policy_shards, Path(save), self.model_dir)
        return self.publisher._served


def main(folder: Path, config_path: Path) -> None:
    config = configs.load(config_path)
    runtime.initialize(config.parallel, seed=0)
    worker = Worker(folder, config)
    for number in range(1000):
        command = folder / f"{number}.pkl"
        while not command.exists():
            time.sleep(0.02)
        order = pickle.loads(command.read_bytes())
        if order is None:
            break
        answer = worker.obey(**order)
        (folder / "part").write_bytes(pickle.dumps(answer))
        (folder / "part").rename(folder / f"{number}.answer.pkl")
    worker.publisher.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
