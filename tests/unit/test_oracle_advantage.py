"""Skip-observation GAE, returns and baselines: flat action arrays through `pack` against whole token sequences."""
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_megatron.algorithm.advantage import (
    RunningMean,
    adaptive_lambda,
    gae,
    group_advantage,
    preference,
    returns,
    spread,
    step_gae,
    whitened,
)
from sao_megatron.trajectory.packing import pack
from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder

quick = settings(max_examples=60, deadline=None)


@st.composite
def trajectories(draw) -> Trajectory:
    """Any turn structure: one-token prompts and actions, turns without any action token, empty observations,
    observations (or none) at the end, rewards anywhere, or no reward at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    builder = TrajectoryBuilder(rng.integers(0, 50, draw(st.integers(1, 5))).tolist(), "p", "t")
    first = draw(st.tuples(st.integers(1, 6), st.integers(0, 4), st.booleans()))
    for length, observed, rewarded in [first, *draw(st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 4), st.booleans()), max_size=4))]:
        builder.add_action(rng.integers(0, 50, length).tolist(), (-rng.random(length)).tolist(), [3] * length)
        builder.add_observation(rng.integers(0, 50, observed).tolist())
        if rewarded:  # after the observation: the reward still belongs to the last action token
            builder.add_reward(float(np.float32(rng.normal())))
    return builder.build()


batches = st.lists(trajectories(), min_size=1, max_size=5)


def packed_with_values(batch: list[Trajectory], seed: int, padding: int = 3):
    """(MicroBatch, head outputs float32 [T] over the packed row, the same cut into one array per trajectory)."""
    total = sum(map(len, batch))
    packed = pack(batch, total + padding)
    head = np.random.default_rng(seed).normal(size=total + padding).astype(np.float32)
    return packed, head, np.split(head[:total], np.cumsum([len(t) for t in batch])[:-1])


@quick
@given(batches, st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_property_pack_equals_oracle(batch, seed, padding):
    """Fails if a value, target or reward is read from the wrong packed position."""
    packed, head, heads = packed_with_values(batch, seed, padding)
    before = [v for t, h in zip(batch, heads, strict=True) for v in oracles.state_values(t.action_mask, h, False)[:-1]]
    np.testing.assert_array_equal(head[packed.predict], np.array(before, np.float32))
    np.testing.assert_array_equal(packed.tokens[packed.predict + 1], packed.targets)
    rewards = [r for t in batch for r in oracles.action_rewards(t.action_mask, t.rewards)]
    np.testing.assert_array_equal(packed.rewards, np.array(rewards, np.float32))
    np.testing.assert_array_equal(head[packed.last], [h[-1] for h in heads])
    assert packed.lengths.tolist() == [t.num_actions for t in batch]
    np.testing.assert_array_equal(packed.positions[packed.cu_seqlens[:-1]], 0)
    for start, trajectory in zip(packed.cu_seqlens, batch, strict=False):
        np.testing.assert_array_equal(packed.tokens[start:start + len(trajectory)], trajectory.tokens)
        np.testing.assert_array_equal(packed.positions[start:start + len(trajectory)], np.arange(len(trajectory)))
    assert len(packed.tokens) == packed.cu_seqlens[-1] == sum(map(len, batch)) + padding


@quick
@given(batches, st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.5, 0.05, 20.0]),
       st.booleans())
def test_property_gae_equals_oracle(batch, seed, gamma, alpha, bootstrap):
    """Fails if GAE counts observation tokens as states, leaks across trajectories or misplaces the end's value."""
    packed, head, heads = packed_with_values(batch, seed)
    lengths = torch.from_numpy(packed.lengths)
    last_values = torch.from_numpy(head[packed.last]) if bootstrap else None
    got = gae(torch.from_numpy(packed.rewards), torch.from_numpy(head[packed.predict]), lengths,
              adaptive_lambda(lengths, alpha), gamma, last_values)
    expected = [oracles.skip_observation_gae(t.action_mask, t.rewards, h, oracles.adaptive_lambda(t.num_actions, alpha),
                                             gamma, bootstrap) for t, h in zip(batch, heads, strict=True)]
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-4, atol=1e-5)


