"""Does the model fit the parallel layout? Checked from config.json alone, before any process starts."""
from __future__ import annotations

from sao_megatron.config import ParallelSection, RunConfig
from sao_megatron.errors import UserError
from sao_megatron.weights.families.glm import indexer_types


def check(config: RunConfig, hf_config: dict) -> None:
    """Raise UserError naming the first number that the layout does not divide, or the size that the model excludes."""
    parallel = config.parallel
    experts = "num_experts" in hf_config
    if not experts and max(parallel.ep, parallel.etp) > 1:
        raise UserError(f"parallel.ep={parallel.ep}, parallel.etp={parallel.etp}: {hf_config['architectures'][0]} has "
                        "no experts: set both to 1")
    if config.rollout.routing_replay and not experts:
        raise UserError(f"rollout.routing_replay=true: {hf_config['architectures'][0]} has no experts whose choice "
                        "could be replayed: set it to false")
    rules = [("num_attention_heads", "tp", "attention heads"), ("num_key_value_heads", "tp", "key/value heads"),
             ("vocab_size", "tp", "vocabulary"), ("num_experts", "ep", "experts"),
             ("moe_intermediate_size", "etp", "expert width")]
    if not experts or hf_config.get("first_k_dense_replace"):
        rules.append(("intermediate_size", "tp", "MLP width"))
    if hf_config.get("n_shared_experts"):
        rules.append(("moe_intermediate_size", "tp", "shared expert's width"))
    for field, size_name, what in rules:
        size = getattr(parallel, size_name)
        if hf_config.get(field, size) % size:
            raise UserError(f"parallel.{size_name}={size} does not divide the model's {what} ({field}="
                            f"{hf_config[field]}): choose a divisor")
    layers, chunks = hf_config["num_hidden_layers"], parallel.pp * parallel.vpp
    if layers % chunks:
        raise UserError(f"{_pipeline(parallel)} does not divide the model's layers (num_hidden_layers={layers}): "
                        "choose a divisor")
    if "index_topk" in hf_config:
        _check_sparse_attention(parallel, hf_config)


def _pipeline(parallel: ParallelSection) -> str:
    return f"parallel.pp={parallel.pp}" + (f" times parallel.vpp={parallel.vpp}" if parallel.vpp > 1 else "")


def _check_sparse_attention(parallel: ParallelSection, hf_config: dict) -> None:
    if parallel.cp > 1:
        raise UserError(f"parallel.cp={parallel.cp}: context parallelism is not supported with the sparse attention of "
                        f"{hf_config['architectures'][0]}: set parallel.cp=1")
    kinds = indexer_types(hf_config)
    for start in range(0, len(kinds), len(kinds) // (parallel.pp * parallel.vpp)):
        if kinds[start] == "shared":
            raise UserError(f"{_pipeline(parallel)}: a pipeline stage would start with layer {start}, which uses the "
                            "indexer of a layer before it: choose another number")
