"""Lets Megatron-Core 0.19 run on a machine with no GPU: its "current CUDA device" becomes the CPU.

Megatron-Core has no CPU path: it allocates on "cuda", asks for CUDA streams and sorts parameters by
`torch.cuda.*Tensor` names. `install()` redirects those requests, process-wide. It must run before Megatron is
imported; `learner/runtime.py` calls it only where there is no GPU. `torch.cuda.is_available()` stays false.
Everything here is about the missing device; faults of Megatron-Core that exist on GPUs too are in mcore_fixes.py.
"""
from __future__ import annotations

import contextlib
import functools
import os

import torch

from sao_megatron.trajectory.packing import zigzag_rows

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint",
              "zeros_like", "ones_like", "empty_like")


class _Stream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: work on the CPU is already in order."""

    def __init__(self, *args, **kwargs): ...

    def record_event(self, event=None):
        return event or self

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def _nothing(self, *args, **kwargs): ...

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _on_cpu(factory):
    @functools.wraps(factory)
    def call(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)
    return call


@contextlib.contextmanager
def _cuda_type_names():
    """Inside, a CPU tensor's type() reads like a CUDA one's: Megatron's optimizers sort parameters by that name."""
    original = torch.Tensor.type

    def named(tensor, *args, **kwargs):
        result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result
    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original


def _with_cuda_type_names(owner, name):
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _cuda_type_names():
            return function(*args, **kwargs)
    setattr(owner, name, call)


def install() -> None:
    """Redirect device requests to the CPU. Call once, before megatron.core is imported."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile: minutes on a CPU
    _redirect_torch()
    _redirect_megatron()


def _redirect_torch() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    stream = _Stream()
    cuda = torch.cuda
    cuda.Stream = cuda.Event = _Stream
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed

    # Gloo gathers only equal shapes; the all-to-all dispatcher with expert tensor parallelism needs unequal ones.
    gather = torch.distributed.all_gather

    def all_gather(outputs, tensor, group=None, async_op=False):
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, tensor, group=group, async_op=async_op)
        for source, output in enumerate(outputs):
            if source == torch.distributed.get_rank(group):
                output.copy_(tensor)
            torch.distributed.broadcast(output, group=group, group_src=source)
    torch.distributed.all_gather = all_gather


def _redirect_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # The all-to-all dispatcher turns its split sizes into numpy only where they lie on a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = (
        lambda tensor, as_numpy=False, record_stream=False:
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor)
    _with_cuda_type_names(optimizer.Float16OptimizerWithFloat16Params, "__init__")
    _with_cuda_type_names(distrib_optimizer.DistributedOptimizer, "__init__")
    _with_cuda_type_names(optimizer, "clip_grad_by_total_norm_fp32")
    # The unfused RoPE for packed sequences loops over them in Python (rope_utils.py:256); a GPU uses the fused one.
    rope_utils._apply_rotary_pos_emb_thd = _packed_rope


def _packed_rope(t, cu_seqlens, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0,
                 cp_group=None, **_):
    """RoPE on this rank's part [t/cp, heads, d] of packed sequences: each token takes the frequencies of its position.

    `cu_seqlens` are those of the whole sequences.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    positions = _packed_positions(cu_seqlens, cp_group.size(), cp_group.rank())
    return _apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], rotary_interleaved=rotary_interleaved,
                                      mla_rotary_interleaved=mla_rotary_interleaved, mscale=mscale).squeeze(1)


@functools.lru_cache(maxsize=4)  # by the tensor's identity: every layer of a pass asks twice with the same one
def _packed_positions(cu_seqlens, cp_size: int, cp_rank: int) -> torch.Tensor:
    """[t/cp]: the position in its sequence of each of this rank's tokens."""
    positions = torch.arange(cu_seqlens[-1]) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    return positions[torch.from_numpy(zigzag_rows(cu_seqlens.numpy(), cp_size, cp_rank))]