@quick
@given(batches, st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9, 0.0]), st.booleans())
def test_property_returns_equal_oracle(batch, seed, gamma, bootstrap):
    """Fails if the critic's targets are not the reward-to-go."""
    packed, head, heads = packed_with_values(batch, seed)
    last_values = torch.from_numpy(head[packed.last]) if bootstrap else None
    got = returns(torch.from_numpy(packed.rewards), torch.from_numpy(packed.lengths), gamma, last_values)
    expected = [oracles.reward_to_go(t.action_mask, t.rewards, gamma, h[-1] if bootstrap else 0.0)
                for t, h in zip(batch, heads, strict=True)]
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-5, atol=1e-5)


@quick
@given(batches, st.integers(0, 2**32 - 1))
def test_property_lambda_one_makes_values_cancel(batch, seed):
    """Fails if Â + V is not the reward-to-go at λ = 1, the reason why the critic's targets need no value pass."""
    packed, head, _ = packed_with_values(batch, seed)
    rewards, lengths = torch.from_numpy(packed.rewards), torch.from_numpy(packed.lengths)
    values = torch.from_numpy(head[packed.predict])
    advantages = gae(rewards, values, lengths, torch.ones(len(batch)))
    np.testing.assert_allclose(advantages + values, returns(rewards, lengths), rtol=1e-4, atol=1e-5)


def test_oracle_outcome_before_a_last_observation():
    """Fails if the outcome is lost or moved where observation tokens follow the last action (worked by hand)."""
    builder = TrajectoryBuilder([1], "p", "t")
    builder.add_action([2], [-0.5], [0])
    builder.add_observation([3, 3])
    builder.add_action([4], [-0.5], [0])
    builder.add_observation([5])
    builder.add_reward(1.0)
    packed = pack([builder.build()], 6)
    values = torch.tensor([0.25, 9.0, 9.0, 0.5, 9.0, 0.75])  # 9 marks outputs that no state reads
    rewards, lengths = torch.from_numpy(packed.rewards), torch.from_numpy(packed.lengths)
    states = values[packed.predict]
    assert states.tolist() == [0.25, 0.5]
    # δ = (0 + 0.5 − 0.25, 1 + V_2 − 0.5); λ = 1 − 1/(1.5·2) = 2/3
    lam = adaptive_lambda(lengths, 1.5)
    np.testing.assert_allclose(gae(rewards, states, lengths, lam), [0.25 + 2 / 3 * 0.5, 0.5], rtol=1e-6)
    cut = gae(rewards, states, lengths, lam, last_values=values[packed.last])
    np.testing.assert_allclose(cut, [0.25 + 2 / 3 * 1.25, 1.25], rtol=1e-6)


@quick
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=20), st.sampled_from([1.5, 0.05, 1e-3, 100.0]))
def test_property_adaptive_lambda_equals_oracle(lengths, alpha):
    """Fails if λ is not 1 − 1/(α·n) of the trajectory's own action tokens, or leaves [0, 1]."""
    got = adaptive_lambda(torch.tensor(lengths), alpha)
    np.testing.assert_allclose(got, [oracles.adaptive_lambda(n, alpha) for n in lengths], atol=1e-6)
    assert (got >= 0).all() and (got <= 1).all()


@quick
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(-5, 5, width=32)), min_size=1, max_size=8))
def test_property_spread_repeats_by_length(pairs):
    """Fails if a trajectory's advantage lands on another trajectory's tokens."""
    lengths, values = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    assert spread(values, lengths).tolist() == [v for n, v in zip(lengths.tolist(), values.tolist(), strict=True)
                                                for _ in range(n)]


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.7, 3.25])),
                min_size=1, max_size=24))
