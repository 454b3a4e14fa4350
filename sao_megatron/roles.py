"""What one process of a run does: engine, controller or learner rank. Each reads the run's folder and nothing else."""
from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

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


def controller(run_dir: Path) -> None:
    """Run episodes until the learner has finished and the last evaluation is recorded."""
    folder = RunFolder(run_dir)
    config = folder.config()
    from sao_megatron.trajectory.store import Store
    with Store(folder.store_path) as store:
        asyncio.run(_control(folder, config, store))


async def _control(folder: RunFolder, config: RunConfig, store) -> None:
    from sao_megatron.engine.client import EngineClient
    from sao_megatron.rollout.controller import run_controller
    from sao_megatron.rollout.engine_metrics import watch_engines
    # Read directly: weights.hf would import torch, which this process does without.
    vocab_size = json.loads((folder.model_dir(config) / "config.json").read_text())["vocab_size"]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(url, vocab_size, config.rollout.request_timeout))
                   for url in folder.engine_urls()]
        deadline = time.monotonic() + config.engine.start_timeout
        await _first(_healthy(client, deadline, config.engine.start_timeout) for client in clients)
        looking = asyncio.create_task(watch_engines(clients, store))
        stack.callback(looking.cancel)
        await run_controller(config, _task(folder, config), store, clients)


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


def _task(folder: RunFolder, config: RunConfig):
    from sao_megatron.rollout.tasks import load_task
    return load_task(config.task.name, config.task.options, folder.model_dir(config))
