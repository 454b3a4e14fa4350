"""A checkpoint with a tied head, made loadable for SGLang."""
from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from sao_megatron.weights.folder import INDEX, SafetensorsFolder
from sao_megatron.weights.rules import EMBEDDINGS, HEAD
from sao_megatron.weights.untied import needs_head, untie

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4, "num_attention_heads": 2, "vocab_size": 8,
          "tie_word_embeddings": True}


# If this fails, `rollout` and `evaluate` sample from a head of random numbers, or lose a tensor or the tokenizer.
@pytest.mark.parametrize("files", [1, 2])
def test_the_head_is_the_embeddings(tmp_path, files):
    source = tmp_path / "source"
    source.mkdir()
    tensors = {EMBEDDINGS: torch.randn(8, 4), "model.norm.weight": torch.ones(4)}
    if files == 1:
        save_file(tensors, source / "model.safetensors")
    else:
        index = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            index[name] = f"part-{number}.safetensors"
            save_file({name: tensor}, source / index[name])
        (source / INDEX).write_text(json.dumps({"weight_map": index}))
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text("{}")
    assert needs_head(source)
    target = untie(source, tmp_path / "run" / "untied")
    assert not needs_head(target) and (target / "tokenizer.json").read_text() == "{}"
    folder = SafetensorsFolder(target)
    folder.check()
    assert sorted(folder.names()) == sorted([*tensors, HEAD])
    assert torch.equal(folder.get(HEAD, (8, 4)), tensors[EMBEDDINGS])
    assert torch.equal(folder.get(EMBEDDINGS, (8, 4)), tensors[EMBEDDINGS])


# If this fails, a tied model whose folder has the head too gets a second one, and is refused.
def test_a_head_that_is_there_is_taken(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({EMBEDDINGS: torch.ones(8, 4), HEAD: torch.ones(8, 4)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG))
    SafetensorsFolder(untie(source, tmp_path / "untied")).check()
    assert not (tmp_path / "untied" / "head.safetensors").exists()


# If this fails, a model whose head SGLang ties by itself is copied for nothing.
def test_other_models_need_none(tmp_path):
    for number, change in enumerate(({"tie_word_embeddings": False}, {"architectures": ["Qwen3ForCausalLM"]})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
        assert not needs_head(folder)
