"""The files through which the processes of one run find each other: runs/<name>/."""
from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sao_megatron import config as run_config
from sao_megatron.checkpoints import CheckpointFolder
from sao_megatron.config import RunConfig
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved config: every process reads this, none the recipe."""
        return self.path / "config.yaml"

    @property
    def submitted_path(self) -> Path:
        """The recipe as `sao-megatron submit` resolved it, beside the folder, which the job makes."""
        path = self.path if self.path.name else self.path.absolute()
        return path.with_name(f"{path.name}.submitted.yaml")

    @property
    def engines_path(self) -> Path:
        """JSON list of the engines' URLs, by index."""
        return self.path / "engines.json"

    @property
    def sandboxes_path(self) -> Path:
        """JSON: the sandbox servers' URLs, by index, and the token that they ask for. Only its owner can read it."""
        return self.path / "sandboxes.json"

    @property
    def store_path(self) -> Path:
        return self.path / "trajectories.sqlite"

    @property
    def tokens_dir(self) -> Path:
        """Token records, one Parquet file a step (telemetry/records.py)."""
        return self.path / "tokens"

    @property
    def gpus_dir(self) -> Path:
        """Counters of the engines' GPUs (telemetry/engine_gpus.py)."""
        return self.path / "gpus"

    @property
    def events_path(self) -> Path:
        """Restarts and their causes (telemetry/events.py)."""
        return self.path / "events.jsonl"

    @property
    def paused_path(self) -> Path:
        """The learner trains nothing while this file exists (alarms.on_alarm=pause writes it)."""
        return self.path / "PAUSED"

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def export_path(self) -> Path:
        """The HF checkpoint of the last weights: it appears when it is complete."""
        return self.path / "hf"

    @property
    def log_dir(self) -> Path:
        return self.path / "logs"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @contextmanager
    def lock(self, patience: float = 0.0) -> Iterator[None]:
        """Be the only launcher of this run. Raises UserError if there is one; the lock ends with its process.

        `patience`: seconds to wait, as a file server may know late that a machine is dead."""
        deadline = time.monotonic() + patience
        with (self.path / "lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise UserError(f"{self.path} is running: end that `sao-megatron` first") from None
                    time.sleep(1.0)
            yield

    def config(self) -> RunConfig:
        """Raises UserError if this is not the folder of a run."""
        if not self.config_path.is_file():
            raise UserError(f"{self.path} is not the folder of a run (it has no {self.config_path.name}): "
                            f"give one that `sao-megatron train` made, such as runs/<name>")
        return run_config.load(self.config_path)

    def model_dir(self, config: RunConfig) -> Path:
        """HF folder that engines, controller and learner read (weights/hf.py prepares it)."""
        return config.model.path or self.path / "model"

    def engine_urls(self) -> list[str]:
        """Raises UserError if the engines were not placed yet."""
        if not self.engines_path.is_file():
            raise UserError(f"{self.engines_path} does not exist: `sao-megatron train` (or the cluster script) writes "
                            f"the engines' URLs there before it starts the processes")
        return json.loads(self.engines_path.read_text())

    def place_engines(self, urls: list[str]) -> None:
        """At once: learner and controllers read the list again and again."""
        write_whole(self.engines_path, json.dumps(urls, indent=2) + "\n")

    def place_sandboxes(self, urls: list[str]) -> None:
        """With a new token: servers that are left of an earlier start do not take it."""
        self.sandboxes_path.unlink(missing_ok=True)
        descriptor = os.open(self.sandboxes_path, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"urls": urls, "token": secrets.token_urlsafe(32)}, file, indent=2)

    def sandboxes(self) -> tuple[list[str], str]:
        """(URLs, token) of the sandbox servers. Raises UserError if they were not placed yet."""
        if not self.sandboxes_path.is_file():
            raise UserError(f"{self.sandboxes_path} does not exist: `sao-megatron train` writes the sandbox servers' "
                            f"URLs there before it starts them, where the recipe has sandbox.servers")
        placed = json.loads(self.sandboxes_path.read_text())
        return placed["urls"], placed["token"]
