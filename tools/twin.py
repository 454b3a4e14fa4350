"""A recipe for a cluster, shrunk until its run fits two cores: the same algorithm, family and kinds of parallelism.

    python tools/twin.py configs/qwen3-30b-a3b-math.yaml twin.yaml
    sao-megatron submit twin.yaml            # or: sao-megatron train twin.yaml

What is kept: preset, gates, optimizers, lag, publication mode, recomputation, dispatcher, the model's family, and which
sizes of the layout are larger than one (each becomes two; expert parallelism over all ranks stays so). What shrinks:
widths, layers, vocabulary, contexts, batch, nodes. It learns nothing: the task is guess_number, for one update.

GLM-5's sparse attention has no engine without a GPU. Its twin picks as many keys as a trajectory has tokens, which is
what attention to all of them computes: the learner trains the sparse one, and the engine serves the same weights as
GLM-4.7-Flash's family, whose attention is GLM-5's without the picking.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sao_megatron import config as run_config
from sao_megatron.config import ParallelSection, RunConfig
from sao_megatron.submission.checks import find_model

LONGEST = 64
"""Tokens of a trajectory."""
WIDTHS = dict(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, eos_token_id=2, bos_token_id=None, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    index_topk=LONGEST, index_n_heads=32, index_head_dim=16)
DENSE = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
"""What SGLang is told of a model with sparse attention."""


def shrunk_layout(parallel: ParallelSection) -> dict[str, Any]:
    """Every size above one becomes two; no more ranks than these need."""
    sizes = {name: min(2, getattr(parallel, name)) for name in ("tp", "pp", "cp", "etp")}
    ranks = max(2, sizes["tp"] * sizes["pp"] * sizes["cp"])
    ep = min(2, parallel.ep)
    if parallel.ep * parallel.etp * parallel.pp == parallel.ranks:  # one copy of the experts
        ep = ranks // (sizes["pp"] * sizes["etp"])
    return sizes | dict(ranks=ranks, ep=ep, dispatcher=parallel.dispatcher, recompute=parallel.recompute)


def shrunk_model(hf_config: dict[str, Any], pp: int) -> dict[str, Any]:
    """The family's fields with small numbers; two layers a stage, the first one dense where the model begins so."""
    small = {name: WIDTHS.get(name, value) for name, value in hf_config.items()} | {"num_hidden_layers": 2 * pp}
    if "kv_lora_rank" in small:  # every head has its own keys
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "n_shared_experts" in small:  # HF's spelling in these families, which the engine reads
        small["n_routed_experts"] = small.pop("num_experts")
    if "first_k_dense_replace" in small:
        small["first_k_dense_replace"] = min(1, small["first_k_dense_replace"])
    return small


def twin(recipe: Path) -> RunConfig:
    """Raises UserError if the recipe's model is unknown here."""
    config = run_config.load(recipe)
    layout = shrunk_layout(config.parallel)
    model = shrunk_model(find_model(config, recipe).hf_config, layout["pp"])
    return run_config.parse(dict(
        name=f"twin-of-{config.name}", steps=1,
        model=dict(dtype="float32", init_std=0.1, fresh=model),
        parallel=layout,
        algorithm=config.algorithm.model_dump() | dict(critic_only_steps=min(1, config.algorithm.critic_only_steps)),
        policy_optimizer=config.policy_optimizer.model_dump(), critic_optimizer=config.critic_optimizer.model_dump(),
        batch=dict(trajectories=8, tokens_per_micro_batch=LONGEST),
        task=dict(name="guess_number", options=dict(low=1, high=15, turns=4)),
        rollout=dict(max_lag=config.rollout.max_lag, concurrency=8, max_tokens=LONGEST, max_new_tokens=8),
        engine=dict(count=1, max_running_requests=8, max_total_tokens=2048,
                    extra_args=["--json-model-override-args", json.dumps(DENSE)] if "index_topk" in model else []),
        publication=dict(mode=config.publication.mode, bucket_mib=16, verify_every=1, tolerance=1e-3),
        checkpoint=dict(every=1), restarts=1,
        cluster=dict(learner_nodes=min(2, config.cluster.learner_nodes), rollout_nodes=1, time="00:20:00",
                     signal_seconds=60)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path, help="YAML file to write")
    arguments = parser.parse_args()
    run_config.save(twin(arguments.recipe), arguments.out)


if __name__ == "__main__":
    main()
