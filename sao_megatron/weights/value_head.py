"""A critic on disk: an HF-like folder whose tensors carry the policy's names, with a value head in place of lm_head.

`value_head.json` beside the tensors says what the head's outputs mean, since its shape alone does not.
"""
from __future__ import annotations

import json

from sao_megatron.config import CriticSection, RunConfig
from sao_megatron.errors import UserError
from sao_megatron.weights.folder import SafetensorsFolder
from sao_megatron.weights.hf import read_config
from sao_megatron.weights.maths import differences
from sao_megatron.weights.rules import Rule

FILE = "value_head.json"
RULES = {name: Rule((name,), (hf_name,)) for name, hf_name in (
    ("output_layer.weight", "value_head.weight"), ("output_layer.bias", "value_head.bias"))}
"""By Megatron parameter; these come before the family's rules. Every rank holds the head whole."""


def describe(section: CriticSection) -> dict:
    """What two critics must have in common for the one to start from the other's head."""
    fields = {"head"} if section.head == "mse" else {"head", "bins", "value_min", "value_max"}
    return section.model_dump(include=fields)


def files(section: CriticSection) -> dict[str, dict]:
    """What a critic's folder holds beside an HF model's files, by name."""
    return {FILE: describe(section)}


def check(config: RunConfig, hf_config: dict) -> None:
    """Raise UserError if `critic.path` holds no critic of this model with this head."""
    folder = config.critic.path
    if folder is None:
        return
    if not (folder / FILE).is_file():
        raise UserError(f"critic.path: {folder} has no {FILE}: give a folder that `sao-megatron pretrain-value` wrote, "
                        f"or leave critic.path out to start from the policy's weights")
    found, expected = json.loads((folder / FILE).read_text()), describe(config.critic)
    if found != expected:
        raise UserError(f"critic.path: the critic in {folder} has the head {found}, the recipe asks for {expected}: "
                        f"make the `critic` section the same, or pre-train again")
    theirs = read_config(folder) | {"tie_word_embeddings": hf_config["tie_word_embeddings"]}  # it has no such head
    if other := differences(theirs, hf_config):
        raise UserError(f"critic.path: {folder} was made for another model than this one ({', '.join(other)})")
    SafetensorsFolder(folder).check()
