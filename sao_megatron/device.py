"""Whether this machine has GPUs, and which: for those who must know before (or without) Megatron-Core is imported."""
from __future__ import annotations

import os


def has_gpu() -> bool:
    import torch
    return torch.cuda.is_available()


def gpu_names() -> list[str]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    import torch
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
