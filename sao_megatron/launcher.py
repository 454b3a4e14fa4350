"""`sao-megatron train`: one machine's whole run, from a recipe to a summary.

Everything that can be refused is refused before any process starts; then engines, controller and learner ranks start
together and are watched until the learner has finished, or until one of them dies and takes the run with it. An engine
that dies is started again a few times; the run goes on with the others meanwhile.
"""
from __future__ import annotations

import random
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sao_megatron import config as run_config
from sao_megatron.config import RunConfig
from sao_megatron.device import gpu_names, has_gpu
from sao_megatron.errors import RunError, UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec, Supervisor, last_words
from sao_megatron.telemetry import summary
from sao_megatron.telemetry.progress import Progress
from sao_megatron.trajectory.store import Store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.5
FREE_PORTS = range(10000, 32768)
"""Where ports for engines are sought: Linux gives those above to outgoing connections, and an engine binds its port up
to a minute after it was found free."""
EXIT_SECONDS = 600.0
"""Between the end of the first learner rank or of the controller, and the end of all of them."""
ENGINE_END_SECONDS = 15.0
"""For an engine that lost its scheduler to end (SGLang notices within 1 s, then collects dumps for 5 s)."""


def train(recipe: Path, overrides: list[str]) -> None:
    """Run the recipe to its end. Raises UserError before anything starts, RunError if a process fails later."""
    config = run_config.load(recipe, overrides)
    folder = RunFolder(config.run_dir)
    progress = Progress(config.total_steps)
    progress.note(f"checking {recipe}; outputs go to {folder.path}")
    _claim(folder)
    try:
        plan = prepare(config, folder)
    except BaseException:
        shutil.rmtree(folder.path)  # nothing has run: leave the name free for the next try
        raise
    with Store(folder.store_path) as store:
        _run(config, folder, plan, store, progress)
    summary.show(summary.write_summary(folder.path))


def _claim(folder: RunFolder) -> None:
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise UserError(f"{folder.path} exists already: give this run another name (name=...) or delete the folder")
    folder.path.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class Plan:
    """What to start."""

    engines: list[ProcessSpec]
    controller: ProcessSpec
    learners: list[ProcessSpec]
    urls: list[str]
    rendezvous: TCPStore | None = None
    """Where the learner ranks find each other; it must live as long as they do."""

    @property
    def processes(self) -> list[ProcessSpec]:
        return [*self.engines, *self.learners, self.controller]


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
    devices = _devices(config) if has_gpu() else None
    run_config.save(config, folder.config_path)
    urls = [f"http://{config.engine.host}:{port}" for port in _engine_ports(config)]
    folder.place_engines(urls)
    return _plan(config, folder, urls, devices)


def _check_algorithm(config: RunConfig) -> None:
    from sao_megatron.algorithm import presets
    choices = config.algorithm.model_dump(exclude={"preset"})
    try:
        preset = presets.resolve(config.algorithm.preset, **choices)
        presets.check_batch(preset, config.batch.trajectories, config.batch.mini_batches)
        presets.check_context(preset, config.parallel.cp)
    except ValueError as error:
        raise UserError(f"algorithm: {error}") from None


def _check_task(config: RunConfig, task, vocab_size: int) -> None:
    if task.vocab_size > vocab_size:
        raise UserError(f"task.name: {config.task.name} uses token ids up to {task.vocab_size - 1}, the model's "
                        f"vocabulary has {vocab_size} (vocab_size of its config.json): choose a model with at least "
                        f"{task.vocab_size}")
    if config.warmup.steps:
        try:
            next(iter(task.demonstrations(1, config.seed)))
        except NotImplementedError:
            raise UserError(f"warmup.steps: task {config.task.name} has no demonstrations to warm up on: "
                            f"set warmup.steps=0") from None


