"""Tiny random HF models, one for each family and variant, and what they compute: run in a process without Megatron.

    python family_models.py FOLDER [NAME …]    # FOLDER/NAME/ and FOLDER/NAME.npz

FOLDER/NAME.npz holds logits, log-probs and gradients of the mean NLL of the trajectories in FOLDER/trajectories.pkl.
"""
from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from reference import hf_gradients, hf_logits, hf_logprobs, make_trajectories

from sao_megatron.trajectory.types import Trajectory

COMMON = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
              initializer_range=0.1, max_position_embeddings=512, pad_token_id=None)
GQA = COMMON | dict(num_key_value_heads=2, head_dim=16)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
SIGMOID = EXPERTS | dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
                         n_group=1, topk_group=1)
MLA = COMMON | SIGMOID | dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16,
                              qk_rope_head_dim=8, v_head_dim=12)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=0.5)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
MODELS = {
    "qwen2": ("Qwen2", COMMON | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", GQA),
    "qwen3_moe": ("Qwen3Moe", GQA | EXPERTS | dict(num_experts=8, norm_topk_prob=False)),
    "llama": ("Llama", GQA | dict(rope_parameters=LLAMA3)),
    "mixtral": ("Mixtral", COMMON | dict(num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4Moe", GQA | SIGMOID | dict(
        attention_bias=True, use_qk_norm=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "deepseek_v3": ("DeepseekV3", MLA | dict(
        n_group=4, topk_group=2, num_experts_per_tok=4, n_shared_experts=2, rope_parameters=YARN)),
    "kimi_k2": ("DeepseekV3", MLA | dict(rope_parameters=YARN | dict(beta_fast=1.0, mscale_all_dim=1.0))),
    # few indexer heads would all be cut to 0 by their ReLU here and there, and two such keys tie
    "glm5": ("GlmMoeDsa", MLA | dict(index_topk=6, index_n_heads=32, index_head_dim=16, rms_norm_eps=1e-6)),
    "glm5_2": ("GlmMoeDsa", MLA | dict(
        index_topk_freq=2, index_skip_topk_offset=1,
        index_topk=6, index_n_heads=32, index_head_dim=16, rms_norm_eps=1e-6)),
}
WITH_EXPERTS = [name for name, (_, fields) in MODELS.items() if "num_experts_per_tok" in fields]


def trajectories() -> list[Trajectory]:
    return make_trajectories(6, seed=7)


def make(name: str, folder: Path):
    """Save the model; returns it in float64 with the same weights. Norms, biases and corrections are random too."""
    import transformers
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**fields)).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or "bias" in key:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif key.endswith("gate.weight"):
                tensor.normal_(0, 0.3)
    model.float().save_pretrained(folder / name)
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    return model.double()


def saved_name(kind: str, name: str) -> str:
    """Mixtral's files keep older names than its modules."""
    if kind == "Mixtral":
        for new, old in ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(new, old)
    return name


def main(folder: Path, names: list[str]) -> None:
    (folder / "trajectories.pkl").write_bytes(pickle.dumps(trajectories()))
    for name in names or MODELS:
        model = make(name, folder)
        logprobs = [hf_logprobs(model, trajectory) for trajectory in trajectories()]
        torch.cat(logprobs).mean().neg().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None or ".indexer." in key, (name, key)
        arrays = {f"logprobs/{index}": part.detach().numpy() for index, part in enumerate(logprobs)}
        arrays |= {f"gradient/{saved_name(MODELS[name][0], k)}": v for k, v in hf_gradients(model).items()}
        arrays |= {f"logits/{index}": hf_logits(model, t) for index, t in enumerate(trajectories())}
        np.savez(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
