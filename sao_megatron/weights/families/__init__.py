"""One file per group of model families; `family_of` finds the one that a config.json names."""
from sao_megatron.errors import UserError
from sao_megatron.weights.families import deepseek, glm, llama, qwen
from sao_megatron.weights.rules import Family

FAMILIES: dict[str, Family] = {family.architecture: family for family in (
    qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE, llama.LLAMA, llama.MIXTRAL, glm.GLM4_MOE, glm.GLM5,
    deepseek.DEEPSEEK_V3)}

REFUSED = {
    "Qwen3NextForCausalLM": "its gated delta-net layers need Megatron-Core's GatedDeltaNet, which runs only with "
                            "TransformerEngine and flash-linear-attention",
    "GptOssForCausalLM": "its attention sinks and sliding windows, the biases of its experts and their clamped "
                         "activation have no counterpart in this stack's layer specs",
}
"""Known architectures that cannot be trained, with the part that is missing."""


def family_of(hf_config: dict) -> Family:
    """The family of an HF config. Raises UserError for an unknown architecture or an unsupported field."""
    names = hf_config.get("architectures") or ["(none)"]
    name = str(names[0] if isinstance(names, list) else names)
    if name in REFUSED:
        raise UserError(f"config.json: architecture {name!r} is not supported: {REFUSED[name]}")
    if name not in FAMILIES:
        raise UserError(f"config.json: architecture {name!r} is not supported; known: {', '.join(FAMILIES)}")
    family, model_type = FAMILIES[name], hf_config.get("model_type")
    if model_type != family.model_type and model_type in [other.model_type for other in FAMILIES.values()]:
        raise UserError(f"config.json: architectures names {name!r} and model_type {model_type!r}, which is another "
                        f"model; some readers go by the one, some by the other: leave the one that is meant")
    family.check_config(hf_config)
    return family
