"""A checkpoint whose head is tied to its embeddings, as SGLang can load it by itself.

SGLang 0.5.23 has a head of its own for every Qwen3-MoE, whatever the config says. A learner that publishes sends both.
"""
from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from sao_megatron.weights.folder import CHECKSUMS, INDEX, SafetensorsFolder
from sao_megatron.weights.hf import read_config
from sao_megatron.weights.rules import EMBEDDINGS, HEAD


def needs_head(model_dir: Path) -> bool:
    """Whether SGLang, loading this folder, would have a head of random numbers. Raises UserError as `read_config`."""
    config = read_config(model_dir)
    return "Qwen3MoeForCausalLM" in (config.get("architectures") or ()) and config["tie_word_embeddings"]


def untie(source: Path, target: Path) -> Path:
    """Make the folder `target`: links to the files of `source`, and a head beside them. Returns it."""
    target.mkdir(parents=True)
    tensors = SafetensorsFolder(source)
    for file in source.iterdir():
        if file.name not in ("config.json", INDEX, CHECKSUMS):
            (target / file.name).symlink_to(file.resolve())
    weight_map = dict(tensors.file_of)
    if HEAD not in weight_map:
        head = tensors.get(EMBEDDINGS, tensors.shape(EMBEDDINGS))
        save_file({HEAD: head.contiguous()}, target / "head.safetensors")
        weight_map[HEAD] = "head.safetensors"
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
