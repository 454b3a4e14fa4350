"""What every learner rank is doing, told through the store at which the ranks met: no file system, no extra port.

A rank says so at every change of phase; the launcher, which hosts that store, sees when nobody has said anything for
long (hang.py).
"""
from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


class Beat(NamedTuple):
    rank: int
    node: str
    phase: str
    """What began then, such as `policy of step 12`."""
    count: int
    """Beats of this rank so far."""


class Heart:
    """A rank's side. Finds the store by MASTER_ADDR and MASTER_PORT, as torch.distributed did."""

    def __init__(self, rank: int):
        from torch.distributed import TCPStore
        self._store: TCPStore = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                         wait_for_workers=False)
        self._rank, self._count, self._node = rank, 0, socket.gethostname()

    def beat(self, phase: str) -> None:
        self._count += 1
        self._store.set(f"heartbeat/{self._rank}", json.dumps(Beat(self._rank, self._node, phase, self._count)))


def beats(store: Store, ranks: int) -> list[Beat]:
    """The last beat of each rank, by rank; [] until all have begun."""
    keys = [f"heartbeat/{rank}" for rank in range(ranks)]
    if not store.check(keys):
        return []
    return [Beat(*json.loads(value)) for value in store.multi_get(keys)]
