"""One rank of test_head.py: the head on two vocabulary shards, and its weight gradient under Megatron's DDP."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from sao_megatron.learner import runtime
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from sao_megatron.algorithm.objective import NegativeLogLikelihood, PolicyGradient
from sao_megatron.config import ParallelSection
from sao_megatron.learner import model as models
from sao_megatron.learner.logprob import one_pass_head
from sao_megatron.learner.passes import policy_pass, to_device
from sao_megatron.trajectory.packing import micro_batches
from sao_megatron.weights import hf
from sao_megatron.weights.shards import ShardMap
from reference import make_trajectories

LAYOUTS = [dict(name="dp2"), dict(name="dp2, tied", tied=True), dict(name="pp2", pp=2),
           dict(name="pp2, tied", pp=2, tied=True), dict(name="pp2 vpp2", pp=2, vpp=2),
           dict(name="pp2 vpp2, tied", pp=2, vpp=2, tied=True), dict(name="tp2", tp=2)]


def head_on_shards() -> dict:
    """Largest differences from one process in float64; several chunks, with dropped tokens and an entropy bonus."""
    runtime.initialize(ParallelSection(ranks=2, tp=2), seed=0)
    group, n, vocab = ps.get_tensor_model_parallel_group(), 37, 60
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 12, generator=generator) for rows in (n, vocab))
    targets = torch.randint(vocab, (n,), generator=generator)
    advantages, noise = torch.randn(2, n, generator=generator)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    all_logprobs = torch.log_softmax(exact_hidden @ exact_weight.T / 0.8, -1)
    chosen = all_logprobs[torch.arange(n), targets]
    rollout = (chosen.detach() + noise).float()
    ratio = (chosen.detach() - rollout).exp()
    worst = {}
    for entropy_coef in (0.0, 0.05):
        coefficients = ratio * ((ratio > 0.7) & (ratio < 6.0)) * advantages
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        loss = -(coefficients * chosen).sum() - entropy_coef * entropy.sum()
        expected = torch.autograd.grad(loss, (exact_hidden, exact_weight), retain_graph=True)
        mine, shard = hidden.clone().requires_grad_(), weight.chunk(2)[group.rank()].clone().requires_grad_()
        output = one_pass_head(mine, shard, targets, PolicyGradient(rollout, advantages, entropy_coef=entropy_coef),
                               group, 0.8, logits_bytes=2 * 7 * len(shard) * 4)
        output.loss.backward()
        dist.all_reduce(mine.grad, group=group)
        logprobs = [torch.empty_like(output.logprobs) for _ in range(2)]
        dist.all_gather(logprobs, output.logprobs, group=group)
        worst |= {f"{name}, entropy {entropy_coef}": float((a - b).abs().max() / b.abs().max()) for name, a, b in [
            ("log-probs", output.logprobs, chosen.detach()), ("entropy", output.entropy, entropy.detach()),
            ("loss", output.loss.detach()[None], loss.detach()[None]), ("d hidden", mine.grad, expected[0]),
            ("d weight", shard.grad, expected[1].chunk(2)[group.rank()])]}
        worst[f"ranks differ, entropy {entropy_coef}"] = float(not torch.equal(*logprobs))
    return worst


def gradients(folder: Path, parallel: ParallelSection, tied: bool, grad_scale_func) -> list[dict[str, torch.Tensor]]:
    """Reduced gradients of two steps of two or more micro-batches; the reduction overlaps the backward (from the
    second step on, Megatron's first only learns the order)."""
    model_dir = folder / ("tied" if tied else "untied")
    hf_config = hf.read_config(model_dir)
    chunks = models.build(hf_config, parallel, torch.float32)
    ShardMap(chunks, hf_config).load(hf.SafetensorsFolder(model_dir))
    ddp = [DistributedDataParallel(chunk.config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True), chunk) for chunk in chunks]
    config = chunks[0].config
    config.grad_scale_func = grad_scale_func
    config.no_sync_func = ddp[0].no_sync if len(ddp) == 1 else [chunk.no_sync for chunk in ddp]
    batches = [to_device(batch) for batch in micro_batches(
        make_trajectories(9), ps.get_data_parallel_world_size(), ps.get_data_parallel_rank(), 60,
        multiple_of=parallel.tp, equal_length=not models.varies_in_length(parallel), count_multiple=parallel.pp)]
    assert len(batches) > 1
    steps = []
    for _ in range(2):
        for chunk in ddp:
            chunk.zero_grad_buffer()
        policy_pass(ddp, batches, [NegativeLogLikelihood()] * len(batches), 1.0, forward_only=True)
        added = any(p.main_grad.any() for chunk in ddp for p in chunk.parameters())
        assert not added, "a pass without gradient added to main_grad"
        policy_pass(ddp, batches, [NegativeLogLikelihood()] * len(batches), 1.0)
        steps.append({f"{number} {name}": p.main_grad.clone() for number, chunk in enumerate(chunks)
                      for name, p in chunk.named_parameters()})
    return steps


def into_main_grad_against_autograd(folder: Path, spec: dict) -> float:
    """Largest relative difference, over weights and steps, between the gradients of an unscaled loss, whose head adds
    to main_grad in the forward, and a quarter of those of a loss scaled by 4, whose head hands them to autograd."""
    tied = spec.pop("tied", False)
    parallel = ParallelSection(ranks=2, **spec)
    runtime.initialize(parallel, seed=0)
    direct = gradients(folder, parallel, tied, None)
    scaled = gradients(folder, parallel, tied, lambda loss: 4 * loss)
    return max(float((a - scaled_step[name] / 4).norm() / a.norm())
               for step, scaled_step in zip(direct, scaled, strict=True) for name, a in step.items())


def main(folder: Path) -> None:
    results = {"shards": head_on_shards()}
    for spec in LAYOUTS:
        mine = into_main_grad_against_autograd(folder, {k: v for k, v in spec.items() if k != "name"})
        worst: list = [None, None]
        dist.all_gather_object(worst, mine)
        results[spec["name"]] = float(np.max(worst))
    if dist.get_rank() == 0:
        (folder / "head.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
