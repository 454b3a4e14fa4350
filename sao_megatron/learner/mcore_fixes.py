"""Corrections of Megatron-Core 0.19.2 that matter on every device. Each names the upstream fault."""
from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.managers import SyncManager

import torch

from sao_megatron.child import end_with_parent


def install() -> None:
    """Apply the corrections. Call once, after megatron.core can be imported."""
    _fix_adam_step()
    _end_the_results_queue_with_its_rank()


def _fix_adam_step() -> None:
    """Without TransformerEngine's FusedAdam, DistributedOptimizer uses torch.optim.AdamW, which keeps a `step` tensor
    per parameter. Upstream's loader looks for it among tensors it never saved (KeyError 'step') and then gives all
    parameters one shared tensor, which each of them advances (silent drift of the bias correction). And its
    `state_dict` fails on an optimizer that has made no step yet, which is every optimizer that is to be loaded.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load, save = DistributedOptimizer.load_state_dict, DistributedOptimizer.state_dict

    @torch.no_grad()
    def set_states_with_step(self, param, tensors):
        return set_states(self, param, {"step": None, **tensors})

    def load_with_own_steps(self, state_dict):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def save_with_state(self):
        if isinstance(self.optimizer, torch.optim.AdamW):
            for parameter in [p for group in self.optimizer.param_groups for p in group["params"]]:
                if not self.optimizer.state[parameter]:  # what AdamW's first step would begin with
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **{
                        key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}}
        return save(self)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    DistributedOptimizer.state_dict = save_with_state
    DistributedOptimizer.load_state_dict = load_with_own_steps


def _end_the_results_queue_with_its_rank() -> None:
    """Saving a checkpoint starts a process that holds a queue (dist_checkpointing/strategies/filesystem_async.py), and
    upstream's outlives a rank that is killed, for ever.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def get_write_results_queue(mp_mode: str = "spawn"):
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(end_with_parent)
            filesystem_async._results_queue = manager.Queue()
            filesystem_async._results_queue.manager = manager  # it ends when nobody refers to it
        return filesystem_async._results_queue

    filesystem_async.get_write_results_queue = get_write_results_queue
