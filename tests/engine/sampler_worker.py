"""The in-process sampler of test_sampler.py: samples, and scores what the engine sampled. (Transformers must not run in
this process: it computes wrongly beside the CPU shim of Megatron.)"""
from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sao_megatron.learner import runtime
import torch

from sao_megatron.config import ParallelSection
from sao_megatron.learner.sampler import Sampler
from sao_megatron.weights import hf
from sao_megatron.weights.shards import ShardMap


def main(folder: Path) -> None:
    order = json.loads((folder / "order.json").read_text())
    runtime.initialize(ParallelSection(), seed=0)
    config = hf.read_config(folder / "model")
    sampler = Sampler(config, torch.float32, seed=7)
    ShardMap([sampler.model], config).load(hf.SafetensorsFolder(folder / "model"))
    sampler.load(dict(sampler.model.state_dict()), version=5)

    async def sample() -> list:
        async def one(prompt, limit, temperature, stops):
            answer = await sampler.generate(prompt, max_new_tokens=limit, temperature=temperature, stop_token_ids=stops)
            return answer._asdict()
        return await asyncio.gather(*(one(*request) for request in order["requests"]))
    scores = []
    for tokens in order["score"]:
        logits = sampler.next_logits([tokens[:i] for i in range(1, len(tokens))])
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    (folder / "result.json").write_text(json.dumps(dict(answers=asyncio.run(sample()), scores=scores)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