def test_property_group_advantage_equals_oracle(members):
    """Fails if groups mix, the deviation is not the population's, or the order in the batch matters."""
    groups, outcomes = [g for g, _ in members], np.array([r for _, r in members], np.float32)
    got = group_advantage(torch.from_numpy(outcomes), torch.tensor(groups))
    np.testing.assert_allclose(got, oracles.group_advantage(outcomes.astype(float), groups), rtol=1e-4, atol=1e-4)


@quick
@given(st.lists(st.lists(st.floats(-50, 50, width=32), max_size=9), min_size=1, max_size=4).filter(any),
       st.sampled_from([0.0, 100.0]))
def test_property_whitening_equals_oracle(parts, shift):
    """Fails if whitening is not over all action tokens of the batch, however they lie in micro-batches (some empty)."""
    parts = [np.array(part, np.float32) + np.float32(shift) for part in parts]
    got = whitened([torch.from_numpy(part) for part in parts], lambda sums: None)
    assert [len(part) for part in got] == [len(part) for part in parts]
    expected = oracles.whiten(np.concatenate(parts))
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-4, atol=1e-4)  # equal values: a std of rounding


@quick
@given(st.integers(1, 16), st.floats(-100, 100, width=32))
def test_property_group_of_equals_gets_no_advantage(size, outcome):
    """Fails if rounding gives a group without any difference an advantage: 1e-6 in the divisor magnifies it."""
    got = group_advantage(torch.full((size,), outcome), torch.zeros(size, dtype=torch.long))
    np.testing.assert_allclose(got, np.zeros(size), atol=1e-6)


@pytest.mark.parametrize("level", ["average", "last_token"])
def test_property_step_level_equals_oracle(level):
    """Fails if a turn's value or reward takes in another turn's tokens, or λ counts tokens instead of turns."""
    @quick
    @given(batches, st.integers(0, 2**32 - 1), st.sampled_from([1.5, 0.05]), st.booleans())
    def check(batch, seed, alpha, bootstrap):
        packed, head, heads = packed_with_values(batch, seed)
        turns = [t.turns[t.action_mask] for t in batch]
        last_values = torch.from_numpy(head[packed.last]) if bootstrap else None
        got = step_gae(level, torch.from_numpy(packed.rewards), torch.from_numpy(head[packed.predict]),
                       torch.from_numpy(packed.lengths), torch.from_numpy(np.concatenate(turns)), alpha, last_values)
        expected = [oracles.step_gae(
            level, mine.tolist(), oracles.action_rewards(t.action_mask, t.rewards),
            oracles.state_values(t.action_mask, h, False)[:-1], alpha, float(h[-1]) if bootstrap else 0.0)
            for t, h, mine in zip(batch, heads, turns, strict=True)]
        np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    check()


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=60),
       st.lists(st.integers(0, 60), max_size=4))
def test_property_running_mean_equals_oracle(history, cuts):
    """Fails if a reward is part of its own baseline, or the state depends on how the batches are cut."""
    prompts, outcomes = [f"p{p}" for p, _ in history], [r for _, r in history]
    running, got = RunningMean(per_prompt=8, overall=16), []
    bounds = [0, *sorted(min(cut, len(history)) for cut in cuts), len(history)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        got += running.advantages(prompts[start:end], outcomes[start:end]).tolist()
    np.testing.assert_allclose(got, oracles.running_mean(prompts, outcomes, 8, 16), atol=1e-6)


def test_oracle_running_mean_of_prompts_that_never_recur():
    """Fails if online mode keeps more than the last 128 rewards, or compares a new prompt with nothing."""
    running = RunningMean()
    first = running.advantages([f"p{i}" for i in range(200)], [1.0] * 72 + [0.0] * 128)
    assert first[0] == 0 and first[72] == -1
    assert running.advantages(["new"], [1.0]).tolist() == [1.0]


def test_oracle_preference_of_pairs():
    """Fails if the worse of a pair is chosen, or a tie is not nobody's."""
    assert preference(torch.tensor([1.0, 0.0, 0.2, 0.9, 0.5, 0.5])).tolist() == [1, -1, -1, 1, 0, 0]
