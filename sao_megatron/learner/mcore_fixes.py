"""Corrections of Megatron-Core 0.19.2 that matter on every device. Each names the upstream fault."""
from __future__ import annotations

import torch


def install() -> None:
    """Apply the corrections. Call once, after megatron.core can be imported."""
    _fix_adam_step_on_load()


def _fix_adam_step_on_load() -> None:
    """Without TransformerEngine's FusedAdam, DistributedOptimizer uses torch.optim.AdamW, which keeps a `step` tensor
    per parameter. Upstream's loader looks for it among tensors it never saved (KeyError 'step') and then gives all
    parameters one shared tensor, which each of them advances (silent drift of the bias correction).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    @torch.no_grad()
    def set_states_with_step(self, param, tensors):
        return set_states(self, param, {"step": None, **tensors})

    def load_with_own_steps(self, state_dict):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps
