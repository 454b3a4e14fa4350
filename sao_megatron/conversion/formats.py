"""From an HF folder to a checkpoint of the learner, and back."""
from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from sao_megatron.checkpoints import write_state
from sao_megatron.conversion import config_json
from sao_megatron.conversion.job import Job, share
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole
from sao_megatron.learner import integrity
from sao_megatron.learner.megatron_folder import WholeModel, join_parts, stored_dtype
from sao_megatron.weights import hf, saving
from sao_megatron.weights.families import family_of
from sao_megatron.weights.folder import SafetensorsFolder
from sao_megatron.weights.saving import Entry

DTYPES = ("bfloat16", "float32")


def hf_to_megatron(source: Path, target: Path, dtype: str | None = None) -> None:
    """Write the HF folder `source` as a checkpoint of the learner with a policy only, at step 0.

    `dtype`: what the weights are stored as (default: the type that config.json names).
    """
    hf_config = hf.read_config(source)
    family_of(hf_config)
    tensors = SafetensorsFolder(source)
    hf.check_tensors(tensors, hf_config)
    hf.files_beside(source)
    dtype = dtype or _dtype_of(hf_config)
    model = WholeModel(hf_config, getattr(torch, dtype))
    job = Job(target, {"verb": "hf-to-megatron", "source": str(source.resolve()), "dtype": dtype}, model)
    job.run(lambda part: model.write(part, tensors, job.partial))
    if job.is_first:
        saving.copy_beside(source, job.partial, dtype)
        join_parts(job.partial, len(model.parts))
        write_state(job.partial, {
            "step": 0, "updates": 0, "parts": ["policy"], "hf_config": hf_config, "written": time.time(),
            integrity.CHECKSUM: integrity.metadata_checksum(job.partial)})
        job.complete()


def megatron_to_hf(source: Path, target: Path, model_dir: Path | None = None, mtp: bool = False) -> None:
    """Write the policy of the learner's checkpoint `source` as an HF folder, in the type that it is stored in.

    config.json, tokenizer and, if `mtp`, layers for multi-token prediction come from `model_dir` (default: wherever the
    checkpoint says that the model lies).
    """
    model_dir = model_dir or config_json.model_directory(source)
    if mtp:
        hf.check_mtp(model_dir)
    model = WholeModel(config_json.of(source, model_dir), stored_dtype(source))
    hf.files_beside(model_dir)
    model.check(source, *share())
    job = Job(target, {"verb": "megatron-to-hf", "source": str(source.resolve()), "model": str(model_dir.resolve())},
              model)

    def write(part: int) -> None:
        entries = saving.write_files(iter(model.read(part, source).items()), job.partial, f"model-{part:05d}")
        write_whole(job.partial / f"part-{part:05d}.json",
                    json.dumps({name: asdict(entry) for name, entry in entries.items()}))
    job.run(write)
    if job.is_first:
        entries = {}
        for part in range(len(model.parts)):
            path = job.partial / f"part-{part:05d}.json"
            entries |= {name: Entry(**entry) for name, entry in json.loads(path.read_text()).items()}
        job.complete(lambda: saving.finish(target, entries, model_dir, mtp=mtp))


def _dtype_of(hf_config: dict) -> str:
    named = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    if named not in DTYPES:
        raise UserError(f"config.json: the learner trains {' or '.join(DTYPES)}, this model is in {named}: choose one "
                        f"with --dtype")
    return named
