"""A real SGLang server on the CPU with a tiny Qwen3-MoE, and the model it serves, held by Transformers beside it."""
from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from torch.distributed import distributed_c10d

from sao_megatron import config as recipes
from sao_megatron.engine.client import EngineClient
from sao_megatron.engine.process import EngineProcess, engine_command, engine_environment, free_port

VOCAB = 64
START_SECONDS = 300
REQUEST_SECONDS = 120
QUICK = 0.1
"""Grace of a server that is not needed any more: told to end, it looks for that every five seconds."""


def make_tiny_model(folder: Path | None = None, seed: int = 0):
    """A random Qwen3-MoE (fp32, vocabulary 64, hidden 64, 2 layers, 4 experts, top 2); saved to `folder` if given.

    It has no end-of-sequence token: only stop_token_ids and max_new_tokens end a request. Its weights are large
    enough for log-probs that differ from token to token.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=False, initializer_range=0.1, eos_token_id=None, bos_token_id=None, pad_token_id=None))
    model = model.float().eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


def hf_logprobs(model, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of tokens[1:] by Transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def hf_tensors(model) -> list[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor) of every weight; Transformers 5 fuses experts, checkpoints name them one by one."""
    tensors = []
    for name, weight in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(weight):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors.append((f"{stem}.{expert}.{part}.weight", half.contiguous()))
        elif leaf == "down_proj":
            tensors += [(f"{stem}.{expert}.down_proj.weight", one.contiguous()) for expert, one in enumerate(weight)]
        else:
            tensors.append((name, weight))
    return tensors


def join_weight_group(port: int, name: str, timeout: timedelta = timedelta(seconds=60)):
    """Rank 0 of 2 in the Gloo group that an engine joins as rank 1; blocks until it has."""
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timeout)
    store = torch.distributed.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        2, 0, [], distributed_c10d.Backend("gloo"), store, group_name=name, timeout=timeout)
    distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


@dataclass
class Engine:
    url: str
    model: object
    """Holds the weights that the server serves."""
    version: int
    """Version of those weights."""

    def client(self) -> EngineClient:
        return EngineClient(self.url, VOCAB, REQUEST_SECONDS)


async def until_sampling(client: EngineClient) -> None:
    """Until one request has been prefilled, so that it has at least one token."""
    deadline = time.monotonic() + 60
    while (await client._call("GET", "/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
        assert time.monotonic() < deadline, "the request did not start"
        await asyncio.sleep(0.01)


def recipe(model_dir: Path, *extra_args: str) -> recipes.RunConfig:
    return recipes.parse({"name": "test", "task": {"name": "none"}, "model": {"path": model_dir, "dtype": "float32"},
                          "engine": {"max_total_tokens": 4096, "extra_args": list(extra_args)}})


def engine_process(model_dir: Path, *extra_args: str) -> EngineProcess:
    """A CPU server on a free port, not yet started."""
    config, port = recipe(model_dir, *extra_args), free_port()
    command = engine_command(config, model_dir, port, gpu=False)
    return EngineProcess(command, engine_environment(gpu=False), f"http://127.0.0.1:{port}")


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended (a zombie has)."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
