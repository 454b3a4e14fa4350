"""`sao-megatron submit`: check, show what the job would be, and queue it."""
from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sao_megatron import config as run_config
from sao_megatron.config import RunConfig, placement
from sao_megatron.errors import UserError
from sao_megatron.learner import memory
from sao_megatron.run_folder import RunFolder
from sao_megatron.submission import sbatch
from sao_megatron.submission.checks import Model, check, check_memory, find_model


def submit(recipe: Path, overrides: list[str], dry_run: bool) -> None:
    """Queue the recipe's jobs, or with `dry_run` only say what they would be. Raises UserError for what is refused."""
    config = run_config.load(recipe, overrides)
    model = find_model(config, recipe)
    check(config, model)
    print(describe(config, model), flush=True)
    if config.cluster.gpus_per_node:
        learner, engine = memory.learner(config, model.hf_config), memory.engine(config, model.hf_config)
        show_memory(config, learner, engine)
        print(describe_disk(config, memory.checkpoint(config, model.hf_config)))
        check_memory(config, learner, engine)
    if not dry_run and config.model.path and model.folder is None:
        raise UserError(f"model.path: folder {config.model.path} does not exist: put the checkpoint where all nodes "
                        "see it (--dry-run does without)")
    parts = sbatch.command(config)
    _ask_slurm(config, parts, dry_run)
    if dry_run:
        print(f"would write {RunFolder(config.run_dir).submitted_path} and run"
              + (f", {config.cluster.chain} times" if config.cluster.chain > 1 else ""))
        print(shlex.join(parts))
        return
    _queue(config, parts)


def _queue(config: RunConfig, parts: list[str]) -> None:
    path = RunFolder(config.run_dir).submitted_path
    path.parent.mkdir(parents=True, exist_ok=True)
    run_config.save(config, path)
    jobs = [sbatch.submit(parts) for _ in range(config.cluster.chain)]
    print(f"queued as job {', '.join(jobs)}; the recipe as resolved is {path}\nlook at it with `sao-megatron status "
          f"{config.run_dir}`, at what the job itself says in {config.runs_dir}/{config.name}.slurm-<job>.out")


def _ask_slurm(config: RunConfig, parts: list[str], dry_run: bool) -> None:
    """What the cluster makes of the job, where there is one; a real submission needs it."""
    if not sbatch.answers():
        if not dry_run:
            raise UserError("no Slurm controller answers on this machine: submit from a login node, or use --dry-run")
        print("Slurm: no controller answers here, so partitions, GPUs and limits were not asked for")
        return
    if not sbatch.SCRIPT.is_file():
        raise UserError(f"{sbatch.SCRIPT} does not exist: submit from a checkout of the repository, whose package is "
                        "installed with `make setup`")
    sbatch.check_nodes(config.cluster)
    print(f"Slurm: {sbatch.test_only(parts)}")


def describe(config: RunConfig, model: Model) -> str:
    """The job in a few lines: nodes, layout, engines, and what could not be checked here."""
    cluster, parallel, places = config.cluster, config.parallel, placement(config)
    kind = f"{cluster.gpus_per_node} GPUs" if cluster.gpus_per_node else "no GPU"
    spare = f", {cluster.spare_nodes} spare" if cluster.spare_nodes else ""
    layout = " · ".join(f"{name}{getattr(parallel, name)}" for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")
                        if getattr(parallel, name) > 1) or "one rank"
    over = f" over {places.nodes_per_engine} nodes" if places.nodes_per_engine > 1 else ""
    total = memory.parameters(model.hf_config, run_config.ParallelSection()).total
    lines = [
        f"{config.name}: {total / 1e9:,.1f} B parameters ({model.source}), preset {config.algorithm.preset}",
        f"learner: {cluster.learner_nodes} nodes with {kind}{spare}, {parallel.ranks} ranks: {layout}",
        f"engines: {cluster.rollout_nodes} nodes, {config.engine.count} of tp{config.engine.tp}{over}",
        f"step: {config.batch.trajectories} trajectories of at most {config.rollout.max_tokens:,} tokens"]
    if config.model.path and model.folder is None:
        lines.append(f"not checked: the checkpoint and the prompts, for {config.model.path} is not here")
    return "\n".join(lines)


def show_memory(config: RunConfig, learner: memory.Estimate, engine: memory.EngineEstimate) -> None:
    """What a GPU of either side holds, in GiB."""
    stage = f", pipeline stage {learner.stage}" if config.parallel.pp > 1 else ""
    print(f"memory of the fullest learner rank{stage}, an estimate (docs/slurm.md):")
    table = Table(box=None)
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name, size in learner.rows.items():
        table.add_row(name, f"{size:.1f}")
    table.add_row(f"total, of {config.cluster.gpu_memory_gb:g}", f"{learner.total:.1f}")
    Console(width=100).print(table)
    trajectories = engine.kv_tokens / config.rollout.max_tokens
    print(f"an engine's GPU: {engine.weights:.1f} GiB of weights, {max(0.0, engine.kv_cache):.1f} of KV cache: "
          f"{engine.kv_tokens:,} tokens an engine, {trajectories:.1f} of the longest trajectories\n"
          f"a learner node's main memory while a checkpoint is written: "
          f"{learner.saved * placement(config).ranks_per_node:.0f} GiB")


def describe_disk(config: RunConfig, checkpoint: float) -> str:
    """What checkpoints of `checkpoint` GiB take at most, and whether there is room. (A quota is not seen.)"""
    folder = next(path for path in (config.runs_dir.absolute(), *config.runs_dir.absolute().parents) if path.is_dir())
    most, free = (config.checkpoint.keep + 1) * checkpoint, shutil.disk_usage(folder).free / memory.GIB
    return (f"checkpoints: {checkpoint:,.0f} GiB each, {most:,.0f} while one is written beside checkpoint.keep="
            f"{config.checkpoint.keep}; {folder} has {free:,.0f} free" + (": TOO LITTLE" if free < most else ""))
