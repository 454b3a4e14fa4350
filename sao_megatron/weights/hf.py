"""HF checkpoint folders: config.json, tensors by name, and the model folder that every process of a run reads."""
from __future__ import annotations

import json
import os
import re
import zlib
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sao_megatron.config import RunConfig
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole
from sao_megatron.weights import rope, shapes
from sao_megatron.weights.families import family_of
from sao_megatron.weights.folder import CHECKSUMS, SafetensorsFolder, common_name, read_json
from sao_megatron.weights.rules import EMBEDDINGS, HEAD

_ROWS = 4096
_BESIDE = {".json", ".jinja", ".txt", ".model", ".py", ".tiktoken"}
"""Endings of what a model's folder holds beside its weights: tokenizers of every kind, and code that config.json names.
"""
_OF_THE_WEIGHTS = {"config.json", CHECKSUMS, "state.json", "metadata.json"}
"""Files that say something of the weights in their own folder: an index, and these."""


class TensorSource(Protocol):
    """Where a model's initial weights come from."""

    def get(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        """Part `index` of the HF tensor `name`, which as a whole must have `shape`."""

    def verify_checksum(self, name: str) -> None:
        """Raise UserError if the data of tensor `name` are not what was once written, where that is known."""


def read_config(folder: Path) -> dict:
    """config.json in one spelling, whichever version of transformers wrote it. Raises UserError.

    The number of experts is `num_experts`; `moe_intermediate_size`, `head_dim` and `num_key_value_heads` are spelled
    out; `rope_theta`, `partial_rotary_factor` and `rope_scaling` (None, or a dict with `rope_type`) hold the RoPE.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"model folder {folder} has no config.json: give the path of an HF checkpoint folder")
    return canonical(read_json(path))


def canonical(hf: dict) -> dict:
    """See `read_config`. Raises UserError for what config.json says twice, and differently."""
    hf = dict(hf)
    hf.pop("quantization_config", None)  # how tensors are stored, not what they are: SafetensorsFolder's business
    if "num_local_experts" in hf and "intermediate_size" in hf:  # Mixtral, whose MLPs are all experts
        hf.setdefault("moe_intermediate_size", hf["intermediate_size"])
    for name in ("num_local_experts", "n_routed_experts"):
        if name in hf and hf.setdefault("num_experts", hf[name]) != hf.pop(name):
            raise UserError(f"config.json: {name} and num_experts differ: leave the one that is meant")
    if hf.get("tie_word_embeddings") is None:
        hf["tie_word_embeddings"] = False
    heads, hidden = hf.get("num_attention_heads"), hf.get("hidden_size")
    if hf.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and 0 < heads <= hidden:
        hf["head_dim"] = hidden // heads
    if hf.get("num_key_value_heads") is None and "num_attention_heads" in hf:
        hf["num_key_value_heads"] = heads
    parameters, scaling = (hf.pop(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
    return hf | rope.canonical(parameters, scaling, hf)


def files_beside(folder: Path) -> list[Path]:
    """Tokenizer and code, which go with the weights wherever they are written. Raises UserError for what cannot be
    read, before there is anything to write."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _BESIDE and not path.is_dir()
             and path.name not in _OF_THE_WEIGHTS and not path.name.endswith(".index.json")]
    for path in files:
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read (a link to nowhere?), and what is written from this model needs a "
                            f"copy: put the file there, or remove it")
    return files


def prepare_model(config: RunConfig, run_dir: Path) -> Path:
    """The HF folder that engines and learner read: `model.path`, or run_dir/model with a fresh model's config.json.

    Raises UserError for a missing folder, an unknown architecture or an unsupported field, before anything is started.
    """
    if config.model.path is not None:
        _check_folder(config.model.path, config.model.mtp == "keep")
        return config.model.path
    if config.model.mtp == "keep":
        raise UserError("model.mtp=keep: model.fresh has no layers for multi-token prediction that could be kept: "
                        "leave model.mtp at drop")
    family_of(canonical(config.model.fresh))
    folder = run_dir / "model"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json",
                json.dumps(config.model.fresh | {"torch_dtype": config.model.dtype}, indent=2))
    return folder


def _check_folder(folder: Path, with_mtp: bool) -> None:
    if not folder.is_dir():
        raise UserError(f"model.path: folder {folder} does not exist")
    if (folder / ".metadata").is_file():
        raise UserError(f"model.path: {folder} is a checkpoint of the learner, engines need an HF folder: write one "
                        f"with tools/convert.py megatron-to-hf (to go on with a run, use sao-megatron resume)")
    hf_config = read_config(folder)
    family_of(hf_config)
    tensors = SafetensorsFolder(folder)
    check_tensors(tensors, hf_config)
    files_beside(folder)
    if tensors.is_quantized:
        raise UserError(f"model.path: {folder} is stored in float8, which is not trained: write it in bfloat16 first, "
                        f"with tools/convert.py hf-to-megatron and megatron-to-hf")
    if with_mtp:
        check_mtp(folder)


