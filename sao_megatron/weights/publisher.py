"""Publishes the policy's weights from their shards to every engine, over torch.distributed, while episodes run.

One publication: rank 0 pauses the engines and opens an update on each; then every owner rank in turn (see shards.py)
gathers its parameters bucket by bucket and broadcasts each bucket to all engines in one collective; the last bucket
carries the version; rank 0 closes the update and resumes. Each learner incarnation makes groups with fresh names: an
engine never accepts a name twice. SGLang answers success for names that it ignores, so `verify` compares log-probs.
"""
from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.config import PublicationSection
from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.trajectory.types import Trajectory
from sao_megatron.weights.shards import ShardMap


class Publisher:
    """Collective: every learner rank makes one and calls the same methods in the same order."""

    def __init__(self, shards: ShardMap, urls: list[str], engine_tp: int, vocab_size: int,
                 section: PublicationSection, backend: str):
        self.shards, self.urls, self.engine_tp, self.section = shards, urls, engine_tp, section
        self.vocab_size, self.backend = vocab_size, backend
        self.owners = shards.owners()
        self.rank = dist.get_rank()
        self._engines = _Engines(urls, vocab_size, section.timeout) if self.rank in {0, *self.owners} else None
        self.incarnation = ""
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def connect(self, start_timeout: float) -> None:
        """Wait for the engines (up to `start_timeout` seconds) and form one broadcast group per owner."""
        if self._engines is not None:
            deadline = time.monotonic() + start_timeout
            self._engines.run(lambda client, _: _healthy(client, deadline, start_timeout))
        names: list = [uuid.uuid4().hex[:12]]  # unlike any earlier learner's
        dist.broadcast_object_list(names, src=0)
        self.incarnation = names[0]
        for index, owner in enumerate(self.owners):
            if owner == self.rank:
                self._group_name = f"publish-{self.incarnation}-{index}"
                self._join_engines()
            dist.barrier()

    def _join_engines(self) -> None:
        address, deadline = _address_towards(self.urls), timedelta(seconds=self.section.timeout)
        world = 1 + len(self.urls) * self.engine_tp
        store = dist.TCPStore(address, 0, world, is_master=True, timeout=deadline, wait_for_workers=False)
        joining = self._engines.start(
            lambda client, i: client.init_weight_group(address, store.port, 1 + i * self.engine_tp, world,
                                                       self._group_name, self.backend))
        try:
            self._group = _second_group(store, world, self._group_name, self.backend, deadline)
        except Exception as error:
            raise RunError(f"the weight group of rank {self.rank} with the engines {', '.join(self.urls)} did not form "
                           f"within {self.section.timeout:.0f} s: {self._engines.failure(joining) or error}") from error
        self._engines.wait(joining)

    def publish(self, version: int) -> float:
        """Send all weights as `version`; returns seconds. Raises RunError naming the engine that failed."""
        begin = time.monotonic()
        if self.rank == 0:
            self._engines.run(lambda client, _: _open(client, self.section.mode))
        dist.barrier()
        for owner in self.owners:
            stream = self._with_head(self.shards.export(owner))
            if owner == self.rank:
                self._send(stream, version if owner == self.owners[-1] else None)
            else:
                for _ in stream:  # take part in the gathers
                    pass
            dist.barrier()
        if self.rank == 0:
            self._engines.run(lambda client, _: _close(client))
        dist.barrier()
        return time.monotonic() - begin

    def _with_head(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """A tied head is sent under its own name too: SGLang's Qwen3-MoE has one of its own whatever the config says,
        and the models that tie it ignore the name."""
        for name, tensor in stream:
            yield name, tensor
            if self.shards.tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    def _send(self, stream: Iterator[tuple[str, Tensor]], version: int | None) -> None:
        """Broadcast a stream bucket by bucket; the final bucket carries `version`, if this owner is the last."""
        buckets = _buckets(stream, self.section.bucket_mib * 2**20)
        bucket = next(buckets)
        while bucket:
            following = next(buckets, None)
            self._broadcast(bucket, version if following is None else None)
            bucket = following

    def _broadcast(self, bucket: list[tuple[str, Tensor]], version: int | None) -> None:
        bucket = sorted(bucket, key=lambda item: -item[1].element_size())  # keeps every offset aligned
        last = version is not None
        flush = last and self.section.mode != "in_place"  # refused while requests hold their cache
        receiving = self._engines.start(lambda client, _: client.update_weights(
            [name for name, _ in bucket], [str(t.dtype).removeprefix("torch.") for _, t in bucket],
            [list(t.shape) for _, t in bucket], self._group_name, last=last, weight_version=version,
            flush_cache=flush))
        data = torch.cat([t.contiguous().flatten().view(torch.uint8) for _, t in bucket])
        try:
            dist.broadcast(data, group=self._group, group_src=0)
        except Exception as error:
            raise RunError(f"rank {self.rank} could not send a bucket of {data.numel()} bytes to "
                           f"{', '.join(self.urls)}: {self._engines.failure(receiving) or error}") from error
        self._engines.wait(receiving)

    def verify(self, version: int, score: Callable[[list[Trajectory]], list[np.ndarray]]) -> float:
        """Compare the engines' log-probs of a probe with the learner's (`score`, collective, at temperature 1).

        Returns the largest mean difference; raises RunError if it exceeds `publication.tolerance` or an engine serves
        another version.
        """
        probes = _probes(self.vocab_size)
        expected = score(probes)
        if self.rank != 0:
            return 0.0
        tolerance, worst = self.section.tolerance, 0.0
        answers = self._engines.run(lambda client, _: _ask(client, probes))
        for url, (served, scores) in zip(self.urls, answers, strict=True):
            difference = max(float(np.abs(np.array(got) - want).mean())
                             for got, want in zip(scores, expected, strict=True))
            if served != version or not difference <= tolerance:
                raise RunError(f"engine {url} does not serve what was published: it reports version {served}, expected "
                               f"{version}; its log-probs of a probe differ by {difference:.2e} nats a token from the "
                               f"learner's (publication.tolerance {tolerance:g})")
            worst = max(worst, difference)
        return worst

    def close(self) -> None:
        """Leave the groups, so that the engines do not wait for a learner that has ended."""
        if self._group is not None:
            leaving = self._engines.start(lambda client, _: client.destroy_weight_group(self._group_name))
            dist.destroy_process_group(self._group)
            self._engines.wait(leaving)
        if self._engines is not None:
            self._engines.close()


async def _healthy(client: EngineClient, deadline: float, timeout: float) -> None:
    while not await client.healthy():
        if time.monotonic() > deadline:
            raise RunError(f"engine {client.url} was not healthy within {timeout:.0f} s (engine.start_timeout): see "
                           f"its log")
        await asyncio.sleep(0.2)


async def _open(client: EngineClient, mode: str) -> None:
    await client.pause(mode)
    try:
        await client.begin_weight_update()
    except RunError as error:
        if "already open" not in str(error):
            raise
        # By a learner that died in a publication: the engine holds parts of two versions, and has been paused since.
        await client.end_weight_update()
        await client.begin_weight_update()


async def _close(client: EngineClient) -> None:
    await client.end_weight_update()
    await client.resume()


async def _ask(client: EngineClient, probes: list[Trajectory]) -> tuple[int | None, list[list[float]]]:
    return await client.model_version(), [await client.score(probe.tokens.tolist()) for probe in probes]


class _Engines:
    """The engines' clients on an event loop of their own: requests go on while this thread is in a collective."""

    def __init__(self, urls: list[str], vocab_size: int, timeout: float):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="engine-requests").start()
        self._clients = [EngineClient(url, vocab_size, timeout) for url in urls]
        for client in self._clients:
            self._submit(client.__aenter__()).result()

    def start(self, request: Callable[[EngineClient, int], Coroutine]) -> list:
        """Send one request to every engine; returns futures."""
        return [self._submit(request(client, i)) for i, client in enumerate(self._clients)]

    def wait(self, futures: list) -> list[Any]:
        return [future.result() for future in futures]

    def run(self, request: Callable[[EngineClient, int], Coroutine]) -> list[Any]:
        return self.wait(self.start(request))

    def failure(self, futures: list) -> BaseException | None:
        """The first error among requests that have ended."""
        return next((f.exception() for f in futures if f.done() and f.exception()), None)

    def close(self) -> None:
        for client in self._clients:
            self._submit(client.__aexit__()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _submit(self, coroutine: Coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _buckets(stream: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut a stream of tensors into lists of at most `max_bytes` (a larger tensor has a list of its own)."""
    bucket, size = [], 0
    for name, tensor in stream:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _probes(vocab_size: int, count: int = 4, length: int = 48) -> list[Trajectory]:
    """Random token sequences, the same in every run, every token after the first to be scored."""
    rng = np.random.default_rng(0)
    scored = np.arange(length) > 0
    return [Trajectory(
        tokens=rng.integers(0, vocab_size, length), action_mask=scored, rollout_logprobs=np.where(scored, 0.0, np.nan),
        versions=np.where(scored, 0, -1), turns=np.zeros(length), rewards=np.zeros(length), prompt_id=f"probe-{i}",
        task="probe") for i in range(count)]


def _address_towards(urls: list[str]) -> str:
    """The address of this host on the route to the first engine: what the engines can reach us at."""
    from urllib.parse import urlsplit
    target = urlsplit(urls[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))  # sends nothing
        return probe.getsockname()[0]


def _second_group(store: dist.Store, world: int, name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a process group beside the learner's own, the counterpart of SGLang's init_custom_process_group.

    torch.distributed has no public call for a second, independent rendezvous, so this uses the helper behind
    init_process_group with a store of its own, prefixed as SGLang prefixes it.
    """
    from torch.distributed import distributed_c10d as c10d
    group, _ = c10d._new_process_group_helper(
        world, 0, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name, backend_options=None,
        timeout=timeout, device_id=None)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
