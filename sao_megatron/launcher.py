"""`sao-megatron train`, `resume`, `rollout`, `replay`: a whole run, from a recipe to a summary.

Everything that can be refused is refused before any process starts; then engines, controller and learner ranks start
together and are watched (watch.py) until the run has finished, or until one of them dies and takes the run with it.
Where they start is the placement's: this machine, or the nodes of the Slurm job that we are in.
"""
from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from sao_megatron import config as run_config
from sao_megatron.checkpoints import check_same_run, keeps_optimizer
from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError, Unfinished, UserError
from sao_megatron.placement.allocation import Allocation
from sao_megatron.placement.plan import OneMachine, Placement
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import Supervisor
from sao_megatron.telemetry import summary
from sao_megatron.telemetry.events import Events, fruitless, read
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.recorded import find_store
from sao_megatron.trajectory.store import STOPPED, Store
from sao_megatron.watch import Watch

LOCK_SECONDS = 180.0
"""On a cluster, for the file server to notice that the machine of an earlier launcher is dead."""


def train(recipe: Path, overrides: list[str], slurm: bool = False) -> None:
    """Run the recipe to its end. Raises UserError before anything starts, RunError if a process fails later, Unfinished
    if it was asked to end (SIGUSR1) or lost a node.

    `slurm`: on the nodes of this Slurm job; and as a job may start many times, a run that has begun goes on.
    """
    config = run_config.load(recipe, overrides)
    folder, allocation = RunFolder(config.run_dir), Allocation.ours() if slurm else None
    if slurm and folder.config_path.is_file():
        _go_on(config, folder, allocation)
    else:
        _new_run(config, allocation=allocation)


def rollout(recipe: Path, overrides: list[str]) -> None:
    """Fill a store with the trajectories of all the recipe's steps, sampled from `model.path` as it is."""
    config = run_config.load(recipe, [*overrides, "mode=rollout"])
    if config.model.path is None:
        raise UserError("rollout: model.fresh has no weights that an engine could load (a learner makes them): "
                        "give model.path, such as the hf folder of a run")
    _new_run(config)


def evaluate(checkpoint: Path, tasks: list[str], overrides: list[str]) -> None:
    """Play the evaluation sets of `tasks` with the weights of an HF folder, without a learner, and show the results.

    Each task is a set of its own name; `evaluation.episodes` is the size of those that say none.
    """
    from sao_megatron.weights.hf import read_config
    sets = {name.rpartition(":")[2]: {"task": {"name": name}} for name in tasks}
    recipe = run_config.overridden({
        "name": f"evaluate-{time.strftime('%Y%m%d-%H%M%S')}", "mode": "rollout",
        "model": {"path": str(checkpoint), "dtype": _dtype(read_config(checkpoint))},
        "evaluation": {"only": True, "episodes": 256, "sets": sets}}, overrides)
    episodes, sets = recipe["evaluation"].pop("episodes"), recipe["evaluation"]["sets"]
    for one in sets.values():
        one.setdefault("episodes", episodes)
    _new_run(run_config.parse(recipe | {"task": sets[next(iter(sets))]["task"]}, "evaluate"))


def _dtype(hf_config: dict) -> str:
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return stored if stored in ("float32", "bfloat16") else "bfloat16"


def replay(recipe: Path, overrides: list[str], trajectories: Path) -> None:
    """Train on what a run recorded (its folder or its store), in its batches, without engines and controller."""
    config = run_config.load(recipe, [*overrides, "mode=replay"])
    needed = config.total_steps * config.batch.trajectories
    _new_run(config, find_store(trajectories, needed, routing=config.rollout.routing_replay))


def _new_run(config: RunConfig, recorded: Path | None = None, allocation: Allocation | None = None) -> None:
    folder = RunFolder(config.run_dir)
    progress = _progress(config, folder)
    progress.note(f"checking the recipe; outputs go to {folder.path}")
    _claim(folder)
    try:
        config = _loadable(config, folder)
        prepare(config, folder)
        placement = _place(config, folder, allocation)
        if recorded:
            with Store(recorded) as store:
                store.copy_for_replay(folder.store_path)
    except BaseException:
        shutil.rmtree(folder.path)  # nothing has run: leave the name free for the next try
        raise
    with folder.lock():
        _run(config, folder, placement, progress)


def _progress(config: RunConfig, folder: RunFolder) -> Progress:
    return Progress(config.total_steps, journal=Events(folder.events_path))


