"""Prompts that fail again and again while others work: they are not played any more, and are counted."""
from __future__ import annotations

import logging
from collections import defaultdict

from sao_megatron.trajectory.store import Store

log = logging.getLogger("controller")
KEY = "quarantined"
"""Of the store's state: the ids of the prompts."""


class Quarantine:
    """A prompt enters when its episodes failed in `limit` groups with no success of it between them (0 = never)."""

    def __init__(self, store: Store, limit: int):
        self._store, self._limit = store, limit
        self.ids: set[str] = set(store.get_state(KEY, []))
        self._failed_in: dict[str, set[int]] = defaultdict(set)

    def note(self, prompt_id: str, group: int, error: str | None) -> None:
        """An episode of the prompt ended; `error` says why it failed."""
        if error is None:
            self._failed_in.pop(prompt_id, None)
            return
        self._failed_in[prompt_id].add(group)
        if self._limit and len(self._failed_in[prompt_id]) >= self._limit and prompt_id not in self.ids:
            self.ids.add(prompt_id)
            self._store.set_state(KEY, sorted(self.ids))
            log.warning("prompt %s failed in %d groups and is not played any more (rollout.quarantine_after): %s",
                        prompt_id, self._limit, error)
