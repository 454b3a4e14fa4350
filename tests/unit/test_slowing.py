"""alarms.on_alarm=slow: the admitted lag follows the alarms about age."""
from sao_megatron.config import AlarmSection
from sao_megatron.telemetry.alarms import rules
from sao_megatron.telemetry.slowing import ABOUT_AGE, Slowing

OLD, OTHER, NONE = {"discarded_mass"}, {"gradient_norm"}, set()


def admitted(max_lag: int, *raised: tuple[set[str], int]) -> list[int]:
    """The lag that pacing may admit after each step; (alarms, for so many steps)."""
    slowing, seen = Slowing(max_lag), []
    for names, steps in raised:
        for _ in range(steps):
            slowing.step(names)
            seen.append(slowing.admitted)
    return seen


# If this fails, a lag that does harm is kept, or given up at once for a harm that one version less would have ended.
def test_one_down_at_once_and_one_more_after_the_time_in_which_it_shows():
    assert admitted(3, (OLD, 26)) == [2] * 8 + [1] * 8 + [0] * 10


# If this fails, a run stays slow for ever, or bounces between two lags at every step.
def test_up_again_when_all_are_over():
    assert admitted(2, (OLD, 1), (NONE, 12)) == [1] * 6 + [2] * 7
    wavering = admitted(1, *[(OLD, 1), (NONE, 1)] * 8)
    assert sum(a != b for a, b in zip(wavering, wavering[1:], strict=False)) <= len(wavering) // 4


# If this fails, a broken engine or a high learning rate makes the engines wait, which cures neither.
def test_other_alarms_do_not_slow():
    assert admitted(2, (OTHER, 9)) == [2] * 9
    assert ABOUT_AGE < {rule.name for rule in rules(AlarmSection(), max_lag=2)}


# If this fails, a synchronous run is to become fresher than fresh.
def test_never_below_zero():
    assert admitted(0, (OLD, 9)) == [0] * 9
