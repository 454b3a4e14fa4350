"""What one process of a run does: engine, controller or learner rank. Each reads the run's folder and nothing else."""
from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from urllib.parse import urlsplit

from sao_megatron.child import end_with_parent
from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError, UserError
from sao_megatron.run_folder import RunFolder


def engine(run_dir: Path, index: int) -> None:
    """Become the SGLang server of engine `index` (does not return)."""
    folder = RunFolder(run_dir)
    config, urls = folder.config(), folder.engine_urls()
    if not 0 <= index < len(urls):
        raise UserError(f"--index {index}: {folder.engines_path} names {len(urls)} engines, so 0 to {len(urls) - 1}")
    from sao_megatron.device import has_gpu
    from sao_megatron.engine.process import engine_command, engine_environment
    gpu = has_gpu()
    command = engine_command(config, folder.model_dir(config), urlsplit(urls[index]).port, gpu)
    os.execvpe(command[0], command, os.environ | engine_environment(gpu, config.engine.tp))


def controller(run_dir: Path, index: int | None = None) -> None:
    """Run episodes until the learner has finished and the last evaluation is recorded.

    `index`: as this one of `rollout.controllers`; without, this process is number 0 and starts the others, so that all
    share its host and with it the store. When one fails, all end. Raises RunError.
    """
    folder = RunFolder(run_dir)
    config = folder.config()
    if index is not None and not 0 <= index < config.rollout.controllers:
        raise UserError(f"--index {index}: the run has rollout.controllers={config.rollout.controllers}, so 0 to "
                        f"{config.rollout.controllers - 1}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    command = [sys.executable, "-m", "sao_megatron.cli", "controller", str(run_dir), "--index"]
    others = [] if index is not None else [
        subprocess.Popen([*command, str(other)], preexec_fn=end_with_parent)
        for other in range(1, config.rollout.controllers)]
    from sao_megatron.trajectory.store import Store
    try:
        with Store(folder.store_path) as store:
            asyncio.run(_beside(others, _control(folder, config, store, index or 0)))
    finally:
        for other in others:
            other.terminate()
            other.wait()


async def _beside(others: list[subprocess.Popen], own: Coroutine) -> None:
    """Await `own` and the end of the other controllers; the first failure ends it."""
    working = asyncio.create_task(own)
    while not working.done() or any(other.poll() is None for other in others):
        if failed := [number for number, other in enumerate(others, 1) if other.poll()]:
            working.cancel()
            await asyncio.wait([working])
            raise RunError(f"controller {failed[0]} of {len(others) + 1} failed: its error is in this log")
        if working.done() and working.exception():
            break
        await asyncio.wait([working], timeout=0.5)
        if working.done():
            await asyncio.sleep(0.1)
    working.result()


async def _control(folder: RunFolder, config: RunConfig, store, index: int) -> None:
    from sao_megatron.engine.client import EngineClient
    from sao_megatron.rollout.controller import collect_rarely, run_controller
    from sao_megatron.rollout.engine_metrics import watch_engines
    from sao_megatron.rollout.evaluate import evaluation_sets
    # Read directly: weights.hf would import torch, which this process does without.
    vocab_size = json.loads((folder.model_dir(config) / "config.json").read_text())["vocab_size"]
    clients: dict[str, EngineClient] = {}

    def listed() -> list[EngineClient]:
        """Of the engines that engines.json names now."""
        urls = folder.engine_urls()
        for url in urls:
            if url not in clients:
                clients[url] = EngineClient(url, vocab_size, config.rollout.request_timeout)
        return [clients[url] for url in urls]

    looking: list[asyncio.Task] = []
    try:
        deadline = time.monotonic() + config.engine.start_timeout
        await _first(_healthy(client, deadline, config.engine.start_timeout) for client in listed())
        async with _sandbox(folder, config) as sandbox:
            task = _task(folder, config, sandbox)
            sets = evaluation_sets(config, task, folder.model_dir(config), sandbox)
            if index == 0:
                looking.append(asyncio.create_task(watch_engines(listed, store, folder.gpus_dir)))
            collect_rarely()
            await run_controller(config, task, store, listed(), index=index, sets=sets, find_clients=listed)
    finally:
        for watching in looking:
            watching.cancel()
        await asyncio.gather(*(client.close() for client in clients.values()))


async def _first(waits) -> None:
    """Until one engine is healthy (the pool finds out about the others). Raises RunError if none will be."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    for done in asyncio.as_completed(tasks):
        try:
            await done
            break
        except RunError:
            if all(task.done() for task in tasks):
                raise
    for task in tasks:
        task.cancel()


async def _healthy(client, deadline: float, timeout: float) -> None:
    while not await client.healthy():
        if time.monotonic() > deadline:
            raise RunError(f"engine {client.url} is not healthy after {timeout:.0f} s (engine.start_timeout): "
                           f"see its log")
        await asyncio.sleep(0.5)


def sandbox(run_dir: Path, index: int) -> None:
    """Be sandbox server `index` until told to end."""
    folder = RunFolder(run_dir)
    config, (urls, token) = folder.config(), folder.sandboxes()
    if not 0 <= index < len(urls):
        raise UserError(f"--index {index}: {folder.sandboxes_path} names {len(urls)} servers, so 0 to {len(urls) - 1}")
    from sao_megatron.sandbox.pool import Pool
    from sao_megatron.sandbox.server import serve
    url = urlsplit(urls[index])
    asyncio.run(serve(Pool.of(config.sandbox), token, url.hostname, url.port, config.sandbox.idle_timeout))


def _sandbox(folder: RunFolder, config: RunConfig):
    """Where a task's code runs: in this process's own sessions, or on the run's servers."""
    from sao_megatron.sandbox.client import RemoteSandbox
    from sao_megatron.sandbox.pool import Pool
    if not config.sandbox.servers:
        return Pool.of(config.sandbox)
    return RemoteSandbox(*folder.sandboxes(), config.sandbox.seconds, config.sandbox.patience)


def learner(run_dir: Path) -> None:
    """Train as the rank that RANK and WORLD_SIZE name."""
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"learner: {', '.join(missing)} not set in the environment: "
                        f"start the ranks with torchrun or srun")
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # hang.py asks for the stacks
    folder = RunFolder(run_dir)
    config = folder.config()
    from sao_megatron.learner import loop
    loop.main(config, folder.path, _task(folder, config))


def _task(folder: RunFolder, config: RunConfig, sandbox=None):
    from sao_megatron.rollout.tasks import load_task
    return load_task(config.task.name, config.task.options, folder.model_dir(config), sandbox)
