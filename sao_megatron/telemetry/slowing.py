"""alarms.on_alarm=slow: the lag that pacing may admit, lowered while an alarm about the samples' age is raised.

One version down when such an alarm is raised, and one more as long as it stays so, never below 0; when all are over, up
again in the same steps to what the recipe wants. Between two changes lies the time in which one shows: what is in
flight or ready was admitted before it, and has to be trained first.
"""
from __future__ import annotations

from collections.abc import Set

ABOUT_AGE = frozenset({"mask_share", "effective_sample_size", "discarded_mass", "lag_beyond_bound"})
"""Alarms that fresher samples cure. (Engine faults, gradients and rewards are not about age.)"""


class Slowing:
    def __init__(self, max_lag: int):
        """`max_lag` is the recipe's."""
        self.wanted = self.admitted = max_lag
        self.pause = 2 * (max_lag + 1)
        """Learner steps from one change to the next."""
        self._wait = 0

    def step(self, raised: Set[str]) -> bool:
        """Take note of the alarms that are raised after a learner step; True if `admitted` has changed."""
        self._wait = max(0, self._wait - 1)
        better = max(0, self.admitted - 1) if ABOUT_AGE & raised else min(self.wanted, self.admitted + 1)
        if self._wait or better == self.admitted:
            return False
        self.admitted, self._wait = better, self.pause
        return True
