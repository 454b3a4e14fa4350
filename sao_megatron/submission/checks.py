"""What is wrong with a recipe for a cluster, from files alone: recipe, config.json, the checkpoint if it is here."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sao_megatron.checkpoints import check_same_run
from sao_megatron.config import RunConfig, placement
from sao_megatron.errors import UserError
from sao_megatron.launcher import check_algorithm, check_tasks
from sao_megatron.learner import layout, memory
from sao_megatron.rollout.tasks import check_options
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry import writers
from sao_megatron.weights import value_head
from sao_megatron.weights.families import family_of
from sao_megatron.weights.hf import canonical, prepare_model, read_config


@dataclass(frozen=True)
class Model:
    """What is known of the model on this machine."""

    hf_config: dict
    """In the spelling of weights/hf.py."""
    folder: Path | None
    """The checkpoint; None if it is not here, and for a fresh model."""
    source: str
    """Where config.json was found, for the reader."""


def find_model(config: RunConfig, recipe: Path) -> Model:
    """The model's config: `model.fresh`, config.json of `model.path`, or models/<folder's name>.json beside the recipe.

    Raises UserError if there is none, and for a checkpoint that is here and cannot be trained.
    """
    if config.model.path is None:
        return Model(canonical(config.model.fresh), None, "model.fresh")
    path = config.model.path
    if path.is_dir():
        prepare_model(config, config.run_dir)  # checks only: nothing is written for a model with a path
        return Model(read_config(path), path, str(path / "config.json"))
    known = recipe.parent / "models" / f"{path.name}.json"
    if not known.is_file():
        raise UserError(f"model.path: folder {path} does not exist, and neither does {known}, which would do for "
                        "--dry-run")
    return Model(canonical(json.loads(known.read_text())), None, str(known))


def check(config: RunConfig, model: Model) -> None:
    """Raise UserError for the first thing that would end the run after it had waited in the queue."""
    if config.mode != "train":
        raise UserError(f"mode={config.mode}: jobs are submitted for mode=train")
    hf_config = model.hf_config
    family_of(hf_config)
    check_algorithm(config)
    layout.check(config, hf_config)
    placement(config)
    value_head.check(config, hf_config)
    _check_context(config, hf_config)
    writers.check(config)
    for task in (config.task, *(one.task for one in config.evaluation.sets.values())):
        check_options(task.name, task.options)
    if model.folder or config.model.fresh:
        check_tasks(config, hf_config["vocab_size"], model.folder)
    _check_run(config)


def _check_context(config: RunConfig, hf_config: dict) -> None:
    longest, known = config.rollout.max_tokens, hf_config.get("max_position_embeddings")
    if known and longest > known:
        raise UserError(f"rollout.max_tokens={longest} is more than the model's max_position_embeddings={known}: the "
                        "engines would refuse longer trajectories")


def _check_run(config: RunConfig) -> None:
    """A run that exists goes on: with the same algorithm."""
    folder = RunFolder(config.run_dir)
    if folder.config_path.is_file():
        check_same_run(folder.config(), config)


def check_memory(config: RunConfig, learner: memory.Estimate, engine: memory.EngineEstimate) -> None:
    """Raise UserError if a learner rank or an engine needs more than a GPU has."""
    room = config.cluster.gpu_memory_gb
    if learner.total > room:
        raise UserError(f"a learner rank needs about {learner.total:.0f} GiB, cluster.gpu_memory_gb={room:g}: spread "
                        "the experts (parallel.ep) or the tokens (parallel.cp) over more ranks, set "
                        "parallel.recompute=full, or take more learner nodes")
    if engine.kv_tokens < config.rollout.max_tokens:
        raise UserError(f"an engine has room for {engine.kv_tokens:,} tokens in its KV cache (beside "
                        f"{engine.weights:.0f} GiB of weights on each of engine.tp={config.engine.tp} GPUs), less than "
                        f"rollout.max_tokens={config.rollout.max_tokens}: make engine.tp larger")