def check_tensors(tensors: SafetensorsFolder, hf_config: dict) -> None:
    """Raise UserError for files that are damaged, for a tensor that the model of config.json lacks or needs in another
    shape, for one that it has no place for (left out without a word, it would make another model), or for a head that
    it ties away."""
    family = family_of(hf_config)
    for name, file in sorted(tensors.check().items()):
        if not is_left_out(name, hf_config):
            raise UserError(f"{tensors.folder / file}: tensor {name} lies there, and the index does not name it, so "
                            f"that some readers take it and some do not: copy or export this checkpoint again")
    there = {common_name(name): name for name in tensors.names()}
    ours, advice = f"the {family.architecture} of config.json", "take config.json and weights of one model"
    lacking = list(islice((name for name in family.names(hf_config) if common_name(name) not in there), 2))
    if lacking:  # not counted: config.json may ask for any number
        raise UserError(f"{tensors.folder}: {ours} needs, and this folder lacks, tensor {lacking[0]}"
                        f"{' (and more)' if len(lacking) > 1 else ''}: {advice}")
    wanted = {common_name(name) for name in family.names(hf_config)}
    strange = sorted(name for name in there.keys() - wanted if not is_left_out(name, hf_config))
    if strange:
        more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
        raise UserError(f"{tensors.folder}: {ours} has no place for tensor {there[strange[0]]}{more}: {advice}")
    shape_of = shapes.shape_of(hf_config)
    tensors.expect({there[name]: shape_of(name) for name in wanted})
    if HEAD not in there or not hf_config["tie_word_embeddings"]:
        return
    shape = tensors.shape(EMBEDDINGS)
    for row in range(0, shape[0], _ROWS):
        rows = (slice(row, row + _ROWS),)
        if not torch.equal(tensors.get(HEAD, shape, rows), tensors.get(EMBEDDINGS, shape, rows)):
            raise UserError(f"{tensors.folder}: tensor {HEAD} differs from {EMBEDDINGS}, to which config.json ties it: "
                            f"set tie_word_embeddings to false, or remove {HEAD}")


def is_left_out(name: str, hf_config: dict) -> bool:
    """Tensors that folders hold beside the weights that are trained: multi-token prediction, a tied head, an indexer
    in layers that use another's, a table that is reckoned anew (of old versions of transformers)."""
    layers, mtp_layers = hf_config["num_hidden_layers"], hf_config.get("num_nextn_predict_layers") or 0
    return (name.endswith(".rotary_emb.inv_freq") or name == HEAD and hf_config["tie_word_embeddings"]
            or ".self_attn.indexer." in name and "index_topk" in hf_config
            or is_mtp(name, layers) and not is_mtp(name, layers + mtp_layers))


def check_mtp(folder: Path) -> None:
    """Raise UserError if an HF folder has no layers for multi-token prediction."""
    layers = read_config(folder)["num_hidden_layers"]
    names = SafetensorsFolder(folder).names() if list(folder.glob("*.safetensors")) else []
    if not any(is_mtp(name, layers) for name in names):
        raise UserError(f"{folder} has no layers for multi-token prediction (model.layers.{layers} …) that could be "
                        f"kept: drop them, or name the HF folder that has them (model.path, or --model)")


def is_mtp(name: str, layers: int) -> bool:
    """Whether an HF tensor is of multi-token prediction, whose layers follow the model's `layers` own."""
    match = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    return match is not None and int(match[1]) >= layers


class FreshTensors:
    """Random weights, a function of seed and tensor name only, so that every layout starts from the same model."""

    def __init__(self, seed: int, std: float):
        self.seed, self.std = seed, std

    def get(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)[index]
        if name.endswith("bias"):
            return torch.zeros(shape)[index]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))  # it takes 32 bits
        return torch.empty(shape).normal_(0.0, self.std, generator=generator)[index]

    def verify_checksum(self, name: str) -> None:
        """There are no data that could be damaged."""


def initial_weights(config: RunConfig, model_dir: Path) -> TensorSource:
    """Source of the weights that a run starts from."""
    if config.model.path is None:
        return FreshTensors(config.seed, config.model.init_std)
    return SafetensorsFolder(model_dir)
