"""FLOPs from a config against those that PyTorch counts in Transformers' own forward."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sao_megatron.telemetry import flops
from sao_megatron.weights import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from family_models import MODELS  # noqa: E402

N = 16


def counted(name: str) -> tuple[dict, int]:
    """(config.json, FLOPs of N tokens, of which all are predicted)."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode
    kind, fields = MODELS[name]
    config = getattr(transformers, kind + "Config")(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(N)[None])
    return config.to_dict(), counter.get_total_flops()


# If this fails, MFU is that of another model.
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "llama", "mixtral", "glm4_moe", "deepseek_v3"])
def test_forward(name):
    config, total = counted(name)
    model = flops.forward(hf.canonical(config))
    assert total == N * (model.token + model.head) + N * N * model.pair  # eager attention is not causal


# If this fails, a step's parts are counted twice or not at all, or long trajectories as if attention were linear.
def test_step():
    model = flops.Forward(token=10.0, pair=2.0, head=100.0)
    body = 10 * 7 + 2 * (3 * 4 / 2 + 4 * 5 / 2)
    assert model.of([3, 4], 0) == body
    assert flops.step(model, [3, 4], 5, 2, False, True) == 6 * body + 3 * (body + 500)
    assert flops.step(model, [3, 4], 5, 0, True, True) == 4 * (body + 500)
    assert flops.step(model, [3, 4], 5, 1, True, False) == 3 * body
    sparse = flops.Forward(token=0, pair=1.0, head=0, keys=2)
    assert sparse.of([4], 0) == 1 + 2 + 2 + 2


# If this fails, MFU on a common GPU is missing or that of another one.
def test_peaks():
    assert flops.peak("NVIDIA H100 80GB HBM3") == flops.peak("NVIDIA H200") == 989e12
    assert flops.peak("NVIDIA H100 PCIe") == 756e12 and flops.peak("NVIDIA H20") == 148e12
    assert flops.peak("Graphics 3000") is None
