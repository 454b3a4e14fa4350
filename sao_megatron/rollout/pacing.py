"""Pacing: how many episodes may start, so that what is trained is fresh. Pure arithmetic."""
from __future__ import annotations


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
    """
    return max(0, (steps + max_lag + 1) * batch - live)