def _devices(config: RunConfig) -> list[str]:
    """The GPUs in use, as CUDA_VISIBLE_DEVICES names them: the learner's first, then each engine's."""
    devices = gpu_names()
    needed = config.parallel.ranks + config.engine.count * config.engine.tp
    if len(devices) < needed:
        raise UserError(f"this machine has {len(devices)} GPUs, the recipe needs {needed} "
                        f"(parallel.ranks={config.parallel.ranks}, engine.count={config.engine.count} times "
                        f"engine.tp={config.engine.tp}): make one of them smaller")
    return devices


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
    from torch.distributed import TCPStore

    from sao_megatron.engine.process import engine_command, engine_environment
    ranks, tp, gpu = config.parallel.ranks, config.engine.tp, devices is not None
    common = {"PYTHONUNBUFFERED": "1"} | ({} if gpu else {"OMP_NUM_THREADS": "1"})
    cli = [sys.executable, "-m", "sao_megatron.cli"]

    def on(first: int, count: int) -> dict[str, str]:
        return common | ({"CUDA_VISIBLE_DEVICES": ",".join(devices[first:first + count])} if gpu else {})

    engines = [ProcessSpec(f"engine-{i}",
                           engine_command(config, folder.model_dir(config), urlsplit(url).port, gpu),
                           engine_environment(gpu, tp) | on(ranks + i * tp, tp)) for i, url in enumerate(urls)]
    # The ranks meet at a store of ours, as under torchrun: a free port that rank 0 were to bind later could be taken.
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port),
             "TORCHELASTIC_USE_AGENT_STORE": "True"}
    learners = [ProcessSpec(f"learner-{rank}", [*cli, "learner", str(folder.path)],
                            on(0, ranks) | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)]
    controller = ProcessSpec("controller", [*cli, "controller", str(folder.path)], common)
    return Plan(engines, controller, learners, urls, rendezvous)


def _run(config: RunConfig, folder: RunFolder, plan: Plan, store: Store, progress: Progress) -> None:
    with Supervisor(folder.log_dir) as supervisor:
        store.set_state(summary.STARTED_AT, time.time())
        supervisor.start(plan.processes)
        progress.note(f"started {', '.join(spec.name for spec in plan.processes)}; logs are in {folder.log_dir}")
        try:
            Watch(config, plan, store, supervisor, progress).until_done()
        finally:
            progress.close()
            progress.note("stopping what still runs")


