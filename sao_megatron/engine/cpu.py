"""SGLang's server on a machine without a GPU: `python -m sao_megatron.engine.cpu <arguments of sglang.launch_server>`.

SGLang 0.5.23 can compute on a CPU, but its imports assume packages that a plain CPU install lacks. Before
SGLang is imported this module puts empty stand-ins in their place (only where the real package is missing),
and afterwards it replaces hard-wired choices. Nothing that computes is changed. The upstream gaps are named at
the functions that fill them.
"""
from __future__ import annotations

import enum
import multiprocessing
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _stand_in(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _stand_in_torchvision() -> None:
    """Upstream gap: `sglang.srt.configs` imports the vision models' configs, which import torchvision.transforms at
    module level, for every model. Text models never call it."""
    if find_spec("torchvision") is not None:
        return
    # transformers caches whether torchvision exists; ask before the stand-in does, so that it never uses it.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    interpolation = enum.Enum("InterpolationMode", ["NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"])
    _stand_in("torchvision", __version__="0.0.0")
    _stand_in("torchvision.io", decode_jpeg=None)
    _stand_in("torchvision.transforms", InterpolationMode=interpolation)
    _stand_in("torchvision.transforms.functional", InterpolationMode=interpolation)


def _stand_in_sgl_kernel() -> None:
    """Upstream gap: on a CPU several modules import names from sgl_kernel at module level (first
    `sglang.kernels.ops.kvcache.cache_move`), though only AMX and speculative decoding call them. Calling one here
    raises NotImplementedError."""
    if find_spec("sgl_kernel") is not None:
        return

    def kernel(name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args, **_kwargs):
            raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

        return missing

    _stand_in("sgl_kernel", __getattr__=kernel)


def _start_children_by_fork() -> None:
    """Upstream gap: `sglang.srt.entrypoints.engine` forces the start method "spawn". A spawned scheduler would import
    torch and SGLang again, without the stand-ins; without CUDA a fork is safe and starts at once."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda _method, force=False: set_start_method("fork", force=True)
    # What the children need is imported once, before the fork.
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def _keep_routed_experts_in_plain_memory() -> None:
    """Upstream gap: what --enable-return-routed-experts keeps on the host is always registered with the CUDA driver
    (`sglang.srt.mem_cache.pool_host.common`), on a CPU too."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)


def _attend_to_latents() -> None:
    """Upstream gap: torch_native has no handler for multi-latent attention and gets triton's, which expands a prompt's
    latents into keys and values (`sglang.srt.models.deepseek_common.attention_backend_handler`). But torch_native takes
    keys and values from the cache, where the latents are. So it attends to the latents in prompts as in decoding."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)


def prepare() -> None:
    """Import SGLang so that it runs here."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Upstream gap: with tp > 1 SGLang opens NCCL wherever its library is installed, GPU or not, and fails on device
    # "cpu"; where the library cannot be loaded it goes without.
    os.environ["SGLANG_NCCL_SO_PATH"] = "none: this machine computes on its CPU"
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sao_megatron.engine.families")
    _stand_in_torchvision()
    _stand_in_sgl_kernel()
    import sglang.launch_server  # noqa: F401
    _keep_routed_experts_in_plain_memory()
    _start_children_by_fork()
    _attend_to_latents()


def serve(arguments: list[str]) -> None:
    """Serve until terminated; `arguments` are those of `sglang.launch_server`."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    prepare()
    serve(sys.argv[1:])
