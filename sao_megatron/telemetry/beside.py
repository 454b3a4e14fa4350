"""A thread beside the learner for what a step need not wait for: token records, pictures, files on slow disks."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 8
"""Calls; who makes another then waits for the oldest."""


class Beside:
    """Makes calls one after the other in a thread of its own. What a call raises is raised by a later `call` or `wait`.

    The process does not end before the calls have been made, unless it is killed.
    """

    def __init__(self):
        self._thread, self._calls = ThreadPoolExecutor(1, "beside"), deque[Future]()

    def call(self, function: Callable, *arguments) -> None:
        self._calls.append(self._thread.submit(function, *arguments))
        while self._calls and (self._calls[0].done() or len(self._calls) > MOST_WAITING):
            self._calls.popleft().result()

    def wait(self) -> None:
        """Until all calls have been made."""
        while self._calls:
            self._calls.popleft().result()
