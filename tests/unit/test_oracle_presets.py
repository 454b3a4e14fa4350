"""Presets: the rows of ALGORITHM.md §5 that this package offers, and the refusal of combinations without meaning."""
import pytest

from sao_megatron.algorithm.gates import GATES
from sao_megatron.algorithm.presets import CONSTANTS, PRESETS, check_batch, resolve, table

# The rows of ALGORITHM.md §5 and the constants that it gives
SAO = dict(rollouts_per_prompt=1, advantage="gae", behaviour="rollout", gate="dis", critic_updates=2,
           freeze_critic_attention=True, lambda_alpha=1.5, eps_low=0.3, eps_high=5.0)
GROUP = dict(rollouts_per_prompt=8, advantage="group", critic_updates=0)
PPO = GROUP | dict(behaviour="recomputed", eps_low=0.2)
DOCUMENTED = {
    "sao": SAO,
    "sao_recover": SAO | dict(gate="dis_recover"),
    "sao_dis_only": SAO | dict(critic_updates=1, freeze_critic_attention=False),
    "running_mean": dict(rollouts_per_prompt=1, advantage="running_mean", behaviour="rollout", gate="dis"),
    "grpo": PPO | dict(gate="ppo_clip", eps_high=0.28),
    "grpo_dis": GROUP | dict(behaviour="rollout", gate="dis"),
    "vapo": dict(rollouts_per_prompt=8, advantage="gae", behaviour="recomputed", gate="ppo_clip", lambda_alpha=0.05,
                 positive_nll=0.1, eps_low=0.2, eps_high=0.28, dual_clip=None),
    "ppo": dict(rollouts_per_prompt=1, advantage="gae", behaviour="recomputed", gate="ppo_clip", eps_high=0.2),
    "decoupled_ppo": PPO | dict(gate="decoupled_ppo"),
    "icepop": PPO | dict(gate="icepop", mismatch_low=0.5, mismatch_high=5.0),
    "tis": PPO | dict(gate="tis", mismatch_high=2.0),
    "cispo": GROUP | dict(behaviour="rollout", gate="cispo"),
    "gspo": GROUP | dict(behaviour="rollout", gate="gspo", eps_low=3e-4, eps_high=4e-4),
    "ipo": GROUP | dict(behaviour="rollout", gate="ipo"),
    "flash_reinforce": dict(rollouts_per_prompt=1, advantage="batch_mean", behaviour="rollout", gate="flash_reinforce"),
    "online_dpo": dict(rollouts_per_prompt=2, advantage="preference", behaviour="reference", gate="dpo"),
}


def test_preset_rows_are_complete():
    """Fails if a preset is added without its row being checked here, or one of the document's is missing."""
    assert set(DOCUMENTED) == set(PRESETS)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_preset_equals_its_documented_row(name):
    """Fails if a preset is not the algorithm that its name promises."""
    preset = resolve(name)
    assert {field: getattr(preset, field) for field in DOCUMENTED[name]} == DOCUMENTED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_resolves_and_is_listed(name):
    """Fails if a preset cannot be used as it stands, or the table that users read leaves it out."""
    preset = resolve(name)
    assert preset.rollouts_per_prompt > 1 or preset.advantage != "group"
    assert name in str(table())


def test_preset_override_changes_one_choice_only():
    """Fails if an override is ignored, or changes the preset for the next run in the process."""
    changed = resolve("sao", gate="dis_recover")
    assert changed.gate == "dis_recover" and changed.critic_updates == 2
    assert resolve("sao").gate == "dis"
    assert resolve("sao", gate=None) == resolve("sao")


@pytest.mark.parametrize("name, overrides, reason", [
    ("saoo", {}, "saoo"),
    ("sao", dict(gate="clip"), "clip"),
    ("sao", dict(advantage="gea"), "gea"),
    ("sao", dict(advantage="group"), "rollouts_per_prompt"),
    ("grpo_dis", dict(rollouts_per_prompt=1), "rollouts_per_prompt"),
    ("sao", dict(critic_updates=0), "critic"),
    ("sao", dict(behaviour="old"), "unknown behaviour 'old'; known: rollout, recomputed"),
    ("sao", dict(behaviour="recomputed"), "'dis' has a ratio to the rollout policy only"),
    ("sao", dict(gate="ppo_clip"), "'ppo_clip' has a ratio to the recomputed policy only"),
    ("grpo", dict(behaviour="rollout"), "'ppo_clip' has a ratio to the recomputed policy only"),
    ("sao", dict(gate="gspo"), "whole trajectories"),
    ("gspo", dict(advantage="average", critic_updates=1), "whole trajectories"),
    ("grpo_dis", dict(freeze_critic_attention=True), "about the critic"),
    ("grpo_dis", dict(critic_updates=2), "about the critic"),
    ("grpo_dis", dict(lambda_alpha=1.0), "about the critic"),
    ("sao", dict(dual_clip=3.0), "no dual_clip"),
    ("grpo", dict(mismatch_high=2.0), "no mismatch_high"),
    ("grpo_dis", dict(rollouts_per_prompt=2, advantage="preference"), "choose both or neither"),
    ("online_dpo", dict(rollouts_per_prompt=4), "rollouts_per_prompt must be 2"),
    ("online_dpo", dict(advantage="group"), "choose both or neither"),
])
def test_preset_refuses_nonsense_with_its_reason(name, overrides, reason):
    """Fails if a run could start with choices that contradict one another, or the message does not name the fault."""
    with pytest.raises(ValueError, match=reason):
        resolve(name, **overrides)


def test_preset_with_another_gate_takes_that_gates_constants():
    """Fails if an overridden gate keeps the old one's band, or an explicit constant is lost."""
    changed = resolve("grpo", gate="icepop", eps_low=0.1)
    assert (changed.eps_low, changed.eps_high, changed.mismatch_high) == (0.1, 0.2, 5.0)
    assert resolve("sao", advantage="running_mean").critic_updates == 0


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_its_gates_constants_and_no_others(name):
    """Fails if a gate would be called without a constant, or a constant is shown that nothing reads."""
    preset, own = resolve(name), GATES[PRESETS[name].gate].constants
    assert all(getattr(preset, constant) is None for constant in CONSTANTS if constant not in own)
    assert all(getattr(preset, constant) is not None for constant in own if constant != "dual_clip")


def test_preset_batches_are_whole_groups():
    """Fails if a batch could be cut through a group, or the message does not say what divides it."""
    check_batch(resolve("grpo"), 128, 4)
    with pytest.raises(ValueError, match="multiple of .* = 24"):
        check_batch(resolve("grpo"), 128, 3)
