"""FLOPs of a model from its config.json, and what share of a GPU's peak they are (MFU).

Counted are the products that the model needs, two operations for each multiplication: attention's and the MLP's
projections, the router, the k experts of a token and the shared ones, causal scores and weighted sums (with sparse
attention those of the keys that it keeps, without its indexer), and the head where a token is predicted. Norms,
softmax, padding, what is computed twice, and the look-up of embeddings are not. A backward counts as two forwards,
also where attention is frozen.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PEAKS = {"B300": 2.25e15, "B200": 2.25e15, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12,
         "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s by a part of the GPU's name, from NVIDIA's data sheets; the first that fits counts."""


def peak(gpu_name: str) -> float | None:
    """None for a GPU that the table lacks."""
    return next((value for name, value in PEAKS.items() if name in gpu_name), None)


@dataclass(frozen=True)
class Forward:
    """FLOPs of one forward pass, in its parts."""

    token: float
    """All layers' projections and experts, of one token."""
    pair: float
    """Score and weighted sum of one query and one key, in all layers."""
    head: float
    """Logits of one predicted token."""
    keys: int | None = None
    """Most keys of a query (sparse attention); None = all before it."""

    def of(self, lengths: Iterable[int], predicted: int) -> float:
        """Sequences of these lengths, of which `predicted` tokens are predicted."""
        lengths = list(lengths)
        pairs = sum(self._pairs(n) for n in lengths)
        return self.token * sum(lengths) + self.pair * pairs + self.head * predicted

    def _pairs(self, n: int) -> float:
        k = n if self.keys is None else min(n, self.keys)
        return k * (k + 1) / 2 + (n - k) * k


def forward(hf: dict) -> Forward:
    """Of a model with this config.json, spelled as weights.hf.canonical spells it."""
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    projections, widths = _mla(hf) if "kv_lora_rank" in hf else _gqa(hf)
    dense = hf.get("first_k_dense_replace", 0) if "num_experts" in hf else layers
    mlps = dense * 3 * hidden * hf["intermediate_size"]
    if "num_experts" in hf:
        active = hf["num_experts_per_tok"] + hf.get("n_shared_experts", 0)
        mlps += (layers - dense) * hidden * (hf["num_experts"] + 3 * hf["moe_intermediate_size"] * active)
    return Forward(token=2.0 * (layers * projections + mlps), pair=2.0 * layers * heads * widths,
                   head=2.0 * hidden * hf["vocab_size"], keys=hf.get("index_topk"))


def _gqa(hf: dict) -> tuple[int, int]:
    """(multiplications of one layer's projections for a token, widths of a head's key and value together)."""
    heads = 2 * hf["num_attention_heads"] + 2 * hf["num_key_value_heads"]  # queries and output, keys and values
    return hf["hidden_size"] * heads * hf["head_dim"], 2 * hf["head_dim"]


def _mla(hf: dict) -> tuple[int, int]:
    hidden, heads, latent = hf["hidden_size"], hf["num_attention_heads"], hf["kv_lora_rank"]
    key, value = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"], hf["v_head_dim"]
    return (hf["q_lora_rank"] * (hidden + heads * key) + hidden * (latent + hf["qk_rope_head_dim"])
            + latent * heads * (hf["qk_nope_head_dim"] + value) + heads * value * hidden), key + value


def step(model: Forward, lengths: list[int], actions: int, critic_updates: int, recomputes: bool,
         updates_policy: bool) -> float:
    """One learner step on trajectories of these lengths: K critic updates, and the policy's update, perhaps with the
    further forward of presets whose behaviour policy is not the rollout."""
    body, policy = model.of(lengths, 0), model.of(lengths, actions)
    return 3 * critic_updates * body + updates_policy * (3 + recomputes) * policy
