"""One rank of test_convert.py: HF folders and the learner's format, read and written under several layouts."""
from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sao_megatron.learner import model as models
from sao_megatron.learner import runtime
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from sao_megatron.config import ParallelSection
from sao_megatron.errors import UserError
from sao_megatron.weights import hf
from sao_megatron.weights.shards import ShardMap, save_hf

LAYOUTS = {"tp2": dict(tp=2), "ep2": dict(ep=2), "tp2ep2": dict(tp=2, ep=2), "tp2etp2": dict(tp=2, etp=2),
           "pp2": dict(pp=2), "pp2vpp2": dict(pp=2, vpp=2)}


def sharded(chunks: list) -> dict:
    """The policy's part of what the learner saves."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
                "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state = {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
    add_prefix_for_sharding(state, "policy.")
    return {"policy": state}


def damaged(shards: ShardMap, folder: Path) -> list[str]:
    """What each rank says of an exported folder with one bit flipped in the last layer's data ("" if nothing)."""
    if dist.get_rank() == 0:
        shutil.copytree(folder / "saved-pp2", folder / "flipped")
        path = max((folder / "flipped").glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(data)
    dist.barrier()
    said = ""
    try:
        shards.load(hf.SafetensorsFolder(folder / "flipped"))
    except UserError as error:
        said = str(error)
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, said)
    return parts


def status(field: str) -> int:
    """Bytes, of this process's memory."""
    return int(re.search(field + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def memory(folder: Path) -> list[tuple[int, int, int]]:
    """Of each rank: how much its memory grew while it loaded its part of a larger model, at most; the bytes of that
    part; and those of the largest HF tensor."""
    parallel, hf_config = ParallelSection(ranks=2, tp=2, ep=2), hf.read_config(folder / "large")
    runtime.initialize(parallel, seed=0)
    shards = ShardMap(models.build(hf_config, parallel, torch.float32), hf_config)
    source = hf.SafetensorsFolder(folder / "large")
    largest = max(math.prod(source.shape(name)) * 4 for name in source.names())
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    shards.load(source)
    parts: list = [None, None]
    dist.all_gather_object(parts, (status("VmHWM") - before, sum(p.tensor.nbytes for p in shards.parameters), largest))
    return parts


def main(folder: Path) -> None:
    hf_config = hf.read_config(folder / "single")
    read = {"memory": memory(folder)}
    for name, sizes in LAYOUTS.items():
        parallel = ParallelSection(ranks=2, **sizes)
        runtime.initialize(parallel, seed=0)
        chunks = models.build(hf_config, parallel, torch.float32)
        shards = ShardMap(chunks, hf_config)
        source = hf.SafetensorsFolder(folder / "fused")
        shards.load(source)
        own = sum(parameter.tensor.nbytes for parameter in shards.parameters)
        counts: list = [None, None]
        dist.all_gather_object(counts, (source.bytes_read, own))
        read[name] = counts
        save_hf(shards, folder / f"saved-{name}", folder / "single", max_bytes=100_000)
        loaded = dist_checkpointing.load(sharded(chunks), str(folder / "meg"))["policy"]
        for number, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[str(number)], strict=False)
        save_hf(shards, folder / f"converted-{name}", folder / "single")
        if name == "pp2":
            save_hf(shards, folder / "saved-mtp", folder / "mtp", mtp=True)
        if name == "tp2ep2":
            (folder / "step-00000007").mkdir(exist_ok=True)
            dist_checkpointing.save(sharded(chunks), str(folder / "step-00000007"))
    read["damaged"] = damaged(shards, folder)
    if dist.get_rank() == 0:
        state = {"format": 1, "step": 7, "config": {"model": {"path": str(folder / "single")}}}
        (folder / "step-00000007" / "state.json").write_text(json.dumps(state))
        (folder / "read.json").write_text(json.dumps(read))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
