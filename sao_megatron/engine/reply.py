"""What SGLang answers, read and checked: a reply of /generate becomes a Generation, an error body a sentence."""
from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
from pybase64 import b64decode

from sao_megatron.trajectory.routing import Routing, narrow

METRICS = {
    "running": ("sglang:num_running_reqs", sum), "waiting": ("sglang:num_queue_reqs", sum),
    "tokens_per_second": ("sglang:gen_throughput", sum), "cache_used": ("sglang:token_usage", fmean),
    "cache_hits": ("sglang:cache_hit_rate", fmean)}
"""Our name -> (SGLang's, how its schedulers' numbers make one)."""
UNPUBLISHED = "default"  # SGLang's name for the weights that it started with


@dataclass(frozen=True)
class Generation:
    """What one request sampled: three lists of one length, and why it ended."""

    tokens: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Of each token at the request's temperature, under the weights that sampled it."""
    versions: list[int]
    """Weight version that sampled each token."""
    finish: Literal["stop", "length", "abort"]
    """abort: the engine ended it early. A running request keeps its tokens so far; SGLang drops those of a request that
    a pause had retracted, and one that still waited has none."""
    routing: Routing | None = None
    """If asked for, and any token was sampled: one row per token from `routing_from` to the last but one."""


def read_generation(reply: dict, routing_from: int | None = None) -> Generation:
    """Read one reply of /generate; KeyError, TypeError or ValueError where it is not in SGLang's form.

    `routing_from`: position of the first token whose routing was asked for; None if none was.
    """
    tokens, meta = reply["output_ids"], reply["meta_info"]
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {finish!r}")
    if finish == "abort" and not tokens:  # it never ran: the reply has none of the fields below
        return Generation([], [], [], finish)
    entries = meta["output_token_logprobs"]
    # Not the echoed ids themselves: SGLang echoes the last id of the vocabulary as 0.
    if len(entries) != len(tokens):
        raise ValueError(f"{len(entries)} log-probs do not answer its {len(tokens)} tokens")
    logprobs = [float(logprob) for logprob, _, _ in entries]
    versions = _versions(meta["weight_versions"], len(tokens))
    routing = None if routing_from is None else _routing(meta, len(tokens), routing_from)
    return Generation(tokens, logprobs, versions, finish, routing)


def _routing(meta: dict, sampled: int, start: int) -> Routing:
    """Rows of the positions [start, prompt + sampled − 1).

    A request that was retracted is computed anew, and SGLang then has the routing of that: under other weights, or at
    least in another batch, than sampled its earlier tokens. Only rows behind the retraction are recorded. It lies where
    the weight version changes; if there were more retractions than changes nobody knows where they were.
    """
    if "routed_experts" not in meta:
        raise ValueError("it has no routed_experts: start the engine with --enable-return-routed-experts")
    prompt, spans, retractions = meta["prompt_tokens"], meta["weight_versions"], meta["num_retractions"]
    rows = prompt + sampled - 1 - start
    flat = np.frombuffer(b64decode(meta["routed_experts"]), "<i4")
    if rows < 1 or not len(flat) or len(flat) % rows:
        raise ValueError(f"{len(flat)} routed experts do not answer {rows} tokens")
    kept = start
    if retractions:
        kept = prompt + (sampled if retractions > len(spans) - 1 else spans[-1]["start"]) - 1
    return Routing(narrow(flat.reshape(rows, -1)), np.arange(start, start + rows) >= kept)


def _versions(spans: list[dict], length: int) -> list[int]:
    """One version per token from SGLang's spans [start, end), which must cover 0 … length in order."""
    versions: list[int] = []
    for span in spans:
        if span["version"] == UNPUBLISHED:
            raise ValueError("it sampled with its starting weights: publish a version first")
        if span["start"] != len(versions):
            raise ValueError("its weight versions leave a gap")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != length:
        raise ValueError(f"its weight versions cover {len(versions)} of {length} tokens")
    return versions


def check_batch(replies: list[dict], length: int) -> None:
    """Raise ValueError unless a POST of `length` prompts brought as many replies."""
    if not isinstance(replies, list) or len(replies) != length:
        raise ValueError(f"expected a list of {length} replies")


def read_scores(reply: dict, tokens: list[int]) -> list[float]:
    """Log-probs of tokens[1:] from a reply of /generate with logprob_start_len=0; raises like `read_generation`."""
    entries = reply["meta_info"]["input_token_logprobs"]
    # Not the echoed ids themselves: SGLang echoes the last id of the vocabulary as 0.
    if len(entries) != len(tokens):
        raise ValueError(f"{len(entries)} log-probs do not answer the {len(tokens)} tokens sent")
    return [float(logprob) for logprob, _, _ in entries[1:]]


def read_version(reply: dict) -> int | None:
    """The live version from a reply of /model_info; raises like `read_generation`."""
    version = reply["weight_version"]
    return None if version == UNPUBLISHED else int(version)


def read_checksums(reply: dict) -> dict[str, str]:
    """Hashes by "<rank>:<tensor>" from a reply of /weights_checker; raises like `read_generation`."""
    return {f"{rank}:{name}": value for rank, part in enumerate(reply["ranks"])
            for name, value in part["checksums"].items()}


def read_metrics(reply: str) -> dict[str, float]:
    """The numbers of METRICS in Prometheus' text form; raises like `read_generation`. Of requests there is a series for
    all, with no priority, and one for each priority, which would count them twice."""
    found = {}
    for name, (theirs, combine) in METRICS.items():
        if values := re.findall(rf'^{theirs}(?:\{{(?!.*priority="[^"]).*\}})? (\S+)$', reply, re.MULTILINE):
            found[name] = combine(map(float, values))
    return found


def error_message(reply: object) -> str:
    """SGLang has four forms of error body."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    return str(reply).strip()[:500]
