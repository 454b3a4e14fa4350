"""Weights from their owners' ranks to the engines' memory: buckets, one broadcast each.

Every owner rank (see shards.py) is rank 0 of a group of its own with all engines, so that nothing passes through
another rank. All ranks gather at the same time, each TP group its own parameters, and an owner's bucket leaves in a
thread while the next one is gathered. The buckets themselves leave one at a time, in the order in which they are ready:
SGLang handles one update at a time (its requests queue, its scheduler receives and loads in one thread), and two
engines that took two owners' buckets in different order would wait for each other for ever. Nothing is lost by it: each
rank of an engine receives every byte of the model over its own link, which one sender keeps busy.
"""
from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.config import PublicationSection
from sao_megatron.errors import RunError
from sao_megatron.weights.engine_set import EngineSet

Bucket = list[tuple[str, Tensor]]
"""HF names and full tensors that travel together."""


PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
"""Of multi-latent attention. SGLang 0.5.23 fuses the two of a layer, and drops one that comes without the other in the
same request, saying that all went well (its models/deepseek_common/deepseek_weight_loader.py, `cached_a_proj`)."""


def cut(stream: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of tensors into lists of at most `max_bytes`. A larger tensor has a list of its own, and what SGLang
    must get together is not cut apart."""
    bucket, size = [], 0
    for together in _paired(stream):
        more = sum(tensor.nbytes for _, tensor in together)
        if bucket and size + more > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += together
        size += more
    if bucket:
        yield bucket


def _paired(stream: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Each tensor alone, but a PAIR together, when its second has come."""
    first: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in stream:
        own, other = next(((a, b) for a, b in (PAIR, PAIR[::-1]) if f".{a}." in name), ("", ""))
        if not own:
            yield [(name, tensor)]
        elif held := first.pop(name.replace(own, other), None):
            yield [held, (name, tensor)]
        else:
            first[name] = name, tensor
    yield from ([held] for held in first.values())  # none, but for a model that has only one of the two


class Turns:
    """A queue of the owner ranks: first come, first served. Threads of all ranks share it through a TCP store."""

    def __init__(self, store: dist.TCPStore, timeout: float):
        self._store, self._timeout = store, timedelta(seconds=timeout)

    @contextmanager
    def turn(self, who: str) -> Iterator[bool]:
        """Wait for the turn and hold it. False if a sender before has failed, so that there is no use in sending."""
        ticket = self._store.add("tickets", 1)
        try:
            self._wait_for(ticket - 1, who)
            self._store.set("holder", who)
            yield not self._store.check(["failed"])
        except BaseException:
            self._store.set("failed", who)
            raise
        finally:
            self._store.set(f"done-{ticket}", "")

    def _wait_for(self, ticket: int, who: str) -> None:
        if not ticket:
            return
        try:
            self._store.wait([f"done-{ticket}"], self._timeout)
        except dist.DistStoreError:
            raise RunError(f"{who} waited {self._timeout.total_seconds():.0f} s (publication.timeout) for its turn, "
                           f"behind {self._store.get('holder').decode()}") from None
        self._store.delete_key(f"done-{ticket}")


class Broadcast:
    """The collective way of publication: every learner rank makes one and calls the same methods in the same order."""

    needs_session = True
    """Updates travel between SGLang's begin_weight_update and end_weight_update."""

    def __init__(self, shards, engine_tp: int, section: PublicationSection, backend: str):
        """`shards`: a ShardMap, or what exports like one."""
        self.shards, self.engine_tp, self.section, self.backend = shards, engine_tp, section, backend
        self.owners = shards.owners()
        self.rank = dist.get_rank()
        self.seconds: Counter[str] = Counter()
        """Of the last publication on this rank: gather; blocked (a bucket is ready, the one before not yet gone).
        In the sending thread: turn (waiting for other owners), send (the broadcast), load (until all answered)."""
        self.bytes_sent = 0
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        # A thread starts on the first GPU, whatever this one's is.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = ThreadPoolExecutor(
            1, "send-weights", initializer=lambda: device is not None and torch.accelerator.set_device_index(device))
        self._buckets = 0
        self._buffer: Tensor | None = None

    # Groups

    def join(self, engines: EngineSet | None, name: str) -> str | None:
        """Form one group of each owner with the engines (of the same urls on all owners); returns this rank's error.

        `name` begins the groups' names and must never have been used with one of these engines.
        """
        error = None
        self._turns = Turns(_shared_store(self.section.timeout), self.section.timeout)
        for index, owner in enumerate(self.owners):
            if owner == self.rank:
                self._engines, self._name = engines, f"{name}-{index}"
                try:
                    self._form_group()
                except RunError as failure:
                    error = str(failure)
            dist.barrier()
        return error

    def _form_group(self) -> None:
        urls, deadline = self._engines.urls, timedelta(seconds=self.section.timeout)
        address, world = _address_towards(urls), 1 + len(urls) * self.engine_tp
        store = dist.TCPStore(address, 0, world, is_master=True, timeout=deadline, wait_for_workers=False)
        joining = self._engines.start(
            lambda client, i: client.init_weight_group(address, store.port, 1 + i * self.engine_tp, world, self._name,
                                                       self.backend))
        try:
            self._group = group_beside(store, 0, world, self._name, self.backend, deadline)
        except Exception as error:
            refused = next((f.exception() for f in joining if f.done() and f.exception()), None)
            raise RunError(f"the weight group of rank {self.rank} with the engines {', '.join(urls)} did not form "
                           f"within {self.section.timeout:.0f} s (publication.timeout): {refused or error}") from error
        self._engines.wait(joining)

    def leave(self) -> None:
        """Give up the groups, also with engines that are gone: whoever waits in one gets an error."""
        if self._group is None:
            return
        with suppress(Exception):  # it may have failed already
            dist.destroy_process_group(self._group)
        self._engines.try_all(lambda client, _: client.destroy_weight_group(self._name))
        self._group = None

    # Sending

    def send(self, version: int, flush: bool) -> str | None:
        """Send all weights; the last bucket carries `version` and, if `flush`, empties the engines' caches.

        Returns this rank's error. A rank whose sending has failed goes on gathering, for the others.
        """
        self.seconds, self.bytes_sent, self._buckets = Counter(), 0, 0
        finisher = self.rank == self.owners[0]
        errors, held, sending = [], None, None
        stream = iter(cut(self.shards.export(), int(self.section.bucket_mib * 2**20)))
        while (bucket := self._timed("gather", next, stream, None)) is not None:
            if finisher:  # the version travels with the very last bucket of all owners
                bucket, held = held, bucket
            if bucket is not None:
                errors += self._timed("blocked", _ended, sending)
                sending = None if errors else self._thread.submit(self._send, bucket)
        errors += self._timed("blocked", _ended, sending)
        dist.barrier()  # all others have sent
        if held is not None and not errors:
            errors += _ended(self._thread.submit(self._send, held, version, flush))
        self._buffer = None
        return errors[0] if errors else None

    def _timed(self, phase: str, call, *arguments):
        begin = time.monotonic()
        try:
            return call(*arguments)
        finally:
            self.seconds[phase] += time.monotonic() - begin

    def _send(self, bucket: Bucket, version: int | None = None, flush: bool = False) -> None:
        """In the sending thread: one bucket to all engines. Returns when they have loaded it."""
        bucket = sorted(bucket, key=lambda item: -item[1].element_size())  # keeps every offset aligned
        data = self._joined([t.contiguous().flatten().view(torch.uint8) for _, t in bucket])
        self._buckets += 1
        who = f"rank {self.rank}, bucket {self._buckets} ({data.numel()} bytes from {bucket[0][0]} on)"
        begin = time.monotonic()
        with self._turns.turn(who) as useful:
            self.seconds["turn"] += time.monotonic() - begin
            if useful:
                self._broadcast(bucket, data, who, version, flush)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Their bytes one after the other, in memory that all buckets of a publication share: new memory costs a CPU
        as much as sending what is in it."""
        size = sum(part.numel() for part in parts)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=parts[0].device)
        return torch.cat(parts, out=self._buffer[:size])

    def _broadcast(self, bucket: Bucket, data: Tensor, who: str, version: int | None, flush: bool) -> None:
        names, dtypes = [name for name, _ in bucket], [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        shapes = [list(t.shape) for _, t in bucket]
        begin = time.monotonic()
        receiving = self._engines.start(lambda client, _: client.update_weights(
            names, dtypes, shapes, self._name, last=version is not None, weight_version=version, flush_cache=flush))
        try:
            work = dist.broadcast(data, group=self._group, group_src=0, async_op=True)
            work.wait(timedelta(seconds=self.section.timeout))
        except Exception as error:
            with suppress(Exception):  # the engines that still wait for this bucket get an error
                dist.destroy_process_group(self._group)
            answers = [f.exception() for f in receiving]
            raise RunError(f"{who} could not be sent within {self.section.timeout:.0f} s (publication.timeout) to "
                           f"{', '.join(self._engines.urls)}: "
                           f"{next((a for a in answers if a), None) or error}") from error
        sent = time.monotonic()
        try:
            self._engines.wait(receiving)
        except RunError as error:
            raise RunError(f"{who} was not loaded: {error}") from error
        self.seconds["send"] += sent - begin
        self.seconds["load"] += time.monotonic() - sent
        self.bytes_sent += data.numel()


def _ended(sending: Future | None) -> list[str]:
    """The error of a bucket that is on its way, once it has ended: [] or [sentence]."""
    if sending is None or (error := sending.exception()) is None:
        return []
    if not isinstance(error, RunError):
        raise error
    return [str(error)]


def _shared_store(timeout: float) -> dist.TCPStore:
    """A TCP store on rank 0, at the address where the ranks found each other. Collective."""
    port: list = [None]
    connect = partial(dist.TCPStore, os.environ["MASTER_ADDR"], wait_for_workers=False,
                      timeout=timedelta(seconds=timeout))
    if dist.get_rank() == 0:
        store = connect(0, is_master=True)
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    if dist.get_rank():
        store = connect(port[0], is_master=False)
    dist.barrier()
    return store


def _address_towards(urls: list[str]) -> str:
    """The address of this host on the route to the first engine: what the engines can reach us at."""
    target = urlsplit(urls[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))  # sends nothing
        return probe.getsockname()[0]


def group_beside(store: dist.Store, rank: int, world: int, name: str, backend: str,
                 timeout: timedelta) -> dist.ProcessGroup:
    """A process group beside the learner's own, the counterpart of SGLang's init_custom_process_group.

    torch.distributed has no public call for a second, independent rendezvous, so this uses the helper behind
    init_process_group with a store of its own, prefixed as SGLang prefixes it.
    """
    from torch.distributed import distributed_c10d as c10d
    group, _ = c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name, backend_options=None,
        timeout=timeout, device_id=None)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
