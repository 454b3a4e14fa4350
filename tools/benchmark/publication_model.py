"""A model of a publication's seconds on a cluster: `python tools/benchmark/publication_model.py` (docs/weights.md).

Starts nothing; what it models was not measured. The aim: no more seconds than the public figure over NCCL.
"""
from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from common import Aim, conclude

MODELS = {"Qwen3-30B-A3B": (30.5, 4, 8, 2.67, 2.16), "GLM-4.5-Air": (106.0, 4, 16, 5.0, 2.64),
          "744B MoE": (744.0, 8, 64, 58.0, 8.5)}
"""Billions of parameters; a layout: TP, owner ranks (PP × EP); public seconds on H100 over NCCL and over RDMA."""


@dataclass(frozen=True)
class Hardware:
    """Speeds in bytes per second."""

    link: float = 50e9
    """What one engine rank receives: a 400 Gbit/s port."""
    node: float = 400e9
    """What one rank receives from its TP group inside a node: NVLink."""
    load: float = 1000e9
    """At which an engine copies what it received into its tensors: its own memory's, less launches."""
    overhead: float = 0.004
    """Seconds for a bucket's request and answer, and for the next one to begin."""


def estimate(parameters: float, tp: int, owners: int, hardware: Hardware, bucket: float = 512 * 2**20) -> dict:
    """A model of one publication in bfloat16: seconds to gather, to send and load, and in all.

    The owners gather side by side, each its share from its TP group. Each engine rank receives the whole model over its
    own link, bucket after bucket, and loads each before the next: the sum over the buckets. Both go on at once, but for
    the first bucket's gather. Pausing, opening and closing are left out.
    """
    size = 2 * parameters
    gather = size / owners * (tp - 1) / tp / hardware.node
    send = size / hardware.link + size / hardware.load + size / bucket * hardware.overhead
    return {"GB": size / 1e9, "gather": gather, "send and load": send,
            "in all": max(gather, send) + bucket / hardware.node}


def show(rows: list[dict]) -> None:
    print("| model | TP, owners | GB | gather s | send and load s | in all s | public: NCCL s | RDMA s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        _, tp, owners, nccl, rdma = MODELS[row["model"]]
        print(f"| {row['model']} | {tp}, {owners} | {row['GB']:.0f} | {row['gather']:.2f} | "
              f"{row['send and load']:.2f} | {row['in all']:.2f} | {nccl} | {rdma} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=float, default=50, help="GB/s that an engine rank receives")
    parser.add_argument("--node", type=float, default=400, help="GB/s inside a TP group")
    parser.add_argument("--load", type=float, default=1000, help="GB/s at which an engine rank loads")
    parser.add_argument("--overhead", type=float, default=0.004, help="seconds a bucket")
    parser.add_argument("--bucket-mib", type=float, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hardware = Hardware(options.link * 1e9, options.node * 1e9, options.load * 1e9, options.overhead)
    rows = [{"model": name} | estimate(billions * 1e9, tp, owners, hardware, options.bucket_mib * 2**20)
            for name, (billions, tp, owners, *_) in MODELS.items()]
    show(rows)
    conclude(rows, [Aim(f"{row['model']}, modelled seconds", row["in all"], MODELS[row["model"]][3]) for row in rows],
             options.json)


if __name__ == "__main__":
    main()
