"""One rank of test_families.py: every family under several layouts, against what HF computed; written by rank 0."""
from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sao_megatron.learner import runtime, trainer
from family_models import trajectories
from layout_worker import plain_ddp
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from sao_megatron import config as configs
from sao_megatron.algorithm.objective import NegativeLogLikelihood
from sao_megatron.learner import memory
from sao_megatron.learner import model as models
from sao_megatron.learner.passes import policy_pass, run_schedule, to_device
from sao_megatron.trajectory.packing import micro_batches, zigzag_rows
from sao_megatron.weights import hf, value_head
from sao_megatron.weights.families import family_of
from sao_megatron.weights.shards import Parameter, ShardMap


def on_rank_zero(part: dict) -> dict:
    """What all ranks have, merged."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {key: value for other in parts for key, value in other.items()}


def export(shards: ShardMap) -> dict[str, torch.Tensor]:
    return on_rank_zero({name: t.clone() for owner in shards.owners() for name, t in shards.export(owner)})


def batches_of(everything: list, parallel) -> list:
    return [to_device(batch) for batch in micro_batches(
        everything, ps.get_data_parallel_world_size(), ps.get_data_parallel_rank(), 60,
        multiple_of=parallel.packed_multiple, equal_length=not models.varies_in_length(parallel),
        sequence_multiple=parallel.sequence_multiple, count_multiple=parallel.pp if parallel.vpp > 1 else 1)]


def logit_error(chunks: list, parallel, expected: dict[str, np.ndarray]) -> float:
    """Largest difference of Megatron's logits, over all tokens of all trajectories and the whole vocabulary."""
    everything, errors = trajectories(), []
    index = {t.tokens.tobytes(): number for number, t in enumerate(everything)}

    def step(iterator, model):
        batch = next(iterator)
        output = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)

        def compare(logits):
            logits = gather_from_tensor_model_parallel_region(logits)[0]  # [T/cp, vocabulary]
            source = batch.source
            rows = zigzag_rows(source.cu_seqlens, parallel.cp, ps.get_context_parallel_rank())
            tokens = source.origin[rows]
            if len(source.trajectories):
                wanted = np.concatenate([expected[f"logits/{index[t.tokens.tobytes()]}"] for t in source.trajectories])
                errors.append(float(np.abs(logits.numpy()[tokens >= 0] - wanted[tokens[tokens >= 0]]).max(initial=0)))
            return logits.sum(), torch.tensor(1, dtype=torch.int), {}
        return output, compare
    batches = batches_of(everything, parallel)
    run_schedule(chunks, step, batches, batches[0], forward_only=True)
    worst = torch.tensor(max(errors, default=-1.0))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def train_pass(chunks: list, parallel) -> dict[str, np.ndarray]:
    """Log-probs by trajectory number; gradients of the mean NLL are left in main_grad."""
    everything = trajectories()
    index = {t.tokens.tobytes(): number for number, t in enumerate(everything)}
    ddp, batches = plain_ddp(chunks), batches_of(everything, parallel)
    outputs = policy_pass(ddp, batches, [NegativeLogLikelihood()] * len(batches), 1.0)
    found = {}
    for batch, output in zip(batches, outputs, strict=False):
        parts = batch.whole(output.logprobs).split(batch.lengths.tolist())
        found |= {index[t.tokens.tobytes()]: p.numpy() for t, p in zip(batch.source.trajectories, parts, strict=True)}
    return on_rank_zero(found)


def critic_of(hf_config: dict, parallel, policy):
    """A critic from the policy's weights, with its attention frozen."""
    critic = models.build(hf_config, parallel, torch.float32, value_outputs=1)
    models.start_from_policy(critic, policy)
    models.freeze_attention(critic)
    ShardMap(critic, hf_config, rules=value_head.RULES)
    return critic


def named(chunks: list):
    return ((name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters())


def training(chunks: list) -> dict:
    """The parameters of attention that train, without layer numbers, and whether all others do."""
    inside = {name.split(".self_attention.")[1] for name, p in named(chunks)
              if ".self_attention." in name and p.requires_grad}
    others = all(p.requires_grad for name, p in named(chunks) if ".self_attention." not in name)
    return dict(attention=sorted(inside), others=others)


def counted(chunks: list, parallel, hf_config: dict, value_outputs: int = 0) -> dict:
    """Parameters of this rank by kind, as they are and as learner/memory.py reckons them."""
    found = dict(attention=0, indexer=0, rest=0, experts=0)
    for name, parameter in named(chunks):
        kinds = (("indexer", ".indexer."), ("attention", ".self_attention."), ("experts", ".experts."))
        kind = next((kind for kind, part in kinds if part in name), "rest")
        found[kind] += parameter.numel()
    return dict(found=found, reckoned=vars(memory.parameters(
        hf_config, parallel, ps.get_pipeline_model_parallel_rank(), value_outputs)))


def activations(module, parallel, hf_config: dict) -> float:
    """Bytes that a forward keeps for its backward, over what learner/memory.py reckons for the layers."""
    kept, storages = [], {}
    weights = {parameter.untyped_storage().data_ptr() for _, parameter in named([module])}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept.append(tensor)  # else its place in memory could be another's soon
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train_pass([module], parallel)
    fields = family_of(hf_config).transformer_config(hf_config)
    tokens = sum(len(trajectory) for trajectory in trajectories())
    reckoned = sum(memory.layer_elements(fields, parallel, layer) for layer in range(fields["num_layers"])) * tokens * 4
    return sum(storages.values()) / reckoned


def only_one_rank(folder: Path, hf_config: dict, module, saved: dict[str, torch.Tensor]) -> dict:
    """What does not depend on the layout."""
    twin = fused_twin(module, hf_config)
    shards = ShardMap([twin], hf_config)
    shards.load(hf.SafetensorsFolder(folder))
    models.freeze_attention([twin])
    half = models.build(hf_config, configs.ParallelSection(), torch.bfloat16)
    return dict(kept_fused=same(saved, export(shards)), frozen_fused=training([twin]),
                activations=activations(module, configs.ParallelSection(), hf_config),
                dtypes=sorted({str(p.tensor.dtype) for p in ShardMap(half, hf_config).parameters}))


def fused_name(name: str, hf_config: dict, dense_layers: set[str]) -> str:
    """TransformerEngine's name of a parameter of the plain layers (names in megatron/core's TE specs, 0.19.2)."""
    layer = ".".join(name.split(".")[:3])
    if "kv_lora_rank" not in hf_config:
        name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    elif "index_topk" not in hf_config:  # sparse attention needs the normalised latents themselves
        name = re.sub(r"\b(q|kv)_layernorm\.weight", r"linear_\1_up_proj.layer_norm_weight", name)
    if layer in dense_layers:
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.weight)", r"\2\1", name)


