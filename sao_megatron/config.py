"""RunConfig: everything a run needs to know, one pydantic model per section.

A recipe is a YAML file with these sections; `key.subkey=value` on the command line overrides it. Unknown
keys, wrong types and layouts that do not fit are refused with one sentence before any process starts.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sao_megatron.errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ModelSection(Section):
    path: Path | None = None
    """HF checkpoint folder (config.json, safetensors, tokenizer). Give this or `fresh`."""
    fresh: dict[str, Any] | None = None
    """Fields of an HF config.json for a model with random weights (`architectures` names the family)."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the random weights of a `fresh` model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type of learner and engines; gradients and optimizer state are float32."""
    mtp: Literal["drop", "keep"] = "drop"
    """Multi-token prediction layers (DeepSeek-V3, GLM) are dropped; to keep them is refused: they cannot be trained."""

    @model_validator(mode="after")
    def _one_source(self):
        if (self.path is None) == (self.fresh is None):
            raise ValueError("needs exactly one of `path` (an HF folder) and `fresh` (fields of config.json)")
        return self


class ParallelSection(Section):
    ranks: int = Field(1, ge=1)
    """Learner processes (one per GPU). Data parallelism is what the other sizes leave over."""
    tp: int = Field(1, ge=1)
    """Tensor parallel size of attention, embeddings and head (sequence parallelism is on when > 1)."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size."""
    cp: int = Field(1, ge=1)
    """Context parallel size: the tokens of every sequence are spread over this many ranks."""
    ep: int = Field(1, ge=1)
    """Expert parallel size: the experts are spread over this many ranks."""
    etp: int = Field(1, ge=1)
    """Tensor parallel size inside one expert."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to the experts."""

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def sequence_multiple(self) -> int:
        """Packed sequences are padded to multiples of this many tokens: a context parallel rank holds two chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def packed_multiple(self) -> int:
        """Packed micro-batches are padded to multiples of this: sequence parallelism splits each rank's part evenly."""
        return self.sequence_multiple * self.tp

    @model_validator(mode="after")
    def _fits(self):
        if self.ranks % (self.tp * self.pp * self.cp):
            raise ValueError(f"ranks={self.ranks} is not a multiple of tp*pp*cp = {self.tp}*{self.pp}*{self.cp}")
        if self.ranks % (self.ep * self.etp * self.pp):
            raise ValueError(f"ranks={self.ranks} is not a multiple of ep*etp*pp = {self.ep}*{self.etp}*{self.pp}")
        return self


class AlgorithmSection(Section):
    preset: str = "sao"
    """A row of `sao-megatron presets`; every other field here overrides one choice of it."""
    gate: str | None = None
    """Gate on the ratio (algorithm/gates.py): dis, dis_recover, none, ppo_clip, decoupled_ppo, icepop, tis, cispo,
    gspo, ipo, flash_reinforce, dpo."""
    behaviour: str | None = None
    """The ratio's denominator: rollout (no further forward pass), recomputed (the policy before the batch's first
    update) or reference (the policy's starting weights, for dpo)."""
    advantage: str | None = None
    """With a critic: gae, or one action per turn: average, last_token. Without: group (needs rollouts_per_prompt > 1),
    running_mean, batch_mean, preference (for dpo)."""
    rollouts_per_prompt: int | None = Field(None, ge=1)
    """1 = single rollout."""
    critic_updates: int | None = Field(None, ge=0)
    """K critic updates per policy update."""
    freeze_critic_attention: bool | None = None
    """Keep the critic's attention modules at the policy's starting weights."""
    lambda_alpha: float | None = Field(None, gt=0)
    """α of the length-adaptive λ = 1 − 1/(α·n) of the policy's GAE."""
    eps_low: float | None = Field(None, gt=0, lt=1)
    """Lower bound of the gate: DIS drops tokens with ratio ≤ 1 − eps_low."""
    eps_high: float | None = Field(None, gt=0)
    """Upper bound of the gate: DIS drops tokens with ratio ≥ 1 + eps_high."""
    mismatch_low: float | None = Field(None, gt=0)
    """icepop: least ratio of the recomputed policy to the rollout."""
    mismatch_high: float | None = Field(None, gt=0)
    """icepop: largest such ratio; tis, decoupled_ppo: where it is truncated."""
    dual_clip: float | None = Field(None, gt=1)
    """PPO's gates: with a negative advantage, drop ratios above this; off by default."""
    trust: float | None = Field(None, gt=0)
    """flash_reinforce: largest mean binary KL of a trajectory."""
    beta: float | None = Field(None, gt=0)
    """dpo: strength of the pull towards the reference."""
    positive_nll: float | None = Field(None, ge=0)
    """Weight of the negative log-likelihood of trajectories with a positive reward (VAPO)."""
    anchor: float = Field(0.0, ge=0)
    """τ of the pull towards the sampling policy (ALGORITHM.md §8); 0 = off, as in the paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Entropy bonus; the paper has none."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts; the learner's log-probs are taken at the same."""
    critic_only_steps: int = Field(10, ge=0)
    """Steps at the start in which only the critic trains."""
    bootstrap_truncated: bool = False
    """Use the value at the cut for trajectories that a budget truncated, instead of 0."""
    whiten: bool = False
    """Whiten advantages over the global batch; off in the paper."""


