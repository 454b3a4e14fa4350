"""One of two learner ranks of test_served_families.py: loads each HF folder in its layout and publishes it."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sao_megatron.config import ParallelSection, PublicationSection
from sao_megatron.learner import model as models
from sao_megatron.learner import runtime
from sao_megatron.weights import hf
from sao_megatron.weights.publisher import Publisher
from sao_megatron.weights.shards import ShardMap


def main(folder: Path, jobs: dict[str, dict]) -> None:
    for name, job in jobs.items():
        parallel = ParallelSection(ranks=2, **job["layout"])
        runtime.initialize(parallel, seed=0)
        hf_config = hf.read_config(folder / name)
        shards = ShardMap(models.build(hf_config, parallel, torch.float32), hf_config)
        shards.load(hf.SafetensorsFolder(folder / name))
        section = PublicationSection(bucket_mib=0.02, timeout=60)
        publisher = Publisher(shards, lambda job=job: [job["url"]], 1, hf_config["vocab_size"], section,
                              runtime.backend(), 60.0, folder / "publication", folder / name, unchanged=True)
        publisher.publish(1)  # over random numbers: every tensor is what the engine loads by itself, or this raises
        publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
