"""What depends on the device: NCCL and TransformerEngine where there is a GPU, Gloo and plain torch where not.

Import this before anything of Megatron-Core: without a GPU it first makes Megatron run on the CPU.
"""
from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from sao_megatron.config import ParallelSection
from sao_megatron.device import has_gpu


if not has_gpu():
    from sao_megatron.learner import mcore_cpu
    # Megatron warns about each missing GPU library; that is this machine's normal state.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    mcore_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from sao_megatron.learner import mcore_fixes  # noqa: E402

mcore_fixes.install()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def gpu() -> tuple[str, str] | None:
    """(UUID as NVIDIA's tools write it, name) of this rank's GPU; None without one."""
    if not has_gpu():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}", properties.name


def backend() -> str:
    """torch.distributed backend of collectives, and of weight publication."""
    return "nccl" if has_gpu() else "gloo"


def initialize(parallel: ParallelSection, seed: int, timeout_seconds: float = 600.0) -> None:
    """Join the process group (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from the environment) and lay out the ranks.

    May be called again with another layout of the same ranks. Collectives fail after `timeout_seconds`.
    """
    if has_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if not dist.is_initialized():
        dist.init_process_group(backend(), timeout=timedelta(seconds=timeout_seconds))
    if dist.get_world_size() != parallel.ranks:
        raise ValueError(f"parallel.ranks is {parallel.ranks} but {dist.get_world_size()} ranks were started")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp, pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False, distributed_timeout_minutes=max(1, int(timeout_seconds / 60)))
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)


def block_spec(config, chunk: int | None):
    """Transformer layer spec: TransformerEngine's on a GPU, the plain-torch one (learner/torch_spec.py) without.
    `chunk`: which of this rank's, in a virtual pipeline."""
    if has_gpu() and config.experimental_attention_variant:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec,
        )
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=chunk)
    if has_gpu():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
    from sao_megatron.learner import torch_spec
    return torch_spec.block_spec(config, chunk)


def fused_kernels() -> dict:
    """TransformerConfig fields that choose GPU kernels."""
    gpu = has_gpu()
    return dict(apply_rope_fusion=gpu, moe_grouped_gemm=gpu, moe_permute_fusion=gpu, bias_dropout_fusion=gpu,
                masked_softmax_fusion=gpu, persist_layer_norm=gpu, bias_activation_fusion=False,
                gradient_accumulation_fusion=False)
