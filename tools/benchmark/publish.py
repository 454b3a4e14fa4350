"""Publication to real engines, beside a raw broadcast of the same bytes: `python tools/benchmark/publish.py`.

Starts engines with a random Qwen3-MoE of the given size, learner ranks that publish it to them, and as many receivers
as engines. In every round the learner publishes, then rank 0 broadcasts as many bytes, in buckets of the same size, to
the receivers, which keep one buffer, with nothing else going on. Prints, for each bucket size, the fastest round of
each part: what else the machine does only adds time. `raw / send` is the share of the raw broadcast's speed that the
sending reaches; the aim is 0.85, for one of the bucket sizes at least.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from common import Aim, conclude, engine_of, qwen3_moe, running

ROOT = Path(__file__).parents[2]
PATIENCE = timedelta(seconds=600)
AIM = 0.85
"""Of the raw broadcast's speed."""


def model_config(options) -> dict:
    return qwen3_moe(vocab=4096, hidden=options.hidden, heads=8, layers=options.layers, experts=options.experts,
                     width=options.hidden // 2)


def learner(folder: Path) -> None:
    """One rank; rank 0 writes a list of one dict per round."""
    import torch
    import torch.distributed as dist

    from sao_megatron import config as recipes
    from sao_megatron.learner import model as models
    from sao_megatron.learner import runtime
    from sao_megatron.weights import broadcast, hf
    from sao_megatron.weights.publisher import Publisher
    from sao_megatron.weights.shards import ShardMap
    plan = json.loads((folder / "plan.json").read_text())
    config = recipes.load(folder / "recipe.yaml")
    runtime.initialize(config.parallel, seed=0)
    hf_config = hf.read_config(config.model.path)
    shards = ShardMap(models.build(hf_config, config.parallel, torch.float32), hf_config)
    shards.load(hf.FreshTensors(0, 0.02))
    raw, rounds = None, []
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", plan["raw_port"], plan["receivers"] + 1, is_master=True, timeout=PATIENCE)
        raw = broadcast.group_beside(store, 0, plan["receivers"] + 1, "raw", runtime.backend(), PATIENCE)
    for mib in plan["buckets"]:
        section = config.publication.model_copy(update={"bucket_mib": mib})
        publisher = Publisher(shards, lambda: plan["urls"], 1, hf_config["vocab_size"], section, runtime.backend(),
                              600.0, folder / "publication", config.model.path)
        publisher.publish(0)  # forms the groups
        for version in range(1, plan["rounds"] + 1):
            rounds.append({"bucket": mib} | one_round(publisher, version, raw, int(mib * 2**20), runtime.device()))
        publisher.close()
    if raw is not None:
        (folder / "rounds.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def one_round(publisher, version: int, raw, bucket: int, device) -> dict:
    """Publish, then broadcast (rank 0 only, over the group `raw`): bytes and seconds by part."""
    import torch
    import torch.distributed as dist
    seconds = {"publication": publisher.publish(version)}
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (publisher.transport.seconds, publisher.transport.bytes_sent))
    seconds |= {"gather (slowest rank)": max(part["gather"] for part, _ in parts),
                "blocked by sending (slowest rank)": max(part["blocked"] for part, _ in parts)}
    seconds |= {name: sum(part[name] for part, _ in parts) for name in ("send", "load")}
    total = sum(count for _, count in parts)
    if raw is not None:
        data = torch.zeros(min(bucket, total), dtype=torch.uint8, device=device)
        seconds["raw broadcast"] = broadcast_raw(data, total, raw)
    dist.barrier()
    return {"bytes": total, "seconds": seconds}


def broadcast_raw(data, total: int, raw) -> float:
    """`total` bytes in buckets of `data`'s size over the group `raw`; seconds. Collective."""
    import torch.distributed as dist
    dist.barrier(group=raw)
    begin = time.monotonic()
    for start in range(0, total, data.numel()):
        dist.broadcast(data[:min(data.numel(), total - start)], group=raw, group_src=0)
    dist.barrier(group=raw)
    return time.monotonic() - begin


def receiver(folder: Path, rank: int) -> None:
    """Takes part in the raw broadcasts."""
    import torch
    import torch.distributed as dist

    from sao_megatron.learner import runtime
    from sao_megatron.weights import broadcast
    plan = json.loads((folder / "plan.json").read_text())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore("127.0.0.1", plan["raw_port"], plan["receivers"] + 1, timeout=PATIENCE)
    raw = broadcast.group_beside(store, rank, plan["receivers"] + 1, "raw", runtime.backend(), PATIENCE)
    for bucket in (int(mib * 2**20) for mib in plan["buckets"]):
        data = torch.zeros(min(bucket, plan["total"]), dtype=torch.uint8, device=runtime.device())
        for _ in range(plan["rounds"]):
            broadcast_raw(data, plan["total"], raw)


def measure(options, folder: Path) -> list[dict]:
    """Start everything; all rounds."""
    import yaml

    from sao_megatron import config as recipes
    from sao_megatron.device import has_gpu
    from sao_megatron.engine.process import free_port
    (folder / "model").mkdir()
    hf_config = model_config(options)
    (folder / "model" / "config.json").write_text(json.dumps(hf_config))
    recipe = {"name": "benchmark", "task": {"name": "none"},
              "model": {"path": str(folder / "model"), "dtype": "float32"},
              "parallel": {"ranks": options.ranks, "tp": options.tp, "ep": options.ep},
              "publication": {"verify_every": 0}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    config, gpu = recipes.load(folder / "recipe.yaml"), has_gpu()
    engines = [engine_of(config, folder / "model", gpu) for _ in range(options.engines)]
    hidden, middle = hf_config["hidden_size"], hf_config["moe_intermediate_size"]
    layer = (8 + 2 * 4) * hf_config["head_dim"] * hidden + 8 * hf_config["head_dim"] * hidden \
        + 2 * hf_config["head_dim"] + 2 * hidden + options.experts * (hidden + 3 * hidden * middle)
    total = 4 * (2 * hf_config["vocab_size"] * hidden + hidden + options.layers * layer)
    (folder / "plan.json").write_text(json.dumps({
        "urls": [engine.url for engine in engines], "raw_port": free_port(), "receivers": options.engines,
        "rounds": options.rounds, "buckets": options.bucket_mib, "total": total}))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    own = [str(Path(__file__)), "--folder", str(folder), "--role"]
    with running(engines, folder):
        receivers = [subprocess.Popen([sys.executable, *own, f"receiver-{i + 1}"], env=environment)
                     for i in range(options.engines)]
        try:
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc-per-node={options.ranks}", *own, "learner"], env=environment, check=True)
        finally:
            for process in receivers:
                process.kill()
    rounds = json.loads((folder / "rounds.json").read_text())
    assert all(r["bytes"] == total for r in rounds), (rounds[0]["bytes"], total)
    return rounds


def fastest(rounds: list[dict]) -> tuple[list[float], dict[str, list[float]]]:
    """Bucket sizes, and for each of them the seconds of the fastest round, by part."""
    sizes = list(dict.fromkeys(one["bucket"] for one in rounds))
    return sizes, {name: [min(r["seconds"][name] for r in rounds if r["bucket"] == size) for size in sizes]
                   for name in rounds[0]["seconds"]}


def show(megabytes: float, engines: int, sizes: list[float], best: dict[str, list[float]]) -> None:
    print(f"{megabytes:.0f} MB to {engines} engine(s), seconds\n")
    print("| part | " + " | ".join(f"buckets of {size:g} MiB" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for name, seconds in best.items():
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in seconds) + " |")
    for name in ("send", "raw broadcast"):
        print(f"| {name}, MB/s | " + " | ".join(f"{megabytes / seconds:.0f}" for seconds in best[name]) + " |")
    print("| raw / send | " + " | ".join(f"{share:.2f}" for share in reached(best)) + " |\n")


def reached(best: dict[str, list[float]]) -> list[float]:
    """Of the raw broadcast's speed, by bucket size."""
    return [raw / send for raw, send in zip(best["raw broadcast"], best["send"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="learner ranks")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[32, 64, 128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all rounds here")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "learner":
        learner(options.folder)
    elif options.role:
        receiver(options.folder, int(options.role.rpartition("-")[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            rounds = measure(options, Path(folder))
        sizes, best = fastest(rounds)
        show(rounds[0]["bytes"] / 1e6, options.engines, sizes, best)
        conclude(rounds, [Aim("sending, of the raw broadcast's speed", max(reached(best)), AIM, at_least=True)],
                 options.json, bucket_mib=sizes, fastest=best,
                 options={name: getattr(options, name) for name in ("ranks", "tp", "ep", "engines", "rounds")})


if __name__ == "__main__":
    main()
