"""Alarms on made-up metrics; tests/distributed/test_planted_faults.py plants real faults."""
import pytest

from sao_megatron.config import AlarmSection
from sao_megatron.telemetry import metrics as documented
from sao_megatron.telemetry.alarms import Alarms

HEALTHY = {"mask/dropped": 0.01, "mask/effective_sample_size": 0.98, "mask/discarded_mass": 0.01,
           "policy/grad_norm": 1.0, "policy/entropy": 1.0, "lag/mean": 2.0, "reward/mean": 0.5,
           "critic/explained_variance": 0.1,
           "mismatch/tokens": 100, "mismatch/mean": 1e-6, "mismatch/slope": 0.0, "mismatch/correlation": 1.0}


def rung(steps: list[dict]) -> list[str]:
    """Names of the alarms that these steps raise after 30 healthy ones, in order."""
    alarms = Alarms(AlarmSection(), max_lag=2)
    assert not [sentence for _ in range(30) for sentence in alarms.check(HEALTHY)]
    return [sentence.partition(" ")[0] for step in steps for sentence in alarms.check(HEALTHY | step)]


@pytest.mark.parametrize("name, fault, steps", [
    ("mask_share", {"mask/dropped": 0.4}, 5), ("effective_sample_size", {"mask/effective_sample_size": 0.4}, 5),
    ("discarded_mass", {"mask/discarded_mass": 0.5}, 5), ("lag_beyond_bound", {"lag/mean": 2.6}, 10),
    ("gradient_norm", {"policy/grad_norm": 25.0}, 1),
    ("entropy_growth", {"policy/entropy": 3.5}, 5),
    ("entropy_collapse", {"policy/entropy": 0.01, "reward/mean": 0.3}, 10),  # 5 until the reward has left its best
    ("reward_drop", {"reward/mean": 0.0}, 12), ("explained_variance", {"critic/explained_variance": -2.0}, 20),
    ("engine_mismatch", {"mismatch/mean": 0.1}, 2), ("temperature_differs", {"mismatch/slope": -0.2}, 2),
    ("logprobs_misplaced", {"mismatch/correlation": 0.1}, 1)])
def test_each_rule_rings_after_its_patience(name, fault, steps):
    """If this fails, a run that is going wrong says nothing, or rings at the first odd step."""
    assert rung([fault] * steps) == [name]
    assert rung([fault] * (steps - 1)) == []


def test_an_alarm_rings_once_until_it_is_over():
    """If this fails, a value that wavers around its limit fills the log."""
    bad, wavering, good = {"mask/dropped": 0.4}, {"mask/dropped": 0.25}, {"mask/dropped": 0.1}
    assert rung([*[bad] * 10, wavering, *[bad] * 10]) == ["mask_share"]
    assert rung([*[bad] * 5, good, *[bad] * 5]) == ["mask_share"] * 2
    assert rung([bad, bad, good] * 5) == []


def test_a_policy_that_plays_its_best_without_doubt_is_no_collapse():
    """If this fails, every task that is learnt to the end rings."""
    assert rung([{"policy/entropy": 0.01, "reward/mean": 0.9}] * 40) == []


def test_few_fresh_tokens_and_missing_metrics_say_nothing():
    """If this fails, a run without a critic or without tokens of lag 0 rings, or crashes."""
    assert rung([{"mismatch/tokens": 3, "mismatch/mean": 9.0, "mismatch/correlation": 0.0}] * 9) == []
    alarms = Alarms(AlarmSection(), max_lag=2)
    assert [alarms.check({"reward/mean": 0.1}) for _ in range(40)] == [[]] * 40


def test_rules_read_documented_metrics():
    """If this fails, a rule waits for a metric that no step has."""
    assert all(documented.known(name) for name in HEALTHY)
