"""All processes on this machine: its GPUs are dealt out, and free ports found."""
from __future__ import annotations

import random
import socket
import sys
from dataclasses import replace
from itertools import islice
from urllib.parse import urlsplit

from sao_megatron.config import RunConfig
from sao_megatron.device import gpu_names, has_gpu
from sao_megatron.engine.process import FREE_PORTS, engine_command, engine_environment
from sao_megatron.errors import UserError
from sao_megatron.placement.plan import Plan, learner_environment
from sao_megatron.run_folder import RunFolder
from sao_megatron.supervisor import ProcessSpec


def local_plan(config: RunConfig, folder: RunFolder) -> Plan:
    """Raises UserError where GPUs or ports are missing."""
    devices = _devices(config) if has_gpu() else None
    urls = [] if config.mode == "replay" else [f"http://{config.engine.host}:{port}" for port in _engine_ports(config)]
    plan = _plan(config, folder, urls, devices)
    places = [] if config.mode == "replay" else _free_ports(
        config.sandbox.host, config.sandbox.servers, {urlsplit(url).port for url in urls})
    sandboxes = [ProcessSpec(f"sandbox-{i}", [sys.executable, "-m", "sao_megatron.cli", "sandbox", str(folder.path),
                                              "--index", str(i)]) for i in range(len(places))]
    return replace(plan, sandboxes=sandboxes, sandbox_urls=[f"http://{config.sandbox.host}:{port}" for port in places])


def _devices(config: RunConfig) -> list[str]:
    """The GPUs in use, as CUDA_VISIBLE_DEVICES names them: the learner's first, then each engine's."""
    devices = gpu_names()
    needed = learner_ranks(config) + (0 if config.mode == "replay" else config.engine.count * config.engine.tp)
    if len(devices) < needed:
        raise UserError(f"this machine has {len(devices)} GPUs, the recipe needs {needed} "
                        f"(parallel.ranks={config.parallel.ranks}, engine.count={config.engine.count} times "
                        f"engine.tp={config.engine.tp}): make one of them smaller")
    return devices


def learner_ranks(config: RunConfig) -> int:
    return 0 if config.mode == "rollout" else config.parallel.ranks


def _engine_ports(config: RunConfig) -> list[int]:
    host, first, count = config.engine.host, config.engine.port, config.engine.count
    if first == 0:
        return _free_ports(host, count)
    ports = list(range(first, first + count))
    for port in ports:
        if error := _cannot_bind(host, port):
            raise UserError(f"engine.port={first}: port {port} of {host} cannot be used ({error}): "
                            f"choose another, or 0 for free ones")
    return ports


def _free_ports(host: str, count: int, taken: set[int] = frozenset()) -> list[int]:
    free = (port for port in random.sample(FREE_PORTS, len(FREE_PORTS))
            if port not in taken and _cannot_bind(host, port) is None)
    ports = sorted(islice(free, count))
    if len(ports) < count:
        raise UserError(f"host={host}: {len(ports)} ports can be used, {count} are needed "
                        f"({_cannot_bind(host, FREE_PORTS[0])}): give an address of this machine (engine.host, "
                        "sandbox.host)")
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
    ranks, tp, gpu = learner_ranks(config), config.engine.tp, devices is not None
    common = {"PYTHONUNBUFFERED": "1"} | ({} if gpu else {"OMP_NUM_THREADS": "1"})
    cli = [sys.executable, "-m", "sao_megatron.cli"]

    def on(first: int, count: int) -> dict[str, str]:
        return common | ({"CUDA_VISIBLE_DEVICES": ",".join(devices[first:first + count])} if gpu else {})

    model_dir = folder.model_dir(config)
    engines = [ProcessSpec(f"engine-{i}", engine_command(config, model_dir, urlsplit(url).port, gpu),
                           engine_environment(gpu, tp) | on(ranks + i * tp, tp)) for i, url in enumerate(urls)]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared = on(0, ranks) | learner_environment(gpu) | group
    learners = [ProcessSpec(f"learner-{rank}", [*cli, "learner", str(folder.path)],
                            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    controller = None if config.mode == "replay" else ProcessSpec(
        "controller", [*cli, "controller", str(folder.path)], common)
    return Plan(engines, controller, learners, urls)
