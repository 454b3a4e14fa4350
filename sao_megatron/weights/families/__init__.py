"""One file per model family; `family_of` finds the one that a config.json names."""
from sao_megatron.errors import UserError
from sao_megatron.weights.families import qwen3_moe
from sao_megatron.weights.rules import Family

FAMILIES: dict[str, Family] = {family.architecture: family for family in (qwen3_moe.FAMILY,)}


def family_of(hf_config: dict) -> Family:
    """The family of an HF config. Raises UserError for an unknown architecture or an unsupported field."""
    names = hf_config.get("architectures") or ["(none)"]
    if names[0] not in FAMILIES:
        raise UserError(f"config.json: architecture {names[0]!r} is not supported; known: {', '.join(FAMILIES)}")
    family = FAMILIES[names[0]]
    family.check_config(hf_config)
    return family
