"""Publishes the policy's weights from their shards to every engine, while episodes run.

One publication: rank 0 looks which engines live, pauses them and opens an update on each; the weights travel
(broadcast.py, or disk.py); rank 0 closes the update and resumes. An engine that is gone is left out, with a line in the
log; one that came back, or is new in the list, gets the weights before anyone samples from it. Whenever the engines
change, all groups are formed anew under fresh names: an engine never accepts a name twice, nor a group's member again.
"""
from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from sao_megatron.config import PublicationSection
from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.trajectory.types import Trajectory
from sao_megatron.weights import verification
from sao_megatron.weights.broadcast import Broadcast
from sao_megatron.weights.disk import Disk
from sao_megatron.weights.engine_set import EngineSet, Request
from sao_megatron.weights.shards import ShardMap

log = logging.getLogger("publisher")

ATTEMPTS = 5
"""Most tries of one publication, each without the engines that died in the one before."""
DYING_SECONDS = 15.0
"""For an engine that lost its scheduler to end (SGLang notices within 1 s, then collects dumps for 5 s)."""
LOOK_SECONDS = 0.5


class Publisher:
    """Collective: every learner rank makes one and calls the same methods in the same order."""

    def __init__(self, shards: ShardMap, find_engines: Callable[[], list[str]], engine_tp: int, vocab_size: int,
                 section: PublicationSection, backend: str, start_timeout: float, folder: Path, model_dir: Path,
                 unchanged: bool = False):
        """`find_engines` lists the engines' URLs, anew at every look for them; [] gives a publication up.
        `start_timeout`: seconds that the first one waits for all of them, later ones for any. `folder` and
        `model_dir`: see disk.Disk. `unchanged`: the first weights are those in `model_dir`, so that an engine that
        loads them by itself can be compared."""
        self.section, self.vocab_size, self.start_timeout = section, vocab_size, start_timeout
        self.find_engines, self.is_head = find_engines, dist.get_rank() == 0
        self.transport = (Disk(_WithHead(shards), folder, model_dir) if section.via == "disk"
                          else Broadcast(_WithHead(shards), engine_tp, section, backend))
        needs_engines = self.is_head or dist.get_rank() in self.transport.owners
        self._engines = EngineSet(vocab_size, section.timeout) if needs_engines else None
        self.model_dir, self._unchanged, self._tied = model_dir, unchanged, shards.tied
        self.incarnation = self._from_head(lambda: uuid.uuid4().hex[:12])  # unlike any earlier learner's
        self._groups = 0
        self._joined: list[str] = []
        """Engines that the transport reaches."""
        self._served: set[str] = set()
        """Engines that hold what this learner published last, as far as rank 0 knows."""
        self._published: int | None = None
        self.paused = 0.0
        """Seconds in which the engines sampled nothing for the last publication: from the first pause that was asked
        for to the last resumption that was confirmed, as rank 0 saw them."""

    # Publishing

    def publish(self, version: int) -> float | None:
        """Send all weights as `version` to the engines that do not serve it yet; returns seconds, None if given up.

        Repeated with the same version it serves engines that came (back) since. Engines that die meanwhile are left
        out. Raises RunError naming an engine that failed and lives, or if none is left.
        """
        begin, error = time.monotonic(), None
        for _ in range(ATTEMPTS):
            chosen = self._from_head(lambda: self._choose(version))
            if chosen is None:
                return None
            urls, new = chosen
            if not urls:
                return 0.0
            repeated = error is not None
            error = self._join(urls, new) or self._send(version, new, repeated)
            if error is None:
                self._published = version
                self._served |= set(urls)
                return time.monotonic() - begin
            self._leave()
            self._from_head(lambda: self._expect_a_death(error))  # noqa: B023
        raise RunError(f"version {version} could not be published in {ATTEMPTS} tries; the last: {error}")

    def _choose(self, version: int) -> tuple[list[str], list[str]] | None:
        """On rank 0: the living engines that need `version`, and those of them that are new to this learner; None to
        give up."""
        deadline = time.monotonic() + self.start_timeout
        while True:
            if not (urls := self.find_engines()):
                return None
            self._engines.use(urls)
            states = dict(zip(urls, self._engines.run(lambda client, _: _state(client)), strict=True))
            living = [url for url in urls if states[url] is not None]
            late = time.monotonic() > deadline
            if living and (self._published is not None or late or len(living) == len(urls)):
                break
            if late:
                raise RunError(f"no engine of the run is alive: {', '.join(urls)} did not answer /health within "
                               f"{self.start_timeout:.0f} s (engine.start_timeout): see their logs")
            time.sleep(LOOK_SECONDS)
        for url in set(urls if self._published is None else self._served) - set(living):
            log.warning("engine %s is gone: the run goes on without it until it is back", url)
        self._served &= set(living)
        new = [url for url in living if url not in self._served or states[url] != str(self._published)]
        return [url for url in living if version != self._published or url in new], new

    def _expect_a_death(self, error: str) -> None:
        """On rank 0, after a failed publication: return once an engine is seen to have died, or to give up; RunError if
        all live."""
        deadline = time.monotonic() + DYING_SECONDS
        while urls := self.find_engines():
            self._engines.use(urls)
            if not all(self._engines.run(lambda client, _: client.healthy())):
                break
            if time.monotonic() > deadline:
                raise RunError(error)
            time.sleep(LOOK_SECONDS)
        log.warning("a publication failed and is repeated with the engines that live: %s", error)

    def _join(self, urls: list[str], new: list[str]) -> str | None:
        """Have the transport reach exactly these engines; returns an error of any rank."""
        if urls != self._joined or new:
            self._leave()
        if self._engines is not None:
            self._engines.use(urls)
        if urls == self._joined:
            return None
        if self._published is not None:
            log.info("forming new groups with %s", ", ".join(urls))
        self._groups, self._joined = self._groups + 1, urls
        return _first(self.transport.join(self._engines, f"publish-{self.incarnation}-{self._groups}"))

    def _leave(self) -> None:
        if self._engines is not None:
            self._engines.use(self._joined)
        self.transport.leave()
        self._joined = []

    def _send(self, version: int, new: list[str], repeated: bool) -> str | None:
        """Pause, send (twice where coverage is to be proved and nothing better is at hand), resume; returns an error of
        any rank."""
        mode, session = self.section.mode, self.transport.needs_session
        flush = mode != "in_place"  # refused while requests hold their cache
        prove = bool(new and self.section.verify_every)
        began, own, error, checksums = time.monotonic(), None, None, []
        if prove and self._unchanged and self._published is None:
            own, error = self._load_by_itself(new[0], version, flush)
        error = error or self._ask_all(lambda client, _: _open(client, mode, session, repeated or client.url in new))
        for _ in range(2 if prove and own is None else 1):
            if prove:
                error = error or self._ask_all(lambda client, _: _scramble(client, client.url in new))
            error = error or _first(self.transport.send(version, flush))
            if prove and not error:
                checksums.append(self._from_head(lambda: self._checksums(new)))
        error = error or self._ask_all(lambda client, _: _close(client, session))
        self.paused = time.monotonic() - began
        if prove and not error:
            for url, found in checksums[-1].items():
                if own is not None:
                    verification.check_own_loading(url, new[0], self.model_dir, own, found, self._tied)
                elif url in checksums[0]:
                    verification.check_coverage(url, checksums[0][url], found)
        return error

    def _load_by_itself(self, url: str, version: int, flush: bool) -> tuple[verification.Checksums | None, str | None]:
        """What an engine holds after loading `model_dir` with its own code, over random numbers; or an error."""
        async def load(client: EngineClient, _: int) -> verification.Checksums:
            await client.pause(self.section.mode)
            await client.scramble_weights()
            await client.load_weights(str(self.model_dir.resolve()), version, flush_cache=flush)
            return await client.checksums()

        def ask() -> verification.Checksums:
            log.info("engine %s loads %s by itself: what is published must be the same", url, self.model_dir)
            engine = EngineSet(self.vocab_size, self.start_timeout)  # as long as it would take at its start
            try:
                engine.use([url])
                return engine.run(load)[0]
            finally:
                engine.close()
        try:
            return self._from_head(ask), None
        except RunError as error:
            return None, str(error)

    def _ask_all(self, request: Request) -> str | None:
        """Ask every engine from rank 0; returns the first error, on all ranks."""
        try:
            self._from_head(lambda: self._engines.run(request))
        except RunError as error:
            return str(error)
        return None

    def _from_head(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on rank 0, or the RunError that it raises there, on all ranks."""
        message: list = [None, None]
        if self.is_head:
            try:
                message[0] = call()
            except RunError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            raise RunError(message[1])
        return message[0]

    # Verifying

    def _checksums(self, urls: list[str]) -> dict[str, verification.Checksums]:
        """On rank 0, by URL, of those engines that answer."""
        self._engines.use(urls)
        answers = self._engines.try_all(lambda client, _: client.checksums())
        self._engines.use(self._joined)
        return {url: answer for url, answer in zip(urls, answers, strict=True) if not isinstance(answer, RunError)}

    def verify(self, version: int, score: Callable[[list[Trajectory]], list[np.ndarray]]) -> float:
        """Hold the engines' weights to each other and their log-probs of a probe to the learner's (`score`,
        collective, at temperature 1).

        Returns the largest mean difference; raises RunError if it exceeds `publication.tolerance`, if an engine serves
        another version, or if two engines differ in a tensor. Engines that died meanwhile are left out.
        """
        probes = verification.probes(self.vocab_size)
        expected = score(probes)
        return self._from_head(lambda: self._compare(version, probes, expected))

    def _compare(self, version: int, probes: list[Trajectory], expected: list[np.ndarray]) -> float:
        urls = sorted(self._served)
        self._engines.use(urls)
        answers = self._engines.try_all(lambda client, _: verification.ask(client, probes))
        living = self._engines.run(lambda client, _: client.healthy())
        self._engines.use(self._joined)
        for answer, lives in zip(answers, living, strict=True):
            if isinstance(answer, RunError) and lives:
                raise answer
        answers = {url: answer for url, answer in zip(urls, answers, strict=True) if not isinstance(answer, RunError)}
        if not answers:
            log.warning("version %d was not verified: all engines have died since it was published", version)
        verification.check_agreement(list(answers), [checksums for _, _, checksums in answers.values()])
        return max((verification.check_meaning(url, served, version, scores, expected, self.section.tolerance)
                    for url, (served, scores, _) in answers.items()), default=0.0)

    def close(self) -> None:
        """Leave the groups, so that the engines do not wait for a learner that has ended."""
        self._leave()
        if self._engines is not None:
            self._engines.close()


class _WithHead:
    """A ShardMap that exports a tied head under its own name too: SGLang's Qwen3-MoE has one of its own whatever the
    config says, and the models that tie it ignore the name."""

    def __init__(self, shards: ShardMap):
        self._shards, self.owners = shards, shards.owners

    def export(self, owner: int | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._shards.export(owner):
            yield name, tensor
            if self._shards.tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor


async def _state(client: EngineClient) -> str | None:
    """The version that an engine serves ("None" before the first); None if it does not live."""
    try:
        return str(await client.model_version()) if await client.healthy() else None
    except RunError:
        return None


async def _open(client: EngineClient, mode: str, session: bool, unknown: bool) -> None:
    """Pause; `unknown`: what state the engine is in: a learner may have died, or failed, in the middle."""
    await client.pause(mode)
    if session and unknown:
        with suppress(RunError):  # it has no open update
            await client.end_weight_update()
    if session:
        await client.begin_weight_update()


async def _scramble(client: EngineClient, mine: bool) -> None:
    if mine:
        await client.scramble_weights()


async def _close(client: EngineClient, session: bool) -> None:
    if session:
        await client.end_weight_update()
    await client.resume()


def _first(error: str | None) -> str | None:
    """The first error of any rank. Collective."""
    errors: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((e for e in errors if e is not None), None)
