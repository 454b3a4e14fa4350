"""The Trajectory type: what it refuses, how it is built, and that its bytes come back."""
import numpy as np
import pytest

from sao_megatron.trajectory.types import Status, Trajectory, TrajectoryBuilder, decode, encode


def two_turns() -> TrajectoryBuilder:
    builder = TrajectoryBuilder([1], "prompt-7", "guess", group_id="group-3")
    builder.add_action([8, 2], [-1.5, -0.25], [4, 5])
    builder.add_reward(0.25)
    builder.add_observation([3])
    builder.add_action([9, 2], [-0.5, 0.0], [5, 5])
    builder.add_observation([5])
    builder.add_reward(1.0)
    return builder


def fields(**changes) -> dict:
    """A valid trajectory of one prompt token and two actions, with `changes`."""
    return dict(tokens=[1, 6, 2], action_mask=[False, True, True], rollout_logprobs=[np.nan, -1.0, -0.1],
                versions=[-1, 0, 0], turns=[0, 0, 0], rewards=[0, 0, 1], prompt_id="p", task="t") | changes


def test_builder_keeps_every_token_in_its_role():
    """Fails if log-probs, versions, turns or rewards are attached to the wrong token: training would be on noise."""
    trajectory = two_turns().build(solved=True)
    assert trajectory.tokens.tolist() == [1, 8, 2, 3, 9, 2, 5]
    assert trajectory.action_mask.tolist() == [False, True, True, False, True, True, False]
    assert trajectory.versions.tolist() == [-1, 4, 5, -1, 5, 5, -1]
    assert trajectory.turns.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert trajectory.rewards.tolist() == [0, 0, 0.25, 0, 0, 1.0, 0]
    assert trajectory.rollout_logprobs[trajectory.action_mask].tolist() == [-1.5, -0.25, -0.5, 0.0]
    assert np.isnan(trajectory.rollout_logprobs[~trajectory.action_mask]).all()
    assert (trajectory.num_actions, trajectory.reward, trajectory.info) == (4, 1.25, {"solved": True})


def test_encode_and_decode_are_inverse():
    """Fails if what the learner reads is not what the controller wrote."""
    builder = two_turns()
    builder.add_segment(two_turns())
    before = builder.build(Status.TRUNCATED, solved=False, note="größer")
    after = decode(encode(before))
    for name in ("tokens", "action_mask", "rollout_logprobs", "versions", "turns", "rewards", "segments"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        assert getattr(after, name).dtype == getattr(before, name).dtype
    for name in ("prompt_id", "task", "group_id", "status", "id", "info"):
        assert getattr(after, name) == getattr(before, name)


def test_segments_are_one_rollout():
    """Fails if a rewritten context is a rollout of its own: λ, groups and counts would take its outcome twice."""
    builder = TrajectoryBuilder([1], "prompt-7", "guess")
    builder.add_action([8, 2], [-1.5, -0.25], [4, 5])
    builder.add_reward(0.25)
    builder.add_observation([])
    builder.add_segment(TrajectoryBuilder([1, 7, 3], "", ""))
    assert builder.segment_tokens == [1, 7, 3]
    builder.add_action([9], [-0.5], [6])
    builder.add_reward(1.0)
    trajectory = builder.build()
    assert trajectory.segments.tolist() == [0, 3] and trajectory.segment_lengths.tolist() == [3, 4]
    assert trajectory.tokens.tolist() == [1, 8, 2, 1, 7, 3, 9]
    assert trajectory.action_mask.tolist() == [False, True, True, False, False, False, True]
    assert trajectory.turns.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert trajectory.rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 1.0]
    assert (trajectory.prompt_id, trajectory.num_actions, trajectory.reward) == ("prompt-7", 3, 1.25)


@pytest.mark.parametrize("changes, named", [
    (dict(segments=[1]), "segments"),
    (dict(segments=[0, 3]), "segments"),
    (dict(segments=[0, 2, 2]), "segments"),
    (dict(segments=[0, 1]), "token 1"),
    (dict(versions=[-1, 0]), "versions"),
    (dict(action_mask=[False] * 3, versions=[-1] * 3), "action_mask"),
    (dict(action_mask=[True, True, True]), "token 0"),
    (dict(tokens=[1, -6, 2]), "tokens"),
    (dict(rollout_logprobs=[np.nan, np.nan, -0.1]), "rollout_logprobs"),
    (dict(rollout_logprobs=[np.nan, 0.5, -0.1]), "rollout_logprobs"),
    (dict(versions=[-1, 0, -1]), "versions"),
    (dict(rewards=[0, np.inf, 0]), "rewards"),
    (dict(rewards=[1, 0, 0]), "rewards"),
])
def test_invalid_trajectories_are_refused_by_field(changes, named):
    """Fails if a broken trajectory could reach the learner, or the message does not say which field of which prompt."""
    Trajectory(**fields())
    with pytest.raises(ValueError, match=named) as refusal:
        Trajectory(**fields(**changes))
    assert "prompt p" in str(refusal.value)


def test_failed_episode_may_be_empty():
    """Fails if an environment that dies before its prompt could not be recorded as an error."""
    failed = TrajectoryBuilder([], "p", "t").build(Status.ERROR, error="no host")
    assert decode(encode(failed)).info == {"error": "no host"}


def test_vocabulary_check_names_the_id():
    """Fails if an id that the model does not have passes into training."""
    trajectory = Trajectory(**fields())
    trajectory.check_vocabulary(7)
    with pytest.raises(ValueError, match="id 6"):
        trajectory.check_vocabulary(6)
