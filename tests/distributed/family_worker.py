"""One rank of test_families.py: every family under several layouts, against what HF computed; written by rank 0."""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sao_megatron.learner import runtime
from family_models import trajectories
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from sao_megatron import config as configs
from sao_megatron.algorithm.objective import NegativeLogLikelihood
from sao_megatron.learner import model as models
from sao_megatron.learner.passes import policy_pass, to_device
from sao_megatron.trajectory.packing import micro_batches
from sao_megatron.weights import hf, value_head
from sao_megatron.weights.shards import Parameter, ShardMap


def on_rank_zero(part: dict) -> dict:
    """What all ranks have, merged."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {key: value for other in parts for key, value in other.items()}


def export(shards: ShardMap) -> dict[str, torch.Tensor]:
    return on_rank_zero({name: t.clone() for owner in shards.owners() for name, t in shards.export(owner)})


def train_pass(module, parallel) -> dict[str, np.ndarray]:
    """Log-probs by trajectory number; gradients of the mean NLL are left in main_grad."""
    everything = trajectories()
    index = {t.tokens.tobytes(): number for number, t in enumerate(everything)}
    ddp = DistributedDataParallel(module.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    ddp.zero_grad_buffer()
    batches = [to_device(batch) for batch in micro_batches(
        everything, ps.get_data_parallel_world_size(), ps.get_data_parallel_rank(), 60,
        multiple_of=parallel.packed_multiple, equal_length=not models.varies_in_length(parallel),
        sequence_multiple=parallel.sequence_multiple)]
    outputs = policy_pass(ddp, batches, [NegativeLogLikelihood()] * len(batches), 1.0)
    found = {}
    for batch, output in zip(batches, outputs, strict=False):
        parts = batch.whole(output.logprobs).split(batch.lengths.tolist())
        found |= {index[t.tokens.tobytes()]: p.numpy() for t, p in zip(batch.source.trajectories, parts, strict=True)}
    return on_rank_zero(found)


def critic_of(hf_config: dict, parallel, policy) -> dict:
    """A critic from the policy's weights, with its attention frozen."""
    critic = models.build(hf_config, parallel, torch.float32, value_outputs=1)
    models.start_from_policy(critic, policy)
    models.freeze_attention(critic)
    ShardMap(critic, hf_config, rules=value_head.RULES)
    trains = {name: parameter.requires_grad for name, parameter in critic.named_parameters()}
    return dict(attention_trains=any(value for name, value in trains.items() if ".self_attention." in name),
                the_rest_trains=all(value for name, value in trains.items() if ".self_attention." not in name))


def measure(folder: Path, name: str, parallel) -> dict:
    hf_config = hf.read_config(folder / name)
    module = models.build(hf_config, parallel, torch.float32)
    shards = ShardMap(module, hf_config)
    shards.load(hf.SafetensorsFolder(folder / name))
    saved, mine = load_file(folder / name / "model.safetensors"), export(shards)
    logprobs, expected = train_pass(module, parallel), dict(np.load(folder / f"{name}.npz"))
    trained = [p for p in shards.parameters if p.tensor.requires_grad]
    shards.parameters = [Parameter(p.tensor.main_grad, p.rule, p.hf_names) for p in trained]
    errors = {}
    for key, gradient in export(shards).items():
        want = expected[f"gradient/{key}"]
        errors[key] = float(np.linalg.norm(gradient.numpy() - want) / (np.linalg.norm(want) or 1.0))
    worst = max(errors, key=errors.get)
    return dict(
        same_names=sorted(saved) == sorted(mine), same_bits=all(torch.equal(saved[k], mine[k]) for k in saved),
        logprob=max(float(np.abs(logprobs[i] - expected[f"logprobs/{i}"]).max()) for i in range(len(logprobs))),
        gradient=errors[worst], worst=worst, gradients=len(errors), trajectories=len(logprobs),
        critic=critic_of(hf_config, parallel, module))


def main(folder: Path, jobs: list[tuple[str, dict, list[str]]]) -> None:
    results = {}
    for layout, sizes, names in jobs:
        parallel = configs.ParallelSection(ranks=int(os.environ["WORLD_SIZE"]), **sizes)
        runtime.initialize(parallel, seed=0)
        results |= {f"{layout} {name}": measure(folder, name, parallel) for name in names}
    if dist.get_rank() == 0:
        (folder / f"results-{dist.get_world_size()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    dist.destroy_process_group()
