"""`sao-megatron train`, `resume`, `rollout`, `replay`: one machine's whole run, from a recipe to a summary.

Everything that can be refused is refused before any process starts; then engines, controller and learner ranks start
together and are watched (watch.py) until the run has finished, or until one of them dies and takes the run with it.
"""
from __future__ import annotations

import random
import shutil
import socket
import sys
import time
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from sao_megatron import config as run_config
from sao_megatron.checkpoints import check_same_run, keeps_optimizer
from sao_megatron.config import RunConfig
from sao_megatron.device import gpu_names, has_gpu
from sao_megatron.errors import RunError, UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec, Supervisor
from sao_megatron.telemetry import summary
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.recorded import find_store
from sao_megatron.trajectory.store import Store
from sao_megatron.watch import Plan, Watch

FREE_PORTS = range(10000, 32768)
"""Where ports for engines are sought: Linux gives those above to outgoing connections, and an engine binds its port up
to a minute after it was found free."""


def train(recipe: Path, overrides: list[str]) -> None:
    """Run the recipe to its end. Raises UserError before anything starts, RunError if a process fails later."""
    _new_run(run_config.load(recipe, overrides))


def rollout(recipe: Path, overrides: list[str]) -> None:
    """Fill a store with the trajectories of all the recipe's steps, sampled from `model.path` as it is."""
    config = run_config.load(recipe, [*overrides, "mode=rollout"])
    if config.model.path is None:
        raise UserError("rollout: model.fresh has no weights that an engine could load (a learner makes them): "
                        "give model.path, such as the hf folder of a run")
    _new_run(config)


def evaluate(checkpoint: Path, tasks: list[str], episodes: int, samples: int, overrides: list[str]) -> None:
    """Play the evaluation sets of `tasks` with the weights of an HF folder, without a learner, and show the results."""
    from sao_megatron.weights.hf import read_config
    sets = {name.rpartition(":")[2]: {"task": {"name": name}, "episodes": episodes} for name in tasks}
    recipe = {"name": f"evaluate-{time.strftime('%Y%m%d-%H%M%S')}", "mode": "rollout",
              "model": {"path": str(checkpoint), "dtype": _dtype(read_config(checkpoint))},
              "evaluation": {"only": True, "samples": samples, "sets": sets}}
    recipe = run_config.overridden(recipe, overrides)
    _new_run(run_config.parse(recipe | {"task": sets[next(iter(sets))]["task"]}, "evaluate"))


def _dtype(hf_config: dict) -> str:
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return stored if stored in ("float32", "bfloat16") else "bfloat16"


def replay(recipe: Path, overrides: list[str], trajectories: Path) -> None:
    """Train on what a run recorded (its folder or its store), in its batches, without engines and controller."""
    config = run_config.load(recipe, [*overrides, "mode=replay"])
    _new_run(config, find_store(trajectories, config.total_steps * config.batch.trajectories))


def _new_run(config: RunConfig, recorded: Path | None = None) -> None:
    folder = RunFolder(config.run_dir)
    progress = Progress(config.total_steps)
    progress.note(f"checking the recipe; outputs go to {folder.path}")
    _claim(folder)
    try:
        plan = prepare(_loadable(config, folder), folder)
        if recorded:
            with Store(recorded) as store:
                store.copy_for_replay(folder.store_path)
    except BaseException:
        shutil.rmtree(folder.path)  # nothing has run: leave the name free for the next try
        raise
    with folder.lock():
        _run(config, folder, plan, progress)


