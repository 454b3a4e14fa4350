"""What the distributed tests compare with: HF Transformers in float64 and a loss written out naively."""
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder

EPS_LOW, EPS_HIGH = 0.3, 5.0


def make_model(folder: Path, tied: bool = False, layers: int = 2, seed: int = 0, **sizes):
    """A tiny random Qwen3-MoE saved as an HF folder; returns it in float64 with the same weights. `sizes`: fields of
    its config."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**dict(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=tied, initializer_range=0.05, max_position_embeddings=512) | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.float().save_pretrained(folder)
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    return model.double()


def make_trajectories(count: int, seed: int = 0, vocab_size: int = 64) -> list[Trajectory]:
    """Random multi-turn trajectories of very different lengths; some end with an observation, some are truncated, and
    in some every second turn has a rewritten context: they are several segments."""
    rng, version_rng, context_rng = (np.random.default_rng(s) for s in (seed, [seed, 1], [seed, 2]))
    result = []
    for index in range(count):
        builder = TrajectoryBuilder(rng.integers(0, vocab_size, rng.integers(1, 6)).tolist(), f"p{index}", "random")
        for turn in range(rng.integers(1, 5)):
            if index % 4 == 2 and turn % 2:
                context = context_rng.integers(0, vocab_size, context_rng.integers(1, 9))
                builder.add_segment(TrajectoryBuilder(context.tolist(), "", ""))
            length = int(rng.integers(1, 9))
            versions = version_rng.integers(0, 2, length).tolist()
            builder.add_action(rng.integers(0, vocab_size, length).tolist(), [-4.0] * length, versions)
            builder.add_observation(rng.integers(0, vocab_size, rng.integers(0, 4)).tolist())
        builder.add_reward(float(rng.integers(0, 2)))
        result.append(builder.build(Status.TRUNCATED if index % 4 == 3 else Status.COMPLETED))
    return result


def make_lone_trajectory() -> list[Trajectory]:
    """One trajectory of 8 tokens whose action tokens are predicted at 0, 1 and 6: of two context parallel ranks the
    first predicts them all, and of two data parallel ranks one has nothing to do."""
    builder = TrajectoryBuilder([5], "lone", "random")
    builder.add_action([7, 9], [-4.0] * 2, [0] * 2)
    builder.add_observation([11, 13, 17, 19])
    builder.add_action([23], [-4.0], [0])
    builder.add_reward(0.7)
    return [builder.build()]


def by_segment(trajectory: Trajectory) -> list[tuple[torch.Tensor, np.ndarray]]:
    """(tokens int64, action mask) of each segment: a sequence of its own."""
    tokens, mask = (np.split(array, trajectory.segments[1:]) for array in (trajectory.tokens, trajectory.action_mask))
    return [(torch.from_numpy(ids.astype(np.int64)), acts) for ids, acts in zip(tokens, mask, strict=True)]


def hf_logits(model, trajectory: Trajectory) -> np.ndarray:
    """[T, vocabulary] of all its tokens, each segment by itself."""
    with torch.no_grad():
        return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens, _ in by_segment(trajectory)]).numpy()


def hf_logprobs(model, trajectory: Trajectory) -> torch.Tensor:
    """log π of the action tokens, by a full log-softmax, with gradient; each segment by itself."""
    parts = []
    for tokens, mask in by_segment(trajectory):
        logits = model(input_ids=tokens[None]).logits[0]
        at = torch.from_numpy(np.flatnonzero(mask))
        parts.append(torch.log_softmax(logits[at - 1], -1).gather(1, tokens[at, None])[:, 0])
    return torch.cat(parts)


def set_rollout_logprobs(model, trajectories: list[Trajectory], seed: int = 1) -> None:
    """Rollout log-probs around the model's own, so that ratios fall below, inside and above the band."""
    rng = np.random.default_rng(seed)
    for trajectory in trajectories:
        with torch.no_grad():
            own = hf_logprobs(model, trajectory).numpy()
        trajectory.rollout_logprobs[trajectory.action_mask] = np.minimum(own - rng.normal(0.3, 1.0, len(own)), -1e-3)


def drop_all(model, trajectories: list[Trajectory]) -> None:
    """Rollout log-probs with which every ratio is above the band."""
    for trajectory in trajectories:
        with torch.no_grad():
            own = hf_logprobs(model, trajectory).numpy()
        trajectory.rollout_logprobs[trajectory.action_mask] = own - 3.0


def naive_policy_loss(model, trajectories: list[Trajectory], advantages: list[np.ndarray]) -> torch.Tensor:
    """L = −(1/N) Σ sg[f(r)·Â]·log π, straight from ALGORITHM.md §1."""
    loss, count = torch.zeros((), dtype=torch.float64), sum(t.num_actions for t in trajectories)
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        logprobs = hf_logprobs(model, trajectory)
        rollout = torch.from_numpy(trajectory.rollout_logprobs[trajectory.action_mask].astype(np.float64))
        ratio = (logprobs.detach() - rollout).exp()
        kept = (ratio > 1 - EPS_LOW) & (ratio < 1 + EPS_HIGH)
        loss = loss - (ratio * kept * torch.from_numpy(advantage) * logprobs).sum() / count
    return loss


def hf_gradients(model) -> dict[str, np.ndarray]:
    """Gradients under per-expert HF checkpoint names (transformers 5 fuses the experts)."""
    result = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                for half, part in zip(("gate", "up"), np.split(both, 2), strict=True):
                    result[name.replace("gate_up_proj", f"{expert}.{half}_proj.weight")] = part
        elif name.endswith("experts.down_proj"):
            result |= {name.replace("down_proj", f"{expert}.down_proj.weight"): g for expert, g in enumerate(gradient)}
        else:
            result[name] = gradient
    return result


def fate_counts(logprobs: list[np.ndarray], trajectories: list[Trajectory]) -> tuple[int, int]:
    """(dropped low, dropped high) in plain NumPy."""
    low = high = 0
    for own, trajectory in zip(logprobs, trajectories, strict=True):
        log_ratio = own - trajectory.rollout_logprobs[trajectory.action_mask]
        low += int((log_ratio <= math.log(1 - EPS_LOW)).sum())
        high += int((log_ratio >= math.log(1 + EPS_HIGH)).sum())
    return low, high
