"""Where a run's steps are written: TensorBoard, JSON lines, Weights & Biases, behind one interface (section `writers`).

Each of them shows a step once and in order, also after a learner has gone on from a checkpoint: what it made again
replaces what was there.
"""
from __future__ import annotations

import importlib.util
import json
import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Protocol

from sao_megatron.config import RunConfig
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.records import Recorded, Words
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.telemetry.worst import Worst

log = logging.getLogger("writers")


class Writer(Protocol):
    def write(self, step: int, metrics: dict[str, float], statistics: Statistics, recorded: list[Recorded]) -> None:
        """One learner step; `recorded` are its token records."""

    def alarm(self, step: int, sentence: str) -> None:
        """An alarm that this step has raised; the sentence begins with its name."""

    def close(self) -> None: ...


def check(config: RunConfig) -> None:
    """Raise UserError for a writer whose package, or whose key, is missing or refused."""
    section = config.writers
    if not section.wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(f"writers.wandb={section.wandb}: the package wandb is not installed: install it (pip install "
                        f"wandb), or leave writers.wandb out")
    if section.wandb_mode == "offline":
        return
    import wandb
    try:
        known = wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise UserError(f"writers.wandb={section.wandb}: {str(error).splitlines()[0]}: correct the key, or set "
                        f"writers.wandb_mode=offline") from None
    if not known:
        raise UserError(f"writers.wandb={section.wandb}: W&B has no key on this machine: run `wandb login`, set "
                        f"WANDB_API_KEY, or set writers.wandb_mode=offline")


def open_writers(config: RunConfig, folder: RunFolder, first_step: int,
                 earlier: list[tuple[int, dict[str, float]]]) -> list[Writer]:
    """All that the recipe wants; `earlier` are the (step, metrics) of the steps before `first_step`."""
    settings, writers = flat_settings(config.model_dump(mode="json")), []
    if config.writers.tensorboard:
        from sao_megatron.telemetry.tensorboard import TensorBoardWriter
        worst = Worst(Words(folder.model_dir(config) / "tokenizer.json"), folder.path, config.tokens.page)
        writers.append(TensorBoardWriter(folder.path / "tensorboard", settings, first_step, earlier, worst))
    if config.writers.jsonl:
        writers.append(JsonLines(folder.path / "metrics.jsonl", first_step))
    if config.writers.wandb:
        writers.append(WeightsAndBiases(config, folder, settings))
    return writers


class JsonLines:
    """One line a step: {"step", "time" (Unix seconds), "alarms" of the step before, and every metric by its name}."""

    def __init__(self, path: Path, first_step: int):
        lines = path.read_text().splitlines() if path.is_file() else []
        write_whole(path, "".join(f"{line}\n" for line in lines if _step_of(line) < first_step))
        self._file, self._alarms = path.open("a"), []

    def write(self, step: int, metrics: dict[str, float], statistics: Statistics, recorded: list[Recorded]) -> None:
        self._file.write(json.dumps({"step": step, "time": time.time(), "alarms": self._alarms, **metrics}) + "\n")
        self._file.flush()
        self._alarms = []

    def alarm(self, step: int, sentence: str) -> None:
        self._alarms.append(sentence)

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """Infinity for a line that a crash cut off: it goes."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


class WeightsAndBiases:
    """A W&B run of the run's name; a learner that goes on continues it. Offline, its files are in the run's folder;
    so they are where W&B cannot be reached, which is no reason to end a run."""

    def __init__(self, config: RunConfig, folder: RunFolder, settings: dict[str, float | str | bool]):
        import wandb
        begin = partial(wandb.init, project=config.writers.wandb, name=config.name, id=config.name,
                        dir=str(folder.path), config=settings)
        try:
            self._run = begin(mode=config.writers.wandb_mode, resume="allow")
        except wandb.errors.Error as error:
            log.warning("W&B cannot be reached (%s): written offline, for `wandb sync`", str(error).splitlines()[0])
            wandb.teardown()  # else the run that failed holds the name
            self._run = begin(mode="offline")
        self._run.define_metric("learner step")
        self._run.define_metric("*", step_metric="learner step")  # W&B's own axis cannot go back, a run can
        self._alert = wandb.AlertLevel.WARN

    def write(self, step: int, metrics: dict[str, float], statistics: Statistics, recorded: list[Recorded]) -> None:
        self._run.log({"learner step": step} | metrics)

    def alarm(self, step: int, sentence: str) -> None:
        name, _, _ = sentence.partition(" ")
        self._run.alert(title=f"{name} at step {step}", text=sentence, level=self._alert)

    def close(self) -> None:
        self._run.finish()


def flat_settings(config: dict, prefix: str = "") -> dict[str, float | str | bool]:
    """A resolved config as dotted names and plain values."""
    result = {}
    for name, value in config.items():
        if isinstance(value, dict):
            result |= flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float):
            result[f"{prefix}{name}"] = value
    return result