def _loadable(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Where engines load `model.path` by themselves: from a folder of which they can."""
    from sao_megatron.weights.untied import needs_head, untie
    path = config.model.path
    if config.mode != "rollout" or path is None or not path.is_dir() or not needs_head(path):
        return config
    model = config.model.model_copy(update={"path": untie(path, folder.path / "untied")})
    return config.model_copy(update={"model": model})


def _claim(folder: RunFolder) -> None:
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise UserError(f"{folder.path} exists already: give this run another name (name=...), delete the folder, or "
                        f"continue it with `sao-megatron resume {folder.path}`")
    folder.path.mkdir(parents=True, exist_ok=True)


def resume(run_dir: Path, overrides: list[str]) -> None:
    """Go on with a run that did not finish, or with more steps, from its newest checkpoint. Raises like `train`."""
    folder = RunFolder(run_dir)
    folder.config()
    config = run_config.load(folder.config_path, overrides)
    if _is_finished(config, folder):
        raise UserError(f"{folder.path} has finished its {config.total_steps} steps: give more with steps=..., or "
                        "start a new run")
    _go_on(config, folder)


def _go_on(config: RunConfig, folder: RunFolder, allocation: Allocation | None = None) -> None:
    check_same_run(folder.config(), config)
    progress = _progress(config, folder)
    with folder.lock(LOCK_SECONDS if allocation else 0.0):
        if _is_finished(config, folder):
            progress.note(f"{folder.path} has finished its {config.total_steps} steps")
            return
        latest = folder.checkpoints.latest()
        progress.note(f"{folder.path} goes on from " + (f"step {latest.step}" if latest else "its beginning: it has no "
                                                        "checkpoint"))
        if latest and not keeps_optimizer(latest.state(), config):
            progress.note("WARNING: the experts are laid out differently (parallel.ep, parallel.etp): weights go on as "
                          "they are, the optimizers begin anew")
        progress.saved_step = latest.step if latest else 0
        if allocation:
            _refuse_a_crash_loop(config, folder, progress.saved_step)
        prepare(config, folder)
        _run(config, folder, _place(config, folder, allocation), progress)


def _is_finished(config: RunConfig, folder: RunFolder) -> bool:
    with Store(folder.store_path) as store:
        finished, steps = store.get_state("finished"), len(store.steps())
    return bool(finished and (folder.export_path.exists() or config.mode == "rollout") and steps >= config.total_steps)


def _refuse_a_crash_loop(config: RunConfig, folder: RunFolder, saved_step: int) -> None:
    """Raises RunError where the job was put back into the queue often enough without a newer checkpoint."""
    events = fruitless(read(folder.events_path))
    starts = [event for event in events if event.kind == "start"]
    if not starts or saved_step > starts[0].step or len(starts) <= config.cluster.requeues:
        return
    first = next((event for event in events if event.kind not in ("start", "node_excluded")), None)
    cause = first.why if first else "the journal holds no cause: a node was lost without a word, see Slurm's log"
    raise RunError(f"{cause}\nthat was the first of {len(starts)} tries without a checkpoint after step {saved_step} "
                   f"(cluster.requeues={config.cluster.requeues}); all are in {folder.events_path}")


def _place(config: RunConfig, folder: RunFolder, allocation: Allocation | None) -> Placement:
    """Raises UserError where the machines do not hold the run."""
    if allocation:
        from sao_megatron.placement.slurm import SlurmPlacement
        return SlurmPlacement(config, folder, allocation)
    from sao_megatron.placement.local import local_plan
    return OneMachine(local_plan(config, folder), folder.log_dir)


def _run(config: RunConfig, folder: RunFolder, placement: Placement, progress: Progress) -> None:
    earlier = read(folder.events_path)
    silent = earlier and earlier[-1].kind not in ("requeue", "failure", "end")
    progress.record("start", folder.path.name, f"started from step {progress.saved_step}" + (
        "; the launcher before ended without a word: it was killed, or its node was lost" if silent else ""))
    try:
        _watch(config, folder, placement, progress)
    except Unfinished as reason:
        progress.record("requeue", folder.path.name, str(reason))
        raise
    except (RunError, UserError) as error:
        progress.record("failure", folder.path.name, str(error))
        raise type(error)(f"{error}\ngo on with: sao-megatron resume {folder.path}") from None
    except (KeyboardInterrupt, SystemExit):
        progress.record("end", folder.path.name, "interrupted")
        raise
    progress.record("end", folder.path.name, "finished")
    written = summary.write_summary(folder.path)
    if config.evaluation.only:
        summary.show_evaluations(written)
    else:
        summary.show(written)


def _watch(config: RunConfig, folder: RunFolder, placement: Placement, progress: Progress) -> None:
    with Store(folder.store_path) as store, Supervisor(placement.log_dir, placement.grace) as supervisor:
        store.forget("finished", "stop", STOPPED)
        if store.get_state(summary.STARTED_AT) is None:
            store.set_state(summary.STARTED_AT, time.time())
        placement.check(supervisor, progress)
        folder.place_engines(placement.plan().urls)
        if urls := placement.plan().sandbox_urls:
            folder.place_sandboxes(urls)
        watch = Watch(config, placement, store, supervisor, progress)
        watch.start()
        progress.note(f"started {', '.join(supervisor.names)}; logs are in {supervisor.log_dir}")
        try:
            watch.until_done()
        finally:
            progress.close()
            progress.note("stopping what still runs")


def prepare(config: RunConfig, folder: RunFolder) -> None:
    """Check model, algorithm, layout and task (UserError), and write the run's folder."""
    from sao_megatron.learner import layout
    from sao_megatron.telemetry import writers
    from sao_megatron.weights import value_head
    from sao_megatron.weights.hf import prepare_model, read_config

    check_algorithm(config)
    model_dir = prepare_model(config, folder.path)
    hf_config = read_config(model_dir)
    layout.check(config, hf_config)
    value_head.check(config, hf_config)
    writers.check(config)
    check_tasks(config, hf_config["vocab_size"], model_dir)
    check_sandbox(config)
    run_config.save(config, folder.config_path)


def check_tasks(config: RunConfig, vocab_size: int, model_dir: Path | None) -> None:
    """The task and those of the evaluation, loaded as a controller does."""
    from sao_megatron.rollout.tasks import load_task
    from sao_megatron.sandbox.pool import Pool
    sandbox = Pool.of(config.sandbox)
    task = load_task(config.task.name, config.task.options, model_dir, sandbox)
    check_task(config, task, vocab_size)
    for name, one in config.evaluation.sets.items():
        if name == task.name and config.evaluation.episodes:
            raise UserError(f"evaluation.sets.{name} has the name of the run's own task, of which evaluation.episodes "
                            f"is a set already: choose another name")
        other = load_task(one.task.name, one.task.options, model_dir, sandbox)
        _check_vocabulary(f"evaluation.sets.{name}", other, vocab_size)
        other.evaluation_prompts(one.episodes)  # refused now where there are not so many


def check_sandbox(config: RunConfig) -> None:
    """Where a task runs code on this machine, whether it can be isolated here."""
    from sao_megatron.rollout.tasks import runs_code
    from sao_megatron.sandbox.pool import check
    from sao_megatron.sandbox.session import SandboxError
    tasks = [config.task, *(one.task for one in config.evaluation.sets.values())]
    running = [task.name for task in tasks if runs_code(task.name, task.options)]
    if running and config.mode != "replay" and not config.sandbox.servers:
        try:
            asyncio.run(check(config.sandbox))
        except SandboxError as error:
            raise UserError(f"task {running[0]} runs a model's code, and {error}; or start servers on machines that "
                            f"can (sandbox.servers)") from None


def check_algorithm(config: RunConfig) -> None:
    from sao_megatron.algorithm import presets
    choices = config.algorithm.model_dump(exclude={"preset"})
    try:
        preset = presets.resolve(config.algorithm.preset, **choices)
        presets.check_batch(preset, config.batch.trajectories, config.batch.mini_batches)
        presets.check_context(preset, config.parallel.cp)
        if config.rollout.redundancy and preset.rollouts_per_prompt == 1:
            raise ValueError(f"rollout.redundancy={config.rollout.redundancy} is for groups, preset {preset.name} has "
                             f"single rollouts (rollouts_per_prompt=1): set rollout.redundancy=0")
    except ValueError as error:
        raise UserError(f"algorithm: {error}") from None


def _check_vocabulary(key: str, task, vocab_size: int) -> None:
    if task.vocab_size > vocab_size:
        raise UserError(f"{key}: {task.name} uses token ids up to {task.vocab_size - 1}, the model's "
                        f"vocabulary has {vocab_size} (vocab_size of its config.json): choose a model with at least "
                        f"{task.vocab_size}")


def check_task(config: RunConfig, task, vocab_size: int) -> None:
    _check_vocabulary("task.name", task, vocab_size)
    task.evaluation_prompts(config.evaluation.episodes)  # refused now where there are not so many
    if config.warmup.steps:
        try:
            next(iter(task.demonstrations(1, config.seed)))
        except NotImplementedError:
            raise UserError(f"warmup.steps: task {config.task.name} has no demonstrations to warm up on: "
                            f"set warmup.steps=0") from None
