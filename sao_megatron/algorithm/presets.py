"""Algorithms as data: a preset is a row of the same choices (ALGORITHM.md §5).

Rollouts per prompt, advantage, behaviour policy (the ratio's denominator) and gate, and the critic that some advantages
need. G = 8 in every group preset, the SAO paper's (16 prompts × 8), so that they differ in the algorithm only. A
constant that a row leaves open is the gate's own (gates.py). `sao_recover` is ours, the other names are their authors'.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sao_megatron.algorithm.gates import GATES

CRITIC_ADVANTAGES = ("gae", "average", "last_token")
"""Per-token advantages, from a critic: token-level GAE and its step-level ablations."""
TRAJECTORY_ADVANTAGES = ("group", "running_mean", "batch_mean", "preference")
"""One number per trajectory."""
BEHAVIOURS = ("rollout", "recomputed", "reference")


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    rollouts_per_prompt: int = 1
    advantage: str = "gae"
    behaviour: str = "rollout"
    gate: str = "dis"
    critic_updates: int = 2
    """K."""
    freeze_critic_attention: bool = True
    lambda_alpha: float = 1.5
    positive_nll: float = 0.0
    """VAPO's μ: weight of the negative log-likelihood of trajectories with a positive reward."""
    # The gate's constants. None in a row is the gate's own value; None in a resolved preset: off, or not this gate's.
    eps_low: float | None = None
    eps_high: float | None = None
    mismatch_low: float | None = None
    mismatch_high: float | None = None
    dual_clip: float | None = None
    trust: float | None = None
    beta: float | None = None

    @property
    def has_critic(self) -> bool:
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def constants(self) -> dict[str, float | None]:
        """The gate's constants besides its band."""
        return {name: getattr(self, name) for name in GATES[self.gate].constants if name not in ("eps_low", "eps_high")}


CONSTANTS = ("eps_low", "eps_high", "mismatch_low", "mismatch_high", "dual_clip", "trust", "beta")
_PLAIN_CRITIC = dict(critic_updates=1, freeze_critic_attention=False)
_GROUP = dict(rollouts_per_prompt=8, advantage="group", critic_updates=0, freeze_critic_attention=False)
_SINGLE = _GROUP | dict(rollouts_per_prompt=1)

PRESETS = {preset.name: preset for preset in (
    Preset("sao", "the paper: single rollout, DIS, skip-observation GAE, frozen-attention critic updated twice"),
    Preset("sao_dis_only", "SAO without its value-model designs", **_PLAIN_CRITIC),
    Preset("sao_recover", "SAO with recovering DIS (ours, not the paper's)", gate="dis_recover"),
    Preset("running_mean", "SAO's ablation: the mean of earlier rewards instead of a critic",
           **_SINGLE | dict(advantage="running_mean")),
    Preset("grpo", "group-relative advantage, PPO clip-higher", behaviour="recomputed", gate="ppo_clip", eps_high=0.28,
           **_GROUP),
    Preset("grpo_dis", "group-relative advantage with DIS", **_GROUP),
    Preset("vapo", "GAE with decoupled λ, clip-higher, NLL of positive examples", rollouts_per_prompt=8,
           behaviour="recomputed", gate="ppo_clip", eps_high=0.28, lambda_alpha=0.05, positive_nll=0.1,
           **_PLAIN_CRITIC),
    Preset("ppo", "GAE and PPO clip; λ as in sao", behaviour="recomputed", gate="ppo_clip", **_PLAIN_CRITIC),
    Preset("decoupled_ppo", "AReaL: PPO's trust region around the recomputed policy, weighted back to the rollout",
           behaviour="recomputed", gate="decoupled_ppo", **_GROUP),
    Preset("icepop", "PPO clip on tokens on which engine and learner agree", behaviour="recomputed", gate="icepop",
           **_GROUP),
    Preset("tis", "PPO clip-higher, truncated importance weight of the engine's mismatch", behaviour="recomputed",
           gate="tis", eps_high=0.28, **_GROUP),
    Preset("cispo", "clipped importance weight, no token dropped", gate="cispo", **_GROUP),
    Preset("gspo", "PPO clip on the whole trajectory's ratio", gate="gspo", **_GROUP),
    Preset("ipo", "prime-rl: mask on the difference of probabilities", gate="ipo", **_GROUP),
    Preset("flash_reinforce", "batch-mean baseline, trust test on whole trajectories", gate="flash_reinforce",
           **_SINGLE | dict(advantage="batch_mean")),
    Preset("online_dpo", "pairs of rollouts, reference policy, DPO loss", behaviour="reference", gate="dpo",
           **_GROUP | dict(rollouts_per_prompt=2, advantage="preference")),
)}


