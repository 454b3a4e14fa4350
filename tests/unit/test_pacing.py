"""Pacing: the bound that its docstring proves, on simulated rollouts and learners."""
import heapq
import random

import pytest

from sao_megatron.rollout.pacing import admissible


def simulate(max_lag: int, batch: int, concurrency: int, duration, steps: int = 60) -> list[tuple[int, int]]:
    """Roll out and train in event order; returns (lag, number that overtook it) of every trained trajectory.

    A step takes 1 unit of time and is published 0.3 later; an episode takes `duration()`; the learner leases the
    oldest ready ones.
    """
    time, admitted, done, published, publishing = 0.0, 0, 0, 0, []
    flying, ready, trained_at = [], [], {}
    sampled_from, busy_until = {}, None
    while done < steps:
        while len(flying) < concurrency and admissible(admitted, published, max_lag, batch) > 0:
            heapq.heappush(flying, (time + duration(), admitted))
            sampled_from[admitted] = published
            admitted += 1
        if busy_until is None and len(ready) >= batch:
            ready.sort()
            for number in ready[:batch]:
                trained_at[number] = done
            ready, busy_until = ready[batch:], time + 1
        events = [flying[0][0]] if flying else []
        events += [busy_until] if busy_until is not None else []
        events += [publishing[0][0]] if publishing else []
        time = min(events)
        while flying and flying[0][0] <= time:
            ready.append(heapq.heappop(flying)[1])
        if busy_until is not None and busy_until <= time:
            done, busy_until = done + 1, None
            publishing.append((time + 0.3, done))
        while publishing and publishing[0][0] <= time:
            published = publishing.pop(0)[1]
    return [(step - sampled_from[number], sum(other > number and at < step for other, at in trained_at.items()))
            for number, step in trained_at.items()]


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("speed", [0.05, 1.0, 4.0])
def test_lag_is_bounded_and_the_bound_is_used(max_lag, speed):
    """Fails if admission lets a trajectory grow older than max_lag, or is stricter than it need be."""
    batch = 8
    in_order = simulate(max_lag, batch, concurrency=batch * (max_lag + 1), duration=lambda: speed)
    lags = [lag for lag, overtaken_by in in_order if overtaken_by == 0]
    assert len(lags) == len(in_order) == 60 * batch
    assert max(lags) == max_lag


@pytest.mark.parametrize("seed", range(4))
def test_stragglers_stay_within_the_stated_bound(seed):
    """Fails if the docstring's bound for overtaken episodes is wrong."""
    rng, batch, max_lag = random.Random(seed), 8, 2
    trained = simulate(max_lag, batch, concurrency=24, duration=lambda: rng.paretovariate(1.1) * 0.3)
    assert any(overtaken_by > 0 for _, overtaken_by in trained)
    for lag, overtaken_by in trained:
        assert lag <= max_lag + (overtaken_by + batch - 1) // batch


def test_no_room_is_zero():
    """Fails if a full pipeline would admit a negative number or anything at all."""
    assert admissible(live=0, steps=0, max_lag=0, batch=4) == 4
    assert admissible(live=4, steps=0, max_lag=0, batch=4) == 0
    assert admissible(live=99, steps=0, max_lag=0, batch=4) == 0
    assert admissible(live=4, steps=1, max_lag=2, batch=4) == 12
