"""`micro_batches`: a deterministic, balanced partition of the global batch over data parallel ranks."""
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.trajectory.packing import context_share, micro_batches, mini_batches
from sao_megatron.trajectory.types import TrajectoryBuilder

quick = settings(max_examples=60, deadline=None)


def trajectory(prompt: int, actions: int):
    builder = TrajectoryBuilder([1] * prompt, "p", "t")
    builder.add_action([2] * actions, [-0.5] * actions, [0] * actions)
    return builder.build()


def segmented(segments):
    """A trajectory of several (prompt, actions) segments; tokens count up, so that each says where it is from."""
    builder, first = None, 1
    for prompt, actions in segments:
        part = TrajectoryBuilder(list(range(first, first + prompt)), "p", "t")
        part.add_action(list(range(first + prompt, first + prompt + actions)), [-0.5] * actions, [0] * actions)
        first += prompt + actions
        builder = builder or part
        if builder is not part:
            builder.add_segment(part)
    return builder.build()


plain = st.builds(trajectory, st.integers(1, 4), st.integers(1, 20))
rewritten = st.builds(segmented, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=2, max_size=3))
batches = st.lists(plain | rewritten, max_size=14)
cases = given(batch=batches, dp_size=st.integers(1, 5), budget=st.integers(1, 40), multiple=st.sampled_from([1, 2, 8]),
              equal=st.booleans())


def all_ranks(batch, dp_size, budget, multiple, equal):
    return [micro_batches(batch, dp_size, rank, budget, multiple, equal) for rank in range(dp_size)]


@quick
@cases
def test_property_micro_batches_are_a_partition(batch, dp_size, budget, multiple, equal):
    """Fails if a trajectory is trained twice or not at all, or the ranks would wait for one another for ever."""
    ranks = all_ranks(batch, dp_size, budget, multiple, equal)
    seen = [t.id for rank in ranks for micro in rank for t in micro.trajectories]
    assert sorted(seen) == sorted(t.id for t in batch)
    counts = {len(rank) for rank in ranks}
    assert len(counts) == 1 and counts.pop() >= 1


@quick
@cases
def test_property_micro_batches_respect_budget_and_multiple(batch, dp_size, budget, multiple, equal):
    """Fails if a micro-batch overruns its memory, its length cannot be split, or shapes differ where they must not."""
    every = [micro for rank in all_ranks(batch, dp_size, budget, multiple, equal) for micro in rank]
    for micro in every:
        held = sum(len(t) for t in micro.trajectories)
        assert held <= budget or len(micro.trajectories) == 1
        assert len(micro.tokens) > 0 and len(micro.tokens) % multiple == 0
        assert len(micro.tokens) >= held
        assert equal or len(micro.tokens) - max(held, 1) < multiple
        assert len(micro.tokens) == len(micro.positions) == micro.cu_seqlens[-1]
        assert (np.diff(micro.cu_seqlens) > 0).all()
    if equal:
        assert len({len(micro.tokens) for micro in every}) == 1


@quick
@cases
def test_property_micro_batches_are_deterministic(batch, dp_size, budget, multiple, equal):
    """Fails if two ranks that compute the partition for themselves could disagree."""
    def ids():
        return [[[t.id for t in micro.trajectories] for micro in rank]
                for rank in all_ranks(list(batch), dp_size, budget, multiple, equal)]
    assert ids() == ids()


@quick
@given(batches, st.integers(1, 5))
def test_property_ranks_carry_similar_loads(batch, dp_size):
    """Fails if loads differ by more than one trajectory, or a rank idles while another holds two."""
    loads, counts = [], []
    for rank in range(dp_size):
        members = [t for micro in micro_batches(batch, dp_size, rank, 40) for t in micro.trajectories]
        loads.append(sum(map(len, members)))
        counts.append(len(members))
    assert max(loads) - min(loads) <= max((len(t) for t in batch), default=0)
    assert min(counts) > 0 or max(counts) <= 1


@quick
@given(pairs=st.integers(0, 7), dp_size=st.integers(1, 4), budget=st.integers(1, 60), unit=st.integers(1, 3),
       seed=st.integers(0, 2**32 - 1))