def resolve(name: str, **overrides) -> Preset:
    """The preset with every non-None override applied and the gate's constants filled in.

    Names that are no choice are ignored. Raises ValueError with the reason for an unknown name or a combination that
    makes no sense.
    """
    _known("preset", name, PRESETS)
    names = {field.name for field in fields(Preset)} - {"name", "about"}
    changes = {key: value for key, value in overrides.items() if value is not None and key in names}
    preset = replace(PRESETS[name], **changes)
    _known("gate", preset.gate, GATES)
    _known("advantage", preset.advantage, CRITIC_ADVANTAGES + TRAJECTORY_ADVANTAGES)
    _known("behaviour", preset.behaviour, BEHAVIOURS)
    _check_advantage(preset)
    _check_gate(preset)
    if preset.gate != PRESETS[name].gate:  # another gate brings its own constants
        preset = replace(preset, **{key: changes.get(key) for key in CONSTANTS})
    return _with_constants(_with_critic(preset, changes), changes)


def check_batch(preset: Preset, trajectories: int, mini_batches: int) -> None:
    """Raise ValueError if a batch does not divide into mini-batches of whole groups."""
    unit = preset.rollouts_per_prompt * mini_batches
    if trajectories % unit:
        raise ValueError(f"batch.trajectories={trajectories} must be a multiple of rollouts_per_prompt "
                         f"({preset.rollouts_per_prompt}) times batch.mini_batches ({mini_batches}) = {unit}")


def check_context(preset: Preset, context_parallel: int) -> None:
    """Raise ValueError if the gate needs whole trajectories and context parallelism cuts them up."""
    if context_parallel > 1 and GATES[preset.gate].whole_trajectories:
        raise ValueError(f"gate {preset.gate!r} judges whole trajectories, of which a context parallel rank holds a "
                         f"part: set parallel.cp=1")


def _known(what: str, name: str, known) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def _check_advantage(preset: Preset) -> None:
    if preset.advantage == "group" and preset.rollouts_per_prompt == 1:
        raise ValueError("a group advantage compares rollouts of one prompt: rollouts_per_prompt must be more than 1")
    if preset.advantage == "preference" and preset.rollouts_per_prompt != 2:
        raise ValueError("a preference compares two rollouts of one prompt: rollouts_per_prompt must be 2")
    if preset.has_critic and preset.critic_updates < 1:
        raise ValueError(f"advantage {preset.advantage!r} needs a critic: critic_updates must be at least 1")


def _check_gate(preset: Preset) -> None:
    gate = GATES[preset.gate]
    if preset.behaviour not in gate.behaviours:
        raise ValueError(f"gate {preset.gate!r} has a ratio to the {' or '.join(gate.behaviours)} policy only: "
                         f"behaviour must not be {preset.behaviour!r}")
    if gate.whole_trajectories and preset.advantage not in TRAJECTORY_ADVANTAGES:
        raise ValueError(f"gate {preset.gate!r} judges whole trajectories, but advantage {preset.advantage!r} differs "
                         f"from token to token: choose one of {', '.join(TRAJECTORY_ADVANTAGES)}")
    if (preset.gate == "dpo") != (preset.advantage == "preference"):
        raise ValueError("the gate 'dpo' and the advantage 'preference' are one algorithm: choose both or neither")


def _with_critic(preset: Preset, changes: dict) -> Preset:
    if preset.has_critic:
        return preset
    for choice in ("critic_updates", "freeze_critic_attention", "lambda_alpha"):
        if changes.get(choice):
            raise ValueError(f"{choice} is a choice about the critic, and advantage {preset.advantage!r} has none")
    return replace(preset, critic_updates=0, freeze_critic_attention=False)


def _with_constants(preset: Preset, changes: dict) -> Preset:
    own = GATES[preset.gate].constants
    for constant in CONSTANTS:
        if constant in changes and constant not in own:
            raise ValueError(f"gate {preset.gate!r} has no {constant}; its constants: {', '.join(own)}")
    return replace(preset, **{name: value for name, value in own.items() if getattr(preset, name) is None})


def table() -> str:
    """All presets, one line each, for a terminal."""
    columns = ("preset", "rollouts", "advantage", "behaviour", "gate", "constants", "critic", "about")
    rows = [columns, *(_row(resolve(name)) for name in PRESETS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def _row(preset: Preset) -> tuple[str, ...]:
    constants = [f"{name}={getattr(preset, name):g}" for name in CONSTANTS if getattr(preset, name) is not None]
    if preset.positive_nll:
        constants.append(f"positive_nll={preset.positive_nll:g}")
    critic = f"K={preset.critic_updates} α={preset.lambda_alpha:g}" if preset.has_critic else "-"
    critic += " frozen attention" if preset.freeze_critic_attention else ""
    return (preset.name, str(preset.rollouts_per_prompt), preset.advantage, preset.behaviour, preset.gate,
            " ".join(constants), critic, preset.about)
