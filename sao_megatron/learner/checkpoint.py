"""Checkpoints of the learner: everything that trains, saved and loaded by all ranks with Megatron-Core's own format.

Weights and optimizers of policy and critic, DPO's reference, schedules, running means and the random states of every
rank: a learner that loads them goes on bit for bit as if it had not stopped, where the arithmetic is deterministic.
Trajectories are no part of it: the store keeps them, and `Store.rewind` fits it to any checkpoint.

The files are written by a forked copy of each rank, which holds the weights as they were at the fork, while the rank
trains on. When all copies have ended well, `advance` makes the folder a checkpoint (checkpoints.py).
"""
from __future__ import annotations

import logging
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from sao_megatron.learner import integrity, runtime
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling

from sao_megatron.checkpoints import Checkpoint, CheckpointFolder, keeps_optimizer
from sao_megatron.config import ParallelSection
from sao_megatron.errors import UserError
from sao_megatron.learner.optimized import Optimized
from sao_megatron.learner.trainer import Trainer
from sao_megatron.weights import hf
from sao_megatron.weights.maths import differences

log = logging.getLogger("checkpoint")


class Saver:
    """Saves one checkpoint at a time. Collective: every rank calls the same methods at the same step."""

    def __init__(self, trainer: Trainer, folder: CheckpointFolder, generation: int, newest: int = -1):
        """`newest`: learner steps in the checkpoint that the learner goes on from."""
        self.trainer, self.folder, self.generation = trainer, folder, generation
        self.section = trainer.config.checkpoint
        self._pending: _Pending | None = None
        self.newest = newest
        """Learner steps in the last checkpoint that was begun; -1 once it has failed."""

    def save(self, step: int, updates: int) -> None:
        """Begin to save the weights after `step` learner steps; waits for the one before to be complete."""
        self.finish()
        path: list = [self.folder.begin(step, self.generation) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(path, src=0)
        request = dist_checkpointing.save(sharded_state(self.trainer), str(path[0]), async_sharded_save=True,
                                          async_strategy="mcore")
        self.newest = step
        self._pending = _Pending(request, path[0], description(self.trainer, step, updates))

    def advance(self) -> None:
        """Complete the checkpoint whose files are written, if there is one."""
        if self._pending and self._pending.written():
            self._complete()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        while self._pending and not self._pending.written():
            time.sleep(0.02)
        self._complete()

    def _complete(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        faults = pending.faults()
        if faults:
            pending.forget_results()
        else:
            try:
                for function in pending.request.finalize_fns:
                    function()
            except CheckpointException as error:  # on every rank alike: a writer ended well, but could not write
                faults = [str(error).strip().splitlines()[-1]]
        if faults:
            log.warning("checkpoint of step %d was not saved (%s); the next one will be", pending.state["step"],
                        ", ".join(faults))
            self.newest = -1
            if dist.get_rank() == 0:
                self.folder.discard(pending.path)
            return
        if dist.get_rank() == 0:
            checksum = {integrity.CHECKSUM: integrity.metadata_checksum(pending.path)}
            self.folder.finish(pending.path, pending.state | checksum, self.section.keep)
            log.info("checkpoint of step %d saved in %.1f s", pending.state["step"], time.monotonic() - pending.began)


class _Pending:
    """A checkpoint whose files a copy of this process is writing."""

    def __init__(self, request: AsyncRequest, path: Path, state: dict):
        self.request, self.path, self.state = request, path, state
        self.began = time.monotonic()
        self._writer = self._results = None
        if request.async_fn is not None:
            rank, _, self._results = request.async_fn_args
            staged = request.preload_fn()  # from the GPU to host memory
            self._writer = multiprocessing.get_context("fork").Process(
                target=request.async_fn, args=(rank, staged, self._results), name=f"writer of {path.name}")
            self._writer.start()

    def written(self) -> bool:
        """Whether the writers of all ranks have ended."""
        running = self._writer is not None and self._writer.is_alive()
        count = torch.tensor([int(running)], device=runtime.device())
        dist.all_reduce(count)
        return not int(count)

    def faults(self) -> list[str]:
        """What went wrong in the writers, which have ended, of any rank."""
        code = self._writer.exitcode if self._writer else 0
        codes: list = [None] * dist.get_world_size()
        dist.all_gather_object(codes, code)
        return [f"the writer of rank {rank} ended with exit code {code}" for rank, code in enumerate(codes) if code]

    def forget_results(self) -> None:
        """Else the next checkpoint would take what this writer reported, which lies in a queue, for its own."""
        while self._results is not None and not self._results.empty():
            self._results.get()


def load(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Fill a trainer that has begun reinforcement (its weights may be unset). Collective. Raises UserError for data
    that are damaged."""
    state = checkpoint.state()
    if other := differences(hf.canonical(state["hf_config"]), trainer.hf_config):
        raise UserError(f"{checkpoint.path} is of another model than model.path now holds ({', '.join(other)}): bring "
                        f"back the config.json that the run was started with")
    integrity.check(checkpoint.path, share=dist.get_rank(), shares=dist.get_world_size())
    now = trainer.config.parallel
    same_layout = ParallelSection.model_validate(state["parallel"] | {"recompute": now.recompute}) == now
    with_optimizers = keeps_optimizer(state, trainer.config)
    wanted = sharded_state(trainer, loading=True, optimizers=with_optimizers)
    if not same_layout:
        del wanted["rng"]  # other ranks than before: theirs would mean nothing; nothing that trains draws from it
    loaded = dist_checkpointing.load(wanted, str(checkpoint.path), strict=StrictHandling.RAISE_UNEXPECTED)
    for name, chunks in _models(trainer).items():
        for number, chunk in enumerate(chunks):
            _load_chunk(chunk, loaded[name][str(number)])
    for name, optimized in _optimized(trainer).items():
        if with_optimizers:
            optimized.optimizer.load_state_dict(loaded[f"{name}_optimizer"])
        else:
            optimized.optimizer.reload_model_params()
        optimized.go_on_from(state["schedules"][name])
    if not with_optimizers:
        log.warning("another expert layout than the checkpoint's: the optimizers begin anew, without momentum")
    trainer.running_mean.load_state_dict(state["running_mean"])
    if same_layout:
        _set_random_state(loaded["rng"])


def description(trainer: Trainer, step: int, updates: int) -> dict:
    """What state.json says."""
    return {"step": step, "updates": updates, "parallel": trainer.config.parallel.model_dump(),
            "parts": list(_models(trainer)), "running_mean": trainer.running_mean.state_dict(),
            "schedules": {name: part.scheduler.num_steps for name, part in _optimized(trainer).items()},
            "hf_config": trainer.hf_config, "config": trainer.config.model_dump(mode="json"), "written": time.time()}


def _optimized(trainer: Trainer) -> dict[str, Optimized]:
    return {"policy": trainer.policy} | ({"critic": trainer.critic.model} if trainer.critic else {})


def _models(trainer: Trainer) -> dict[str, list[torch.nn.Module]]:
    """Each part's chunks on this rank."""
    found = {"policy": trainer.policy_chunks}
    if trainer.critic:
        found["critic"] = trainer.critic.chunks
    return found | ({"reference": trainer.reference} if trainer.reference else {})


def sharded_state(trainer: Trainer, loading: bool = False, optimizers: bool = True) -> dict:
    """Megatron-Core's sharded state dict of all that trains: one entry and one key prefix per part."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient":
                False, "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state = {name: {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
             for name, chunks in _models(trainer).items()}
    if optimizers:
        state |= {f"{name}_optimizer": part.optimizer.sharded_state_dict(state[name], is_loading=loading,
                                                                         metadata=metadata)
                  for name, part in _optimized(trainer).items()}
    for name, part in state.items():
        add_prefix_for_sharding(part, f"{name}.")
    return state | {"rng": ShardedObject("rng", _random_state(), (dist.get_world_size(),), (dist.get_rank(),))}


def _load_chunk(chunk: torch.nn.Module, state: dict) -> None:
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    wrong = [name for name in (*missing, *unexpected) if not name.endswith("_extra_state")]
    if wrong:
        raise ValueError(f"the checkpoint and the model differ in {wrong[:3]}")


def _random_state() -> dict:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}


def _set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
