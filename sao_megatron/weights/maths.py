"""All that a config.json says of what its model computes, in Megatron's words, and where two of them differ in that."""
from __future__ import annotations

from sao_megatron.weights.families import family_of


def model_arguments(hf: dict) -> dict:
    """GPTModel's, beside its TransformerConfig; multi-latent attention takes its RoPE scaling from the latter."""
    scaling = hf["rope_scaling"] or {}
    llama3 = scaling.get("rope_type") == "llama3"
    return dict(
        vocab_size=hf["vocab_size"], share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        rotary_base=hf["rope_theta"], rotary_percent=hf.get("partial_rotary_factor", 1.0),
        **(dict(rope_scaling=True, rope_scaling_factor=scaling["factor"]) if llama3 else {}))


def differences(a: dict, b: dict) -> list[str]:
    """The fields that make the models of two HF configs compute differently: "rope_theta is 1e4 and 5e5", …

    Two spellings of one thing, such as a default and its absence, are no difference. Raises UserError for a config that
    is not supported.
    """
    family, keys = family_of(a), ["architectures"]
    if family is family_of(b):
        def maths(hf: dict) -> dict:
            return family.transformer_config(hf) | model_arguments(hf)
        keys = [key for key in sorted(a.keys() | b.keys()) if maths(_with(a, key, b)) != maths(a)]
    return [f"{key} is {a.get(key)!r} and {b.get(key)!r}" for key in keys]


def _with(a: dict, key: str, b: dict) -> dict:
    """`a` with b's value for `key`, or with none if b has none."""
    return {name: value for name, value in a.items() if name != key} | ({key: b[key]} if key in b else {})
