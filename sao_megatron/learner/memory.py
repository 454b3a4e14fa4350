"""How much GPU memory a learner rank and an engine need: from config.json and the layout, before a job is queued.

Parameters are counted exactly (tests/distributed/test_families.py holds the count of every family and layout to
Megatron's). What follows from them is exact too: gradients are float32; the optimizer keeps two moments, and in
bfloat16 a master copy, in float32, spread over data parallel ranks. Activations are an estimate (see `layer_elements`),
and so is what CUDA, NCCL and fragmentation take (OVERHEAD_GIB).
"""
from __future__ import annotations

from dataclasses import dataclass

from sao_megatron.algorithm import presets
from sao_megatron.config import ParallelSection, RunConfig
from sao_megatron.weights.families import family_of
from sao_megatron.weights.families.glm import indexer_types

GIB = 2**30
OVERHEAD_GIB = 5.0
"""CUDA context (0.5), NCCL's buffers of a dozen groups (2.5), cuBLAS and fragmentation (2): assumed, not measured."""
HEAD_GIB = 1.0
"""Logits alive at one time in the one-pass head (learner/logprob.py, LOGITS_BYTES of a GPU)."""
ENGINE_SHARE = 0.85
"""Share of a GPU's memory that an engine's weights and KV cache take where --mem-fraction-static does not say so."""
BUCKETS = 4
"""Buckets of a publication that an owner rank holds (PublicationSection.bucket_mib)."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters that one rank holds."""

    attention: int
    """All of self-attention but the indexer; norms of queries, keys and latents included."""
    indexer: int
    """Of sparse attention: never trained."""
    rest: int
    """Embeddings, head, norms, dense and shared MLPs, routers."""
    experts: int

    @property
    def total(self) -> int:
        return self.attention + self.indexer + self.rest + self.experts


@dataclass(frozen=True)
class Estimate:
    """Of the rank that needs most (a pipeline stage's), in GiB."""

    stage: int
    rows: dict[str, float]
    """What takes how much, in the order of the table."""

    @property
    def total(self) -> float:
        return sum(self.rows.values())

    @property
    def saved(self) -> float:
        """What the rank copies to main memory for a checkpoint."""
        return sum(size for name, size in self.rows.items() if name.endswith((" parameters", " optimizer")))


@dataclass(frozen=True)
class EngineEstimate:
    """Of one GPU of an engine, in GiB, and what the KV cache of the whole engine holds."""

    weights: float
    kv_cache: float
    """Negative where not even the weights fit."""
    kv_tokens: int


def parameters(hf: dict, parallel: ParallelSection, stage: int = 0, value_outputs: int = 0) -> Parameters:
    """Of one rank of pipeline stage `stage`; `value_outputs` > 0: of a critic, whose head has that many outputs.

    `hf`: config.json in the spelling of weights/hf.py. Every rank of a stage holds equally many.
    """
    fields = family_of(hf).transformer_config(hf)
    hidden, tp, last = fields["hidden_size"], parallel.tp, stage == parallel.pp - 1
    layers = _layers(fields, parallel, stage)
    vocabulary = hf["vocab_size"] // tp * hidden
    rest = 2 * hidden * len(layers) + sum(_mlp(fields, tp, layer) for layer in layers)
    if stage == 0:
        rest += vocabulary
    if last:
        rest += hidden  # the final norm
        if value_outputs:
            rest += (hidden + 1) * value_outputs
        elif not (hf["tie_word_embeddings"] and parallel.pp == 1):
            rest += vocabulary
    expert = 3 * hidden * fields.get("moe_ffn_hidden_size", 0) // parallel.etp
    experts = expert * fields.get("num_moe_experts", 0) // parallel.ep * sum(_sparse(fields, layer) for layer in layers)
    indexers = sum(indexer_types(hf)[layer] == "full" for layer in layers) if "index_topk" in hf else 0
    return Parameters(_attention(fields, tp) * len(layers), _indexer(fields) * indexers, rest, experts)


def _layers(fields: dict, parallel: ParallelSection, stage: int) -> list[int]:
    """Of a pipeline stage: one run of layers, or `parallel.vpp` of them, a pipeline's length apart."""
    size = fields["num_layers"] // (parallel.pp * parallel.vpp)
    return [(chunk * parallel.pp + stage) * size + layer for chunk in range(parallel.vpp) for layer in range(size)]