def test_property_units_stay_together(pairs, dp_size, budget, unit, seed):
    """Fails if a preference's pair is split over micro-batches, or its order within one changes."""
    rng = np.random.default_rng(seed)
    batch = [trajectory(int(rng.integers(1, 4)), int(rng.integers(1, 20))) for _ in range(pairs * unit)]
    place = {t.id: i for i, t in enumerate(batch)}
    for rank in range(dp_size):
        for micro in micro_batches(batch, dp_size, rank, budget, unit=unit):
            members = [place[t.id] for t in micro.trajectories]
            for i in range(0, len(members), unit):
                assert members[i] % unit == 0 and members[i:i + unit] == [members[i] + k for k in range(unit)]


@quick
@given(batches, st.integers(1, 4), st.integers(1, 40), st.integers(1, 4))
def test_property_the_number_of_micro_batches_is_a_multiple(batch, dp_size, budget, multiple):
    """Fails if a virtual pipeline gets a number that its schedule refuses, or empty micro-batches in vain."""
    for rank in range(dp_size):
        fewest = len(micro_batches(batch, dp_size, rank, budget))
        found = micro_batches(batch, dp_size, rank, budget, count_multiple=multiple)
        assert len(found) % multiple == 0 and 0 <= len(found) - fewest < multiple
        assert sorted(t.id for micro in found for t in micro.trajectories) == sorted(
            t.id for micro in micro_batches(batch, dp_size, rank, budget) for t in micro.trajectories)


@quick
@given(groups=st.integers(0, 9), size=st.integers(1, 4), count=st.integers(1, 5))
def test_property_mini_batches_are_whole_groups_in_order(groups, size, count):
    """Fails if a mini-batch tears a group, loses a trajectory, or one is much larger than another."""
    batch = [trajectory(1, 1) for _ in range(groups * size)]
    parts = mini_batches(batch, count, size)
    assert len(parts) == count and [t.id for part in parts for t in part] == [t.id for t in batch]
    assert all(len(part) % size == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= size


@quick
@given(batches, st.integers(1, 4), st.sampled_from([1, 2]), st.integers(1, 40), st.booleans())
def test_property_context_shares_are_a_partition(batch, cp_size, tp, budget, equal):
    """Fails if a token or an action token is computed twice or not at all, or predicted from another one's output."""
    multiple = 2 * cp_size
    for micro in micro_batches(batch, 1, 0, budget, multiple * tp, equal, multiple):
        assert not (np.diff(micro.cu_seqlens) % multiple).any()
        shares = [context_share(micro, cp_size, rank) for rank in range(cp_size)]
        assert {len(share.rows) for share in shares} == {len(micro.tokens) // cp_size}
        assert sorted(np.concatenate([share.rows for share in shares])) == list(range(len(micro.tokens)))
        assert sorted(np.concatenate([share.held for share in shares])) == list(range(len(micro.targets)))
        assert sorted(np.concatenate([share.held_last for share in shares])) == list(range(len(micro.trajectories)))
        for share in shares:
            assert (share.rows[share.predict] == micro.predict[share.held]).all()
            assert (share.rows[share.last] == micro.last[share.held_last]).all()


@quick
@given(batches, st.integers(1, 4))
def test_property_context_ranks_carry_equal_loads(batch, cp_size):
    """Fails if one context parallel rank attends to more keys than another and the others wait for it."""
    for micro in micro_batches(batch, 1, 0, 40, 2 * cp_size, sequence_multiple=2 * cp_size):
        shares = [context_share(micro, cp_size, rank) for rank in range(cp_size)]
        assert len({int((micro.positions[share.rows] + 1).sum()) for share in shares}) == 1


@quick
@given(batches, st.sampled_from([1, 4, 8]))
def test_property_padding_moves_no_token(batch, multiple):
    """Fails if padding changes a token, an action is predicted from another token than the one before it, or a segment
    is not a sequence of its own: it would attend to what its engine never saw."""
    for micro in micro_batches(batch, 1, 0, 40, multiple, sequence_multiple=multiple):
        actions, sequence = iter(range(len(micro.targets))), 0
        for trajectory, last in zip(micro.trajectories, micro.last, strict=True):
            for tokens, mask in zip(np.split(trajectory.tokens, trajectory.segments[1:]),
                                    np.split(trajectory.action_mask, trajectory.segments[1:]), strict=True):
                start, sequence = micro.cu_seqlens[sequence], sequence + 1
                assert (micro.tokens[start:start + len(tokens)] == tokens).all()
                assert (micro.positions[start:start + len(tokens)] == np.arange(len(tokens))).all()
                for position in np.flatnonzero(mask):
                    action = next(actions)
                    assert micro.predict[action] == start + position - 1
                    assert micro.targets[action] == tokens[position]
            assert last == start + len(tokens) - 1
        assert next(actions, None) is None