def _loadable(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Where engines load `model.path` by themselves: from a folder of which they can."""
    from sao_megatron.weights.untied import needs_head, untie
    path = config.model.path
    if config.mode != "rollout" or not path.is_dir() or not needs_head(path):
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
    before = folder.config()
    config = run_config.load(folder.config_path, overrides)
    check_same_run(before, config)
    progress = Progress(config.total_steps)
    with folder.lock():
        _check_unfinished(config, folder)
        latest = folder.checkpoints.latest()
        progress.note(f"{folder.path} goes on from " + (f"step {latest.step}" if latest else "its beginning: it has no "
                                                        "checkpoint"))
        if latest and not keeps_optimizer(latest.state(), config):
            progress.note("WARNING: the experts are laid out differently (parallel.ep, parallel.etp): weights go on as "
                          "they are, the optimizers begin anew")
        _run(config, folder, prepare(config, folder), progress)


def _check_unfinished(config: RunConfig, folder: RunFolder) -> None:
    with Store(folder.store_path) as store:
        finished, steps = store.get_state("finished"), len(store.steps())
    if finished and (folder.export_path.exists() or config.mode == "rollout") and steps >= config.total_steps:
        raise UserError(f"{folder.path} has finished its {steps} steps: give more with steps=..., or start a new run")


def _run(config: RunConfig, folder: RunFolder, plan: Plan, progress: Progress) -> None:
    with Store(folder.store_path) as store, Supervisor(folder.log_dir) as supervisor:
        store.forget("finished", "stop")
        if store.get_state(summary.STARTED_AT) is None:
            store.set_state(summary.STARTED_AT, time.time())
        watch = Watch(config, plan, store, supervisor, progress)
        watch.start()
        progress.note(f"started {', '.join(supervisor.names)}; logs are in {folder.log_dir}")
        try:
            watch.until_done()
        except RunError as error:
            raise RunError(f"{error}\ngo on with: sao-megatron resume {folder.path}") from None
        finally:
            progress.close()
            progress.note("stopping what still runs")
    written = summary.write_summary(folder.path)
    if config.evaluation.only:
        summary.show_evaluations(written)
    else:
        summary.show(written)


def prepare(config: RunConfig, folder: RunFolder) -> Plan:
    """Check model, algorithm, layout, task, GPUs and ports (UserError), and write the run's folder."""
    from sao_megatron.learner import layout
    from sao_megatron.rollout.tasks import load_task
    from sao_megatron.weights import value_head
    from sao_megatron.weights.hf import prepare_model, read_config

    _check_algorithm(config)
    model_dir = prepare_model(config, folder.path)
    hf_config = read_config(model_dir)
    layout.check(config, hf_config)
    value_head.check(config, hf_config)
    _check_task(config, load_task(config.task.name, config.task.options, model_dir), hf_config["vocab_size"])
    for name, one in config.evaluation.sets.items():
        _check_vocabulary(f"evaluation.sets.{name}", load_task(one.task.name, one.task.options, model_dir),
                          hf_config["vocab_size"])
    devices = _devices(config) if has_gpu() else None
    run_config.save(config, folder.config_path)
    urls = [] if config.mode == "replay" else [f"http://{config.engine.host}:{port}" for port in _engine_ports(config)]
    folder.place_engines(urls)
    return _plan(config, folder, urls, devices)


def _check_algorithm(config: RunConfig) -> None:
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


def _check_task(config: RunConfig, task, vocab_size: int) -> None:
    _check_vocabulary("task.name", task, vocab_size)
    if config.warmup.steps:
        try:
            next(iter(task.demonstrations(1, config.seed)))
        except NotImplementedError:
            raise UserError(f"warmup.steps: task {config.task.name} has no demonstrations to warm up on: "
                            f"set warmup.steps=0") from None


def _devices(config: RunConfig) -> list[str]:
    """The GPUs in use, as CUDA_VISIBLE_DEVICES names them: the learner's first, then each engine's."""
    devices = gpu_names()
    needed = _learner_ranks(config) + (0 if config.mode == "replay" else config.engine.count * config.engine.tp)
    if len(devices) < needed:
        raise UserError(f"this machine has {len(devices)} GPUs, the recipe needs {needed} "
                        f"(parallel.ranks={config.parallel.ranks}, engine.count={config.engine.count} times "
                        f"engine.tp={config.engine.tp}): make one of them smaller")
    return devices


def _learner_ranks(config: RunConfig) -> int:
    return 0 if config.mode == "rollout" else config.parallel.ranks


def _engine_ports(config: RunConfig) -> list[int]:
    host, first, count = config.engine.host, config.engine.port, config.engine.count
    if first == 0:
        free = (port for port in random.sample(FREE_PORTS, len(FREE_PORTS)) if _cannot_bind(host, port) is None)
        ports = sorted(islice(free, count))
        if len(ports) < count:
            raise UserError(f"engine.host={host}: {len(ports)} ports can be used, {count} are needed "
                            f"({_cannot_bind(host, FREE_PORTS[0])}): give an address of this machine")
        return ports
    ports = list(range(first, first + count))
    for port in ports:
        if error := _cannot_bind(host, port):
            raise UserError(f"engine.port={first}: port {port} of {host} cannot be used ({error}): "
                            f"choose another, or 0 for free ones")
    return ports


def _cannot_bind(host: str, port: int) -> Exception | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return error
    return None


def _plan(config: RunConfig, folder: RunFolder, urls: list[str], devices: list[str] | None) -> Plan:
    """`devices`: GPU names, None without GPUs."""
    from sao_megatron.engine.process import engine_command, engine_environment
    ranks, tp, gpu = _learner_ranks(config), config.engine.tp, devices is not None
    common = {"PYTHONUNBUFFERED": "1"} | ({} if gpu else {"OMP_NUM_THREADS": "1"})
    cli = [sys.executable, "-m", "sao_megatron.cli"]

    def on(first: int, count: int) -> dict[str, str]:
        return common | ({"CUDA_VISIBLE_DEVICES": ",".join(devices[first:first + count])} if gpu else {})

    engines = [ProcessSpec(f"engine-{i}",
                           engine_command(config, folder.model_dir(config), urlsplit(url).port, gpu),
                           engine_environment(gpu, tp) | on(ranks + i * tp, tp)) for i, url in enumerate(urls)]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    learners = [ProcessSpec(f"learner-{rank}", [*cli, "learner", str(folder.path)],
                            on(0, ranks) | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)]
    controller = None if config.mode == "replay" else ProcessSpec(
        "controller", [*cli, "controller", str(folder.path)], common)
    return Plan(engines, controller, learners, urls)