def _attention(fields: dict, tp: int) -> int:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if fields.get("multi_latent_attention"):
        query, latent, position = fields["q_lora_rank"], fields["kv_lora_rank"], fields["qk_pos_emb_head_dim"]
        key, value = fields["qk_head_dim"], fields["v_head_dim"]
        down = hidden * (query + latent + position) + query + latent  # every rank holds them whole, and their norms
        return down + heads * (query * (key + position) + latent * (key + value) + value * hidden) // tp
    width, groups = fields["kv_channels"], fields["num_query_groups"]
    rows = (heads + 2 * groups) * width // tp
    norms = 2 * width if fields.get("qk_layernorm") else 0
    return rows * hidden + heads * width * hidden // tp + norms + (rows if fields.get("add_qkv_bias") else 0)


def _indexer(fields: dict) -> int:
    if "dsa_indexer_n_heads" not in fields:
        return 0
    heads, width = fields["dsa_indexer_n_heads"], fields["dsa_indexer_head_dim"]
    return fields["q_lora_rank"] * heads * width + fields["hidden_size"] * (width + heads) + 2 * width


def _sparse(fields: dict, layer: int) -> bool:
    """Whether a layer has experts."""
    return bool(fields.get("num_moe_experts")) and bool(fields.get("moe_layer_freq", [1] * (layer + 1))[layer])


def _mlp(fields: dict, tp: int, layer: int) -> int:
    """Without the experts."""
    hidden = fields["hidden_size"]
    if not _sparse(fields, layer):
        return 3 * hidden * fields["ffn_hidden_size"] // tp
    return fields["num_moe_experts"] * hidden + 3 * hidden * fields.get("moe_shared_expert_intermediate_size", 0) // tp


def learner(config: RunConfig, hf: dict) -> Estimate:
    """What the fullest learner rank needs."""
    return max((_stage(config, hf, stage) for stage in range(config.parallel.pp)), key=lambda found: found.total)


def checkpoint(config: RunConfig, hf: dict) -> float:
    """GiB of one checkpoint: every parameter once, and of those that train float32 copy and two moments."""
    rows = learner(config.model_copy(update={"parallel": ParallelSection()}), hf).rows
    return sum(size * (3 if name.endswith(" gradients") else 1) for name, size in rows.items()
               if name.endswith((" parameters", " gradients")))


def _stage(config: RunConfig, hf: dict, stage: int) -> Estimate:
    parallel, choices = config.parallel, config.algorithm.model_dump()
    preset = presets.resolve(choices.pop("preset"), **choices)
    policy = parameters(hf, parallel, stage)
    rows = {f"policy {name}": size for name, size in _trained(config, policy, frozen=policy.indexer).items()}
    if preset.has_critic:
        outputs = config.critic.bins if config.critic.head == "hl_gauss" else 1
        critic = parameters(hf, parallel, stage, outputs)
        frozen = critic.indexer + (critic.attention if preset.freeze_critic_attention else 0)
        rows |= {f"critic {name}": size for name, size in _trained(config, critic, frozen).items()}
    if preset.behaviour == "reference":
        rows["reference parameters"] = policy.total * _width(config)
    rows |= {"activations": activations(config, hf, stage), "head": HEAD_GIB * GIB}
    if config.publication.via == "collective":
        rows["publication buckets"] = BUCKETS * config.publication.bucket_mib * 2**20
    rows["CUDA, NCCL, fragmentation"] = OVERHEAD_GIB * GIB
    return Estimate(stage, {name: size / GIB for name, size in rows.items()})


