"""One rank of test_layouts.py: log-probs and gradients of the policy loss under several layouts, written by rank 0."""
from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from sao_megatron.learner import runtime, trainer
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from sao_megatron import config as configs
from sao_megatron.algorithm.objective import PolicyGradient
from sao_megatron.learner import memory
from sao_megatron.learner import model as models
from sao_megatron.learner.passes import policy_pass, to_device
from sao_megatron.trajectory.packing import micro_batches
from sao_megatron.weights import hf, verification
from sao_megatron.weights.shards import Parameter, ShardMap


def gather_export(shards: ShardMap) -> dict[str, np.ndarray]:
    """All exported tensors on rank 0."""
    mine = {name: t.float().numpy().copy() for name, t in shards.export()}
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: tensor for part in parts for name, tensor in part.items()}


def plain_ddp(chunks: list) -> list[DistributedDataParallel]:
    """Without a distributed optimizer every rank holds whole gradients; they are zero."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    return wrapped


def policy_gradients(hf_config, source, parallel, data, token_budget: int, replayed=None):
    """Exported gradients of the policy loss (plain DDP, so that every rank holds whole reduced gradients).

    Then the number of micro-batches, how often each of this rank's layers was computed, whether TP ranks agree, and how
    many forwards of chunks waited for their backward at one time, of each rank: [waited, reckoned].
    `replayed`: RoutingReplay, to have the trajectories' routing replayed.
    """
    chunks = models.build(hf_config, parallel, torch.float32)
    replay = replayed(chunks) if replayed else None
    passes, waiting = [], [0]
    chunks[0].decoder.layers[0].register_forward_hook(lambda *_: passes.append(1))
    for chunk in chunks:
        chunk.decoder.layers[0].register_forward_hook(lambda *_: waiting.append(waiting[-1] + 1))
        chunk.decoder.layers[0].register_full_backward_hook(lambda *_: waiting.append(waiting[-1] - 1))
    shards = ShardMap(chunks, hf_config)
    shards.load(source)
    ddp = plain_ddp(chunks)
    batches = micro_batches(
        data["trajectories"], ps.get_data_parallel_world_size(), ps.get_data_parallel_rank(), token_budget,
        multiple_of=parallel.packed_multiple, equal_length=not models.varies_in_length(parallel),
        sequence_multiple=parallel.sequence_multiple, count_multiple=parallel.pp if parallel.vpp > 1 else 1)
    routing = replay.deal(batches, data["trajectories"]) if replay else [None] * len(batches)
    batches = [to_device(batch, part) for batch, part in zip(batches, routing, strict=True)]
    objectives = []
    for batch in batches:
        advantages = [data["advantages"][t.id] for t in batch.source.trajectories]
        flat = torch.from_numpy(np.concatenate([np.zeros(0), *advantages])).float()
        objectives.append(PolicyGradient(batch.rollout_logprobs, flat[batch.held]))
    policy_pass(ddp, batches, objectives, 1.0)
    shards.parameters = [Parameter(p.tensor.main_grad, p.rule, p.hf_names) for p in shards.parameters]
    masks = [o.diagnostics().fate.tolist() for o in objectives] if ps.is_pipeline_last_stage() else []
    group = ps.get_tensor_model_parallel_group()
    all_masks: list = [None] * group.size()
    dist.all_gather_object(all_masks, masks, group=group)
    reckoned = min(memory.forwards_in_flight(parallel, ps.get_pipeline_model_parallel_rank()),
                   len(batches) * parallel.vpp)
    in_flight: list = [None] * dist.get_world_size()
    dist.all_gather_object(in_flight, [max(waiting), reckoned])
    return gather_export(shards), len(batches), len(passes), all(m == masks for m in all_masks), in_flight


def main(folder: Path, layouts: list[dict]) -> None:
    sets = pickle.loads((folder / "data.pkl").read_bytes())
    reference = dict(np.load(folder / "gradients.npz"))
    results = {}
    for spec in layouts:
        spec = dict(spec)
        name, data_name, budget = spec.pop("name"), spec.pop("data", "untied"), spec.pop("budget")
        critic = spec.pop("critic", {})
        data, model_dir = sets[data_name], folder / ("tied" if data_name == "tied" else "untied")
        hf_config = hf.read_config(model_dir)
        parallel = configs.ParallelSection(ranks=int(os.environ["WORLD_SIZE"]), **spec)
        runtime.initialize(parallel, seed=0)
        source = hf.SafetensorsFolder(model_dir)
        gradients, count, passes, same_mask, in_flight = policy_gradients(hf_config, source, parallel, data, budget)
        prefix = data_name + "/"
        expected = {k.removeprefix(prefix): v for k, v in reference.items() if k.startswith(prefix)}
        config = configs.parse(dict(
            name="t", model=dict(path=str(model_dir), dtype="float32"), parallel=parallel.model_dump(),
            algorithm=dict(bootstrap_truncated=True, whiten=True), task=dict(name="random"),
            batch=dict(tokens_per_micro_batch=budget), steps=2,
            policy_optimizer=dict(lr=1e-3), critic=critic, critic_optimizer=dict(lr=1e-3)))
        learner = trainer.Trainer(config, hf_config, source)
        scores = learner.score(data["trajectories"])
        probes = learner.score(verification.probes(hf_config["vocab_size"]))  # which every rank makes for itself
        learner.begin_reinforcement()
        metrics = [learner.train_step(data["trajectories"], version=1).metrics for _ in range(2)]
        weights = gather_export(learner.policy_shards)
        results[name] = dict(
            micro_batches=count, passes=passes, same_mask=same_mask, in_flight=in_flight,
            names_match=sorted(gradients) == sorted(expected),
            gradient={k: float(np.linalg.norm(gradients[k] - v) / (np.linalg.norm(v) or 1.0))
                      for k, v in expected.items() if k in gradients},
            logprob=max(float(np.abs(a - b).max()) for a, b in zip(scores, data["logprobs"], strict=True)),
            probes=[float(probe.mean()) for probe in probes], metrics=metrics,
            weights={k: float(np.square(v, dtype=np.float64).sum()) for k, v in weights.items()})
    if dist.get_rank() == 0:
        (folder / f"results-{dist.get_world_size()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    dist.destroy_process_group()