class Watch:
    """Follows a started run: shows its steps and raises RunError as soon as a process has failed."""

    def __init__(self, config: RunConfig, plan: Plan, store: Store, supervisor: Supervisor, progress: Progress):
        self._config, self._store, self._supervisor, self._progress = config, store, supervisor, progress
        self._workers = {spec.name for spec in [*plan.learners, plan.controller]}
        self._urls = dict(zip((spec.name for spec in plan.engines), plan.urls, strict=True))
        self._engines = {spec.name: spec for spec in plan.engines}
        self._starting = dict.fromkeys(self._urls, time.monotonic())
        """Engines that are not healthy yet, and since when they start."""
        self._restarts_left = dict.fromkeys(self._urls, config.engine.restarts)
        self._lost: set[str] = set()
        """Engines that were started often enough."""
        self._first_end: float | None = None
        self._last_step, self._steps = -1, 0

    def until_done(self) -> None:
        """Return when the learner ranks and the controller have ended well."""
        while not self._all_ended(self._revived(self._supervisor.poll())):
            self._show_steps()
            self._check_engines()
            self._show_status()
            time.sleep(POLL_SECONDS)
        self._show_steps()

    def _revived(self, ended: dict[str, int]) -> dict[str, int]:
        """What ended, without the engines that the run can do without or that were started again."""
        for name in [name for name in ended if name in self._urls and self._may_die(name)]:
            code = ended.pop(name)
            if name in self._lost:
                continue
            if not self._restarts_left[name]:
                self._lost.add(name)
                self._progress.note(f"{name} ended again (exit code {code}): the run goes on without it")
                continue
            self._restarts_left[name] -= 1
            self._supervisor.restart(self._engines[name])
            self._starting[name] = time.monotonic()
            self._progress.note(f"{name} ended with exit code {code} and is started again "
                                f"({self._restarts_left[name]} of engine.restarts={self._config.engine.restarts} left)")
        return ended

    def _may_die(self, name: str) -> bool:
        """Whether an engine was once healthy, so that it is no fault of the recipe, and may be started again, or other
        engines are left."""
        once_healthy = name not in self._starting or self._restarts_left[name] < self._config.engine.restarts
        return once_healthy and bool(self._restarts_left[name] or self._urls.keys() - self._lost - {name})

    def _all_ended(self, ended: dict[str, int]) -> bool:
        if failed := self._failed(ended):
            raise self._failure(failed)
        if ended and self._first_end is None:
            self._first_end = time.monotonic()
        missing = sorted(self._workers - ended.keys())
        if missing and ended and time.monotonic() - self._first_end > EXIT_SECONDS:
            raise RunError(f"{', '.join(missing)} still run {EXIT_SECONDS:.0f} s after the run had finished and "
                           f"{', '.join(sorted(ended))} had ended: see {self._supervisor.log_path(missing[0])}")
        return not missing

    def _failed(self, ended: dict[str, int]) -> list[str]:
        # Read after the exit codes were: a rank first says that the run is finished, then ends.
        finished = self._store.get_state("learner_finished", False)
        return [name for name, code in ended.items()
                if (code or not finished or name not in self._workers) and name not in self._lost]

    def _failure(self, failed: list[str]) -> RunError:
        """The error for processes that ended. Where they blame an engine, it gets time to end and to say why itself."""
        deadline = time.monotonic() + ENGINE_END_SECONDS
        while not (engines := [name for name in failed if name in self._urls]):
            if not self._blame_an_engine(failed) or time.monotonic() > deadline:
                return self._supervisor.failure(failed)
            time.sleep(POLL_SECONDS)
            failed = self._failed(self._supervisor.poll())
        return self._supervisor.failure(failed, suspects=engines)

    def _blame_an_engine(self, failed: list[str]) -> bool:
        reasons = [last_words(self._supervisor.log_path(name))[0] for name in failed]
        return any(url in reason for url in self._urls.values() for reason in reasons)

    def _check_engines(self) -> None:
        for name, since in list(self._starting.items()):
            if name in self._lost or _is_healthy(self._urls[name]):
                del self._starting[name]
            elif time.monotonic() - since > self._config.engine.start_timeout:
                raise RunError(f"{name} at {self._urls[name]} is not healthy after "
                               f"{self._config.engine.start_timeout:.0f} s (engine.start_timeout): "
                               f"see {self._supervisor.log_path(name)}")

    def _show_steps(self) -> None:
        for row in self._store.steps(after=self._last_step):
            self._last_step, self._steps = row.step, self._steps + 1
            self._progress.step(self._steps, row.metrics)
        self._progress.flush(now=False)

    def _show_status(self) -> None:
        """Start-up stage by stage; later only where nothing else was shown for a while."""
        if self._store.published() is None:
            healthy = len(self._urls) - len(self._starting)
            self._progress.status(f"start-up: engines {healthy}/{len(self._urls)} ready, "
                                  f"learner {self._learner_stage()}")
        elif self._progress.quiet():
            self._progress.status(self._doing())

    def _learner_stage(self) -> str:
        warmup = self._store.get_state("warmup")
        if warmup is None:
            return "starting"
        if warmup["step"] < warmup["steps"]:
            return f"in warm-up step {warmup['step']}/{warmup['steps']}"
        return "publishes its first weights"

    def _doing(self) -> str:
        if self._store.get_state("learner_finished", False):
            return "learner finished; waiting for the controller (last evaluation)"
        ready, in_flight = self._store.counts()["ready"], self._store.get_state("in_flight", 0)
        return (f"step {self._steps + 1} under way: {ready} trajectories ready of {self._config.batch.trajectories}, "
                f"{in_flight} episodes in flight")


def _is_healthy(url: str) -> bool:
    """Whether GET /health says 200. Not by urllib, which would ask an HTTP proxy."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=0.5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