def fused_twin(module, hf_config: dict) -> torch.nn.Module:
    """Empty parameters of TransformerEngine's names and this module's shapes: all that a ShardMap looks at."""
    weights = dict(module.named_parameters()) | {n: b for n, b in module.named_buffers() if "expert_bias" in n}
    dense = {".".join(name.split(".")[:3]) for name in weights if name.endswith(".mlp.linear_fc1.weight")}
    twin = torch.nn.Module()
    for name, tensor in weights.items():
        *path, leaf = fused_name(name, hf_config, dense).split(".")
        node = twin
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, torch.nn.Module())
            node = getattr(node, part)
        if "expert_bias" in leaf:
            node.register_buffer(leaf, torch.empty_like(tensor))
        else:
            node.register_parameter(leaf, torch.nn.Parameter(torch.empty_like(tensor)))
    twin.config = module.config
    twin.decoder.layers = torch.nn.ModuleList(twin.decoder.layers.children())
    for number, layer in enumerate(twin.decoder.layers):
        layer.layer_number = number + 1
    return twin


def same(saved: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> bool:
    return sorted(saved) == sorted(mine) and all(torch.equal(tensor, mine[name]) for name, tensor in saved.items())


def two_steps(folder: Path, parallel) -> list[dict[str, float]]:
    """Metrics of SAO's training: critic and policy, distributed optimizers, gradient clipping."""
    config = configs.parse(dict(
        name="t", model=dict(path=str(folder), dtype="float32"), parallel=parallel.model_dump(), task=dict(name="t"),
        batch=dict(tokens_per_micro_batch=60), steps=2, policy_optimizer=dict(lr=1e-3),
        critic_optimizer=dict(lr=1e-3, warmup_steps=0)))
    learner = trainer.Trainer(config, hf.read_config(folder), hf.SafetensorsFolder(folder))
    learner.begin_reinforcement()
    return [learner.train_step(trajectories(), version=1).metrics for _ in range(2)]


def measure(folder: Path, name: str, parallel) -> dict:
    hf_config = hf.read_config(folder / name)
    chunks = models.build(hf_config, parallel, torch.float32)
    shards = ShardMap(chunks, hf_config)
    hf.check_tensors(hf.SafetensorsFolder(folder / name), hf_config)  # which knows every shape from config.json alone
    shards.load(hf.SafetensorsFolder(folder / name))
    saved = load_file(folder / name / "model.safetensors")
    kept, expected = same(saved, export(shards)), dict(np.load(folder / f"{name}.npz"))
    logits = logit_error(chunks, parallel, expected)
    alone = only_one_rank(folder / name, hf_config, chunks[0], saved) if dist.get_world_size() == 1 else {}
    value_model = critic_of(hf_config, parallel, chunks)
    critic = training(value_model)
    counts = on_rank_zero({f"{dist.get_rank()} policy": counted(chunks, parallel, hf_config),
                           f"{dist.get_rank()} critic": counted(value_model, parallel, hf_config, value_outputs=1)})
    logprobs = train_pass(chunks, parallel)
    trained = [p for p in shards.parameters if p.tensor.requires_grad]
    shards.parameters = [Parameter(p.tensor.main_grad, p.rule, p.hf_names) for p in trained]
    errors = {}
    for key, gradient in export(shards).items():
        want = expected[f"gradient/{key}"]
        errors[key] = float(np.linalg.norm(gradient.numpy() - want) / (np.linalg.norm(want) or 1.0))
    worst = max(errors, key=errors.get)
    return dict(
        kept=kept, logits=logits, critic=critic, counts=counts, **alone, steps=two_steps(folder / name, parallel),
        logprob=max(float(np.abs(logprobs[i] - expected[f"logprobs/{i}"]).max()) for i in range(len(logprobs))),
        gradient=errors[worst], worst=worst, gradients=len(errors), trajectories=len(logprobs))


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
