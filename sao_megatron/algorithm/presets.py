"""Algorithms as data: a preset is a row of the same choices (ALGORITHM.md §5)."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sao_megatron.algorithm.dis import GATES


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    rollouts_per_prompt: int = 1
    advantage: str = "gae"
    """gae (needs a critic) or group (needs rollouts_per_prompt > 1)."""
    gate: str = "dis"
    critic_updates: int = 2
    """K."""
    freeze_critic_attention: bool = True
    lambda_alpha: float = 1.5

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"


PRESETS = {preset.name: preset for preset in (
    Preset("sao", "the paper: single rollout, DIS, skip-observation GAE, frozen-attention critic updated twice"),
    Preset("sao_dis_only", "SAO without its value-model designs", critic_updates=1, freeze_critic_attention=False),
    Preset("sao_recover", "SAO with recovering DIS (ours, not the paper's)", gate="dis_recover"),
    Preset("grpo_dis", "group-relative advantage with DIS", rollouts_per_prompt=8, advantage="group",
           critic_updates=0, freeze_critic_attention=False),
)}


def resolve(name: str, **overrides) -> Preset:
    """The preset with every non-None override applied. Raises ValueError with the reason for an unknown name or a
    combination that makes no sense."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    known = {field.name for field in fields(Preset)} - {"name", "about"}
    changes = {key: value for key, value in overrides.items() if value is not None and key in known}
    preset = replace(PRESETS[name], **changes)
    if preset.gate not in GATES:
        raise ValueError(f"unknown gate {preset.gate!r}; known: {', '.join(GATES)}")
    if preset.advantage not in ("gae", "group"):
        raise ValueError(f"unknown advantage {preset.advantage!r}; known: gae, group")
    if preset.advantage == "group" and preset.rollouts_per_prompt == 1:
        raise ValueError("a group advantage compares rollouts of one prompt: rollouts_per_prompt must be more than 1")
    if preset.has_critic and preset.critic_updates < 1:
        raise ValueError("advantage 'gae' needs a critic: critic_updates must be at least 1")
    return preset


def table() -> str:
    """All presets, one line each, for a terminal."""
    names = [field.name for field in fields(Preset)]
    rows = [names] + [[str(getattr(preset, name)) for name in names] for preset in PRESETS.values()]
    order = [names.index("name"), *range(2, len(names)), names.index("about")]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join("  ".join(row[i].ljust(widths[i]) for i in order).rstrip() for row in rows)
