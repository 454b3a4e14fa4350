"""Presets: the rows of ALGORITHM.md §5 that this package offers, and the refusal of combinations without meaning."""
import pytest

from sao_megatron.algorithm.presets import PRESETS, resolve, table

# rollouts per prompt, advantage, gate, critic updates, frozen attention, α of the adaptive λ
SAO = dict(rollouts_per_prompt=1, advantage="gae", gate="dis", critic_updates=2, freeze_critic_attention=True,
           lambda_alpha=1.5)
DOCUMENTED = {
    "sao": SAO,
    "sao_recover": SAO | dict(gate="dis_recover"),
    "sao_dis_only": dict(rollouts_per_prompt=1, advantage="gae", gate="dis", critic_updates=1,
                         freeze_critic_attention=False),
    "grpo_dis": dict(advantage="group", gate="dis"),
}


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
])
def test_preset_refuses_nonsense_with_its_reason(name, overrides, reason):
    """Fails if a run could start with choices that contradict one another, or the message does not name the fault."""
    with pytest.raises(ValueError, match=reason):
        resolve(name, **overrides)
