"""One task of the preflight: `python -m sao_megatron.placement.node_check ADDRESS PORT`, once or more on every node.

Reads the launcher's questions from the TCP store there, says what the node is like, then exchanges data with other
nodes in pairs and with all learner nodes at once. It judges nothing: preflight.py does.
"""
from __future__ import annotations

import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sao_megatron.placement.preflight import exchange_name

PAIR_SECONDS = 10.0
"""For one exchange of two nodes that are both ready for it."""
WAIT_SECONDS = 60.0
"""For the other to be ready."""


def main(address: str, port: int) -> None:
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False,
                          timeout=timedelta(seconds=WAIT_SECONDS))
    questions = json.loads(store.get("questions"))
    store.set_timeout(timedelta(seconds=questions["seconds"]))  # for the launcher's next question
    me = f"{os.environ['SLURMD_NODENAME']}/{os.environ['SLURM_LOCALID']}"
    facts = _facts(questions)
    store.set(f"facts/{me}", json.dumps(facts | {"clock": time.time()}))
    node, local = me.split("/")
    if local == "0":
        present = set(json.loads(store.get("present")))
        for number, pairs in enumerate(questions["rounds"]):
            for pair in pairs:
                if node in pair and present.issuperset(pair):
                    store.set(f"pair/{number}/{node}", json.dumps(_exchange(store, number, pair, node, questions)))
        store.set(f"paired/{node}", "")
    if me in questions["learners"] and json.loads(store.get("reduce")):
        store.set(f"reduced/{me}", json.dumps(_reduce(store, questions["learners"].index(me), questions)))


def _facts(questions: dict) -> dict:
    token = Path(questions["token"])
    for _ in range(10):  # a file server may show a new file late
        if token.exists():
            break
        time.sleep(0.5)
    folders = [folder for folder in (str(token.parent), "/tmp", "/dev/shm") if os.path.isdir(folder)]
    return {"visible": token.exists(), "gpus": _gpus() if questions["gpus"] else [],
            "free_gb": {folder: round(shutil.disk_usage(folder).free / 2**30, 1) for folder in folders}}


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, as NVML says."""
    import pynvml
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [f"{pynvml.nvmlDeviceGetName(handle)}, {pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 30} GiB, driver "
            f"{driver}" for handle in handles]


def _exchange(store: dist.Store, number: int, pair: list[str], node: str, questions: dict) -> dict:
    """{"gb_s": rate} or {"error": sentence}: data to the other and back."""
    other = pair[1 - pair.index(node)]
    name = exchange_name(number, pair)
    try:
        store.set(f"{name}/{node}", "")
        store.wait([f"{name}/{other}"], timedelta(seconds=WAIT_SECONDS))
        data = _data(questions)
        with _Group(store, name, pair.index(node), 2, questions):
            dist.broadcast(data, src=0)  # also opens the connection
            begin = time.monotonic()
            dist.broadcast(data, src=1)
            dist.broadcast(data, src=0)
            _wait_for_device()
            seconds = time.monotonic() - begin
        return {"gb_s": round(2 * data.nbytes / seconds / 1e9, 2)}
    except Exception as error:  # whatever it is belongs into the report
        return {"error": _sentence(error)}


def _reduce(store: dist.Store, rank: int, questions: dict) -> dict:
    """As _exchange, of an all-reduce over the learner's nodes."""
    ranks = len(questions["learners"])
    try:
        data = _data(questions).fill_(1.0)
        with _Group(store, "reduce-all", rank, ranks, questions, seconds=3 * PAIR_SECONDS):
            dist.all_reduce(data)
            begin = time.monotonic()
            dist.all_reduce(data)
            _wait_for_device()
            seconds = time.monotonic() - begin
        wrong = int((data != ranks**2).sum())
        return {"error": f"the sum is wrong in {wrong} places"} if wrong else {
            "gb_s": round(data.nbytes / seconds / 1e9, 2)}
    except Exception as error:
        return {"error": _sentence(error)}


class _Group:
    """Context manager: the default process group of these few."""

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: int, questions: dict,
                 seconds: float = PAIR_SECONDS):
        if questions["gpus"]:
            torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]))
        dist.init_process_group("nccl" if questions["gpus"] else "gloo", store=dist.PrefixStore(name, store), rank=rank,
                                world_size=ranks, timeout=timedelta(seconds=seconds))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        dist.destroy_process_group()


def _data(questions: dict) -> torch.Tensor:
    return torch.zeros(questions["megabytes"] << 18, device="cuda" if questions["gpus"] else "cpu")


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