def _width(config: RunConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _trained(config: RunConfig, held: Parameters, frozen: int) -> dict[str, float]:
    """Bytes of a model that trains, all but `frozen` of its dense parameters."""
    parallel, width = config.parallel, _width(config)
    dense = held.total - held.experts - frozen
    state = 8 if width == 4 else 12  # two moments, and the master copy of bfloat16 parameters
    replicas = parallel.ranks // (parallel.tp * parallel.pp)  # data and context parallel
    expert_replicas = parallel.ranks // (parallel.ep * parallel.etp * parallel.pp)
    return {"parameters": held.total * width, "gradients": 4 * (dense + held.experts),
            "optimizer": state * (dense / replicas + held.experts / expert_replicas)}


def longest_micro_batch(config: RunConfig) -> int:
    """Tokens of the largest micro-batch: a trajectory longer than the budget has one of its own."""
    return max(config.batch.tokens_per_micro_batch, config.rollout.max_tokens)


def activations(config: RunConfig, hf: dict, stage: int) -> float:
    """Bytes at the fullest moment of a step on a rank of this stage.

    Every forward that waits for its backward keeps its layers' inputs with `parallel.recompute: full`, else all that
    the backward needs. One layer's activations come on top for their gradients, and with recomputation once more for
    themselves.
    """
    parallel, fields = config.parallel, family_of(hf).transformer_config(hf)
    tokens = longest_micro_batch(config) / parallel.cp
    layers = [tokens * layer_elements(fields, parallel, layer) for layer in _layers(fields, parallel, stage)]
    ends = 2 * tokens * fields["hidden_size"]  # hidden states in front of the head, and their gradient
    in_flight = forwards_in_flight(parallel, stage) / parallel.vpp
    if parallel.recompute == "full":
        kept = in_flight * len(layers) * tokens * fields["hidden_size"] / parallel.tp + 2 * max(layers)
    else:
        kept = in_flight * sum(layers) + max(layers)
    return (kept + ends) * _width(config)


def forwards_in_flight(parallel: ParallelSection, stage: int) -> int:
    """Forwards of a chunk that Megatron's schedule makes before the first backward, of enough micro-batches: 1F1B's,
    or the interleaved one's of a virtual pipeline."""
    if parallel.vpp == 1:
        return parallel.pp - stage
    return 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1


def layer_elements(fields: dict, parallel: ParallelSection, layer: int) -> float:
    """Numbers that a layer keeps for its backward, per token of a context parallel rank's share of the micro-batch.

    Sequence parallelism spreads norms, residuals and routed tokens over TP ranks; flash attention keeps queries, keys,
    values (before and after RoPE) and the output. An MLP keeps gate, up, the gate's activation and the product (4
    widths), an expert also the product times its weight. Experts are taken to be equally busy: a routed token is kept
    as it is sent, as it arrives and as it goes back (h each). The plain layers of a CPU, which fuse less and pad
    attention, keep 1.2 to 2 times as much (tests/distributed/test_families.py).
    """
    hidden, heads, tp = fields["hidden_size"], fields["num_attention_heads"], parallel.tp
    if fields.get("multi_latent_attention"):
        key, value = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
        latents = 2 * (fields["q_lora_rank"] + fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"])
        attention = latents + 2 * heads * (2 * key + value) + heads * value
    else:
        attention = fields["kv_channels"] * (2 * (heads + 2 * fields["num_query_groups"]) + heads)
    total = 4 * hidden + attention  # two norms' inputs and outputs
    if not _sparse(fields, layer):
        return (total + 4 * fields["ffn_hidden_size"]) / tp
    routed = (1 + 2 * parallel.etp) * hidden + 5 * fields["moe_ffn_hidden_size"]
    total += fields["moe_router_topk"] * routed + 4 * fields["num_moe_experts"]
    return (total + 4 * fields.get("moe_shared_expert_intermediate_size", 0)) / tp


def _engine_share(arguments: list[str]) -> float:
    flag = "--mem-fraction-static"
    return float(arguments[arguments.index(flag) + 1]) if flag in arguments[:-1] else ENGINE_SHARE


def engine(config: RunConfig, hf: dict) -> EngineEstimate:
    """What an engine's weights take of each of its GPUs, and what that leaves to its KV cache."""
    fields, tp, width = family_of(hf).transformer_config(hf), config.engine.tp, _width(config)
    weights = parameters(hf, ParallelSection()).total * width / tp / GIB
    room = config.cluster.gpu_memory_gb * _engine_share(config.engine.extra_args) - weights
    if fields.get("multi_latent_attention"):  # every tensor parallel rank keeps the latents of all heads
        numbers = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"] + fields.get("dsa_indexer_head_dim", 0)
    else:
        numbers = 2 * fields["kv_channels"] * max(1, fields["num_query_groups"] // tp)
    return EngineEstimate(weights, room, max(0, int(room * GIB / (numbers * width * fields["num_layers"]))))
