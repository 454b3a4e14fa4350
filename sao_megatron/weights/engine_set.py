"""The engines' clients for threads that spend their time in collectives."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError

Request = Callable[[EngineClient, int], Coroutine]
"""What to ask an engine: (its client, its index in `urls`)."""


class EngineSet:
    """Clients on an event loop of their own: requests go on while the calling thread waits for a collective."""

    def __init__(self, vocab_size: int, timeout: float):
        """`timeout`: seconds for one request."""
        self.urls: list[str] = []
        self._vocab_size, self._timeout = vocab_size, timeout
        self._clients: dict[str, EngineClient] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="engine-requests").start()

    def use(self, urls: list[str]) -> None:
        """Talk to these engines from now on."""
        self.urls = list(urls)
        for url in urls:
            if url not in self._clients:
                self._clients[url] = EngineClient(url, self._vocab_size, self._timeout)
                self._submit(self._clients[url].__aenter__()).result()

    def start(self, request: Request) -> list[Future]:
        """Send one request to every engine."""
        return [self._submit(request(self._clients[url], i)) for i, url in enumerate(self.urls)]

    def wait(self, futures: list[Future]) -> list[Any]:
        """Answers in the order of `urls`; raises the first error, after all have ended."""
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def run(self, request: Request) -> list[Any]:
        return self.wait(self.start(request))

    def try_all(self, request: Request) -> list[Any]:
        """As `run`, with the error itself in place of the answer of an engine that failed (RunError)."""
        futures = self.start(request)
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, RunError):
                raise error
        return [error or future.result() for error, future in zip(errors, futures, strict=True)]

    def close(self) -> None:
        for client in self._clients.values():
            self._submit(client.__aexit__()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _submit(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
