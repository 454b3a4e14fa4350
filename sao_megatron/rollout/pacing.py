"""Pacing: how many episodes may start, so that what is trained is fresh, and which comes next."""
from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from sao_megatron.errors import RunError
from sao_megatron.trajectory.store import Store

MOST_SKIPPED = 10_000
"""Groups in a row whose prompt is in quarantine."""


def admissible(live: int, steps: int, max_lag: int, batch: int) -> int:
    """How many more episodes may start now: (steps + max_lag + 1)·batch − live, floored at 0.

    `live` counts the trajectories in flight, ready, leased and trained (not the dropped and failed ones, which are
    never trained); `steps` is the number of learner steps in the *published* weights, those an episode that starts now
    samples from; `batch` is the number of trajectories of one step. The lag of a token trained in step t (the one that
    t steps precede) is t − (steps in the weights that sampled it).

    Bound. Number the live trajectories 0, 1, 2 … in order of admission: number k starts only if
    k ≤ (steps + max_lag + 1)·batch − 1. Let step t train it. Before that step, t·batch trajectories were trained: at
    most k of them have lower numbers, the others, say o, were admitted after k. So t·batch ≤ k + o.
    - Trained in admission order, o = 0: t ≤ floor(k / batch) ≤ steps + max_lag, so the lag is at most max_lag.
    - Overtaken by o later ones, because the episode took longer: lag ≤ max_lag + floor((o + batch − 1) / batch).
      Waiting for such stragglers would idle the learner; `Store.lease(max_token_lag=…)` drops the worst of them.
    Later tokens of an episode are sampled from the same or newer weights. A trajectory that is dropped gives its place
    back and moves those behind it forward, which only makes them fresher.

    No starvation. The learner takes the lowest seq first, so an episode that ends is in the next batch, however long it
    took: only max_token_lag can take it away. While it runs it holds one place of the window of (max_lag + 1)·batch, so
    when more than max_lag·batch episodes are slow the others cannot fill a batch, and the learner waits for the slow.

    Fairness. Prompts are admitted in the order in which the task deals them, and each admitted one that does not fail
    is trained: the tasks of a mixture are trained in the shares in which they are dealt, whatever their episodes take.

    Several controllers deal the groups in turn (group g belongs to controller g mod n). Each keeps its own live
    trajectories within `share(…)` of the window. The shares sum to the window, so that number k still starts only if it
    lies within the window, and the bound is the same.
    """
    return max(0, (steps + max_lag + 1) * batch - live)


def share(window: int, index: int, controllers: int) -> int:
    """Controller `index`'s part of `window` places; the parts of all sum to it."""
    return (window + controllers - 1 - index) // controllers


class Deal:
    """Which episode of this controller comes next, and how many of pacing's places its trajectories hold.

    A group is `size` rollouts of one prompt that are trained together, and `redundancy` more of which none is: the
    first `size` that end are the group. So a group holds at most `size` places, and its further members are free.
    First come the episodes that a dead controller had in flight, then the next free groups.
    """

    def __init__(self, store: Store, size: int, redundancy: int, index: int, controllers: int,
                 skip: Callable[[int], bool]):
        """`skip(group)`: whether the group's prompt is not to be played any more."""
        self.size, self.width, self.index, self.controllers = size, size + redundancy, index, controllers
        self._skip = skip
        self._flying: dict[int, set[int]] = defaultdict(set)
        self._ended: Counter[int] = Counter()
        self._places = 0
        self._again: deque[int] = deque()
        groups = store.groups(self.width)
        mine = [group for group in range(max(groups, default=-1) + 1) if group % controllers == index]
        self._outcomes = sum(groups[group][1] for group in mine if group in groups)
        for group in mine:
            seqs, outcomes, dropped = groups.get(group, ([], 0, False))
            if outcomes < size and not dropped and len(seqs) - outcomes <= redundancy:
                self._ended[group] = outcomes
                self._again += sorted(set(range(group * self.width, (group + 1) * self.width)) - set(seqs))
        self.next = (mine[-1] + controllers if mine else index) * self.width
        """The first seq that was never dealt."""

    def live(self, dropped: int) -> int:
        """Places that this controller's trajectories hold; `dropped` of them were."""
        return self._places + self._outcomes - dropped

    def next_is_free(self) -> bool:
        """Whether the next episode takes no place, since its group has as many as it trains."""
        return self._is_free(self._peek() // self.width)

    def start(self) -> tuple[int, int]:
        """(the seq of the episode that starts now, how many places it takes: 1 or 0)."""
        seq = self._peek()
        group = seq // self.width
        taken = not self._is_free(group)
        self._flying[group].add(seq)
        self._places += taken
        self._advance()
        return seq, int(taken)

    def end(self, seq: int, outcome: bool) -> bool:
        """Note that an episode ended, with a trajectory that has an outcome or without. Returns whether the group's
        others are now in excess, because it is complete."""
        group = seq // self.width
        self._places -= self._held(group)
        self._flying[group].discard(seq)
        self._ended[group] += outcome
        self._outcomes += outcome
        self._places += self._held(group)
        complete = self._ended[group] == self.size
        if not self._flying[group]:
            del self._flying[group]
            if (group + 1) * self.width <= self.next and all(seq // self.width != group for seq in self._again):
                del self._ended[group]
        return complete

    def complete(self, seq: int) -> bool:
        """Whether the group of an episode in flight has all that it trains."""
        return self._ended[seq // self.width] >= self.size

    def _held(self, group: int) -> int:
        return min(len(self._flying[group]), self.size - self._ended[group])

    def _is_free(self, group: int) -> bool:
        return len(self._flying.get(group, ())) >= self.size - self._ended[group]

    def _peek(self) -> int:
        for _ in range(MOST_SKIPPED * self.width):
            seq = self._again[0] if self._again else self.next
            group = seq // self.width
            if self._ended[group] < self.size and not self._skip(group):
                return seq
            self._advance()
        raise RunError(f"{MOST_SKIPPED} prompts in a row are in quarantine (rollout.quarantine_after): "
                       "see the controller's log for what failed")

    def _advance(self) -> None:
        if self._again:
            self._again.popleft()
            return
        self.next += 1
        if self.next % self.width == 0:
            self.next += (self.controllers - 1) * self.width