class AdamSection(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(1.0, ge=0, le=1)
    """Learning rate at the last step as a share of `lr` (linear decay); 1 = constant."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 = no clipping."""


class CriticAdamSection(AdamSection):
    lr: float = Field(5e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear learning-rate warm-up."""


class CriticSection(Section):
    path: Path | None = None
    """Folder that `sao-megatron pretrain-value` wrote: the critic starts from it instead of from the policy's weights.
    """
    head: Literal["mse", "hl_gauss"] = "mse"
    """mse: one output, squared error. hl_gauss: a histogram of the return, cross-entropy."""
    value_clip: float | None = Field(None, gt=0)
    """PPO's value clipping: further updates gain nothing by moving a value more than this from where the step began
    (mse only; off in the paper)."""
    bins: int = Field(101, ge=2)
    """Bins of the histogram (hl_gauss)."""
    value_min: float = -1.5
    """Lower end of the histogram; returns must lie inside, a few bins away from the ends (hl_gauss)."""
    value_max: float = 1.5
    """Upper end of the histogram (hl_gauss)."""
    sigma_ratio: float = Field(0.75, gt=0)
    """Standard deviation of the target's Gaussian, in bins (hl_gauss)."""

    @model_validator(mode="after")
    def _fits(self):
        if self.value_min >= self.value_max:
            raise ValueError(f"value_min={self.value_min:g} must be less than value_max={self.value_max:g}")
        if self.value_clip is not None and self.head != "mse":
            raise ValueError(f"value_clip limits a squared error: it needs head=mse, not head={self.head}")
        return self


class BatchSection(Section):
    trajectories: int = Field(128, ge=1)
    """B: trajectories of one learner step, over all ranks."""
    mini_batches: int = Field(1, ge=1)
    """Policy updates per leased batch, each on its part of the trajectories."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Packed tokens of one micro-batch; a longer trajectory gets a micro-batch of its own."""


class WarmupSection(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps on the task's demonstrations before RL, for a fresh model; 0 = none."""
    trajectories: int = Field(128, ge=1)
    """Demonstrations per supervised step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate, decaying linearly to 0."""


class TaskSection(Section):
    name: str
    """guess_number, reasoning_gym, or path/to/file.py:Class."""
    options: dict[str, Any] = {}
    """Arguments of the task's constructor."""


class RolloutSection(Section):
    max_lag: int = Field(2, ge=0)
    """Lag (in versions) that admission aims at; 0 = synchronous. A trajectory overtaken by later ones can exceed it."""
    max_token_lag: int | None = Field(None, ge=0)
    """Last resort: a trajectory with a token older than this is dropped, and counted, instead of trained."""
    concurrency: int = Field(256, ge=1)
    """Most episodes in flight."""
    max_new_tokens: int = Field(1024, ge=1)
    """Most tokens sampled in one turn."""
    max_tokens: int = Field(32768, ge=2)
    """Longest trajectory; a longer one ends as `truncated`."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds for one generation request."""
    starvation_timeout: float = Field(3600.0, gt=0)
    """Seconds that the learner waits for one batch of trajectories before it gives up."""
    environment_retries: int = Field(2, ge=0)
    """Fresh tries of an episode whose environment failed, before it is recorded as `error`."""


class EvaluationSection(Section):
    episodes: int = Field(0, ge=0)
    """Episodes of the fixed evaluation set, before the first and after the last step; 0 = none."""


class EngineSection(Section):
    count: int = Field(1, ge=1)
    """SGLang servers."""
    tp: int = Field(1, ge=1)
    """Tensor parallel size of one server."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """Port of the first server (the next ones count up); 0 = free ports."""
    max_running_requests: int = Field(64, ge=1)
    max_total_tokens: int = Field(32768, ge=1)
    """KV-cache tokens of a CPU engine (a GPU engine sizes its own)."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds until a server must be healthy."""
    restarts: int = Field(3, ge=0)
    """How often `train` starts an engine again that died after it was healthy; the run goes on meanwhile."""
    extra_args: list[str] = []
    """More arguments for sglang.launch_server."""


class PublicationSection(Section):
    mode: Literal["retract", "in_place", "abort"] = "retract"
    """What running requests do while weights change: re-prefill, keep their old KV cache, or end early."""
    bucket_mib: float = Field(512, gt=0)
    """Size of one broadcast; an owner rank holds up to four buckets."""
    via: Literal["collective", "disk"] = "collective"
    """collective: broadcast into the engines' memory. disk: through an HF checkpoint in the run's folder, for engines
    that no broadcast reaches but that see this folder."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for any one wait of a publication."""
    verify_every: int = Field(50, ge=0)
    """Verify (docs/weights.md) every n-th publication, and every engine's first; 0 = never."""
    tolerance: float = Field(0.05, gt=0)
    """Largest mean log-prob difference (nats a token) that verification accepts: bfloat16 kernels differ by about 0.01,
    float32 ones by less than 1e-5."""


class AlarmSection(Section):
    """Limits of telemetry/alarms.py. An alarm is one sentence in the log and a mark in TensorBoard."""

    on_alarm: Literal["warn", "pause", "stop"] = "warn"
    """Go on, wait until the file PAUSED in the run's folder is deleted, or end the run."""
    mismatch: float = Field(0.05, gt=0)
    """Mean |log r| at lag 0 (nats): bfloat16 kernels differ by about 0.01, float32 ones by less than 1e-5."""
    mismatch_slope: float = Field(0.05, gt=0)
    """|slope| of log r on the rollout's log-prob at lag 0."""
    mask_share: float = Field(0.3, gt=0, le=1)
    """Dropped share of the action tokens (the paper's runs stay below 0.006)."""
    effective_sample_size: float = Field(0.5, gt=0, le=1)
    discarded_mass: float = Field(0.3, gt=0)
    gradient_norm: float = Field(20.0, gt=1)
    """Times its median of the last 50 steps."""
    entropy_collapse: float = Field(0.05, gt=0, lt=1)
    """Entropy as a share of its mean in the first ten updates."""
    entropy_growth: float = Field(3.0, gt=1)
    reward_drop: float = Field(0.5, gt=0)
    """Fall of the twenty-step mean reward from its best, as a share of the best (at least 0.1)."""
    explained_variance: float = Field(-0.5, lt=0)


class TokensSection(Section):
    trajectories: int = Field(8, ge=0)
    """Trajectories a step whose every token is recorded: a seeded sample, and in a quarter of the places those of which
    the gate dropped most; 0 = no records."""
    every: int = Field(1, ge=1)
    """Steps from one record to the next."""
    limit_mb: float = Field(256.0, gt=0)
    """Most megabytes of a run's records; beyond, every second of the older files is deleted."""


class CheckpointSection(Section):
    every: int = Field(50, ge=0)
    """Learner steps between two checkpoints (there is one more at the end); 0 = none."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay."""


class RunConfig(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Run name; outputs go to `runs_dir/name`."""
    runs_dir: Path = Path("runs")
    seed: int = Field(0, ge=0)
    steps: int = Field(1, ge=1)
    """Policy updates (critic-only steps come on top)."""
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    policy_optimizer: AdamSection = AdamSection()
    critic: CriticSection = CriticSection()
    critic_optimizer: CriticAdamSection = CriticAdamSection()
    batch: BatchSection = BatchSection()
    warmup: WarmupSection = WarmupSection()
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    publication: PublicationSection = PublicationSection()
    alarms: AlarmSection = AlarmSection()
    tokens: TokensSection = TokensSection()
    checkpoint: CheckpointSection = CheckpointSection()
    restarts: int = Field(0, ge=0)
    """How often `train` starts processes of the run again when some died, before it gives up; counted anew whenever the
    run gets further than ever."""
    mode: Literal["train", "replay", "rollout"] = "train"
    """train: engines, controller and learner. replay: the learner alone, on recorded trajectories (the verb `replay`).
    rollout: engines and controller alone, until the store holds the trajectories of all steps (the verb `rollout`)."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def total_steps(self) -> int:
        """Learner steps: critic-only ones and policy updates."""
        return self.steps + self.algorithm.critic_only_steps


def load(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Read a recipe and apply `a.b=value` overrides (values are YAML). Raises UserError naming the key at fault."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"recipe {path} does not exist: give the path of a YAML file such as "
                        f"configs/guess-number-cpu.yaml")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"recipe {path} must be a mapping of sections, got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return parse(data, str(path))


def _override(data: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key.subkey=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent!r} is not a section")
        data = child
    try:
        data[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {' '.join(str(error).split())}") from None


def parse(data: dict, source: str = "config") -> RunConfig:
    """Validate a mapping. Raises UserError with one sentence for the first fault."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        first = faults[0]
        key = ".".join(str(part) for part in first["loc"]) or "config"
        if first["type"] == "extra_forbidden":
            what = f"unknown key; known keys here: {', '.join(_known_keys(first['loc'][:-1]))}"
        elif first["type"] == "missing":
            what = "this key is required"
        else:
            what = first["msg"].removeprefix("Value error, ")
            if not isinstance(first["input"], dict | BaseModel):
                what += f" (got {first['input']!r})"
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{source}: {key}: {what}{more}") from None


def _known_keys(location: tuple) -> list[str]:
    model: Any = RunConfig
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def save(config: RunConfig, path: Path) -> None:
    """Write the resolved config, every default spelled out."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
