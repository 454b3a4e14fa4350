"""Weights to the engines through a folder that both sides see: the way for engines that no broadcast can reach."""
from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from sao_megatron.errors import RunError
from sao_megatron.weights.engine_set import EngineSet
from sao_megatron.weights.shards import save_hf


class Disk:
    """Writes an HF checkpoint and has every engine load it. Has the methods of broadcast.Broadcast."""

    needs_session = False

    def __init__(self, shards, folder: Path, model_dir: Path):
        """`folder` holds the checkpoint of the last publication; config.json and tokenizer come from `model_dir`."""
        self.shards, self.folder, self.model_dir = shards, folder, model_dir
        self.owners = [0]
        self.seconds: Counter[str] = Counter()
        """Of the last publication: gather (with the writing) and load."""
        self.bytes_sent = 0
        self._engines: EngineSet | None = None

    def join(self, engines: EngineSet | None, name: str) -> str | None:
        """Remember the engines."""
        self._engines = engines
        return None

    def leave(self) -> None:
        """There is nothing to give up."""

    def send(self, version: int, flush: bool) -> str | None:
        """Write the weights and have the engines load them as `version`; returns this rank's error."""
        begin = time.monotonic()
        folder = self.folder / f"version-{version}"
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # no engine reads it any more
            self.folder.mkdir(parents=True)
        dist.barrier()
        save_hf(self.shards, folder, self.model_dir)
        written = time.monotonic()
        self.seconds = Counter(gather=written - begin)
        if dist.get_rank():
            return None
        self.bytes_sent = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        try:
            self._engines.run(lambda client, _: client.load_weights(str(folder.resolve()), version, flush_cache=flush))
        except RunError as error:
            return str(error)
        self.seconds["load"] = time.monotonic() - written
        return None
