"""An engine inside the learner's process, for experiments at a fixed lag: it samples with weights that it is given.

It answers `generate` like the engine client (rollout/pool.py's Generator), so episodes, tasks and trajectories are
the run's own; tests/engine/test_sampler.py holds its log-probs and its distribution to SGLang's. Requests that are made
in one turn of the event loop become one batch. It keeps no cache: every token costs a forward pass over its prefix,
which is cheap only for short episodes. One rank, no parallelism.
"""
from __future__ import annotations

import asyncio
from typing import NamedTuple

import torch
from torch import Tensor

from sao_megatron.learner import runtime
from megatron.core.packed_seq_params import PackedSeqParams

from sao_megatron.config import ParallelSection
from sao_megatron.learner import model as models


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str
    """stop or length."""


class _Request(NamedTuple):
    prefix: list[int]
    limit: int
    temperature: float
    stops: list[int]
    answer: asyncio.Future


class Sampler:
    """`load` weights before the first request."""

    def __init__(self, hf_config: dict, dtype: torch.dtype, seed: int):
        self.model = models.build(hf_config, ParallelSection(), dtype)[0].eval().requires_grad_(False)
        self.generator = torch.Generator(runtime.device()).manual_seed(seed)
        self.version = -1
        self._waiting: list[_Request] = []

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Take a Megatron state dict of the same model; tokens are labelled `version` from now on."""
        self.model.load_state_dict(weights)
        self.version = version

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, temperature: float,
                       stop_token_ids: list[int]) -> Answer:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._answer_all)  # after the episodes that are ready to ask as well
        request = _Request(list(input_ids), max_new_tokens, temperature, list(stop_token_ids), loop.create_future())
        self._waiting.append(request)
        return await request.answer

    def _answer_all(self) -> None:
        requests, self._waiting = self._waiting, []
        sampled: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        live = list(range(len(requests)))
        while live:
            prefixes = [requests[i].prefix + sampled[i][0] for i in live]
            tokens, logprobs = self._sample(prefixes, [requests[i].temperature for i in live])
            for i, token, logprob in zip(live, tokens, logprobs, strict=True):
                sampled[i][0].append(token)
                sampled[i][1].append(logprob)
            ended = {i for i in live if sampled[i][0][-1] in requests[i].stops
                     or len(sampled[i][0]) == requests[i].limit}
            live = [i for i in live if i not in ended]
        for request, (tokens, logprobs) in zip(requests, sampled, strict=True):
            if not request.answer.done():
                finish = "stop" if tokens[-1] in request.stops else "length"
                request.answer.set_result(Answer(tokens, logprobs, [self.version] * len(tokens), finish))

    @torch.no_grad()
    def _sample(self, prefixes: list[list[int]], temperatures: list[float]) -> tuple[list[int], list[float]]:
        """The next token of each prefix, and its log-prob."""
        logits = self.next_logits(prefixes) / torch.tensor(temperatures, device=runtime.device())[:, None]
        logprobs = logits.log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
        return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()

    @torch.no_grad()
    def next_logits(self, prefixes: list[list[int]]) -> Tensor:
        """float32 [prefixes, vocabulary]: the logits that follow each prefix."""
        device = runtime.device()
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        ends = lengths.cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int().to(device)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                                 max_seqlen_q=int(lengths.max()), max_seqlen_kv=int(lengths.max()))
        tokens = torch.tensor([token for prefix in prefixes for token in prefix], device=device)[None]
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device)[None]

        def head(hidden_states, output_layer, output_weight, context, config, **_):
            weight = output_layer.weight if output_weight is None else output_weight
            return (hidden_states[ends.to(device) - 1, 0] @ weight.t()).float()
        return self.model(tokens, positions, None, packed_seq_params=packed, output_processor=head,
                          output_processor_context=None)
