"""Sections of a recipe about tasks, episodes, engines and the weights that they get."""
from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sao_megatron.config.section import Section


class LimitsSection(Section):
    """Of one episode, beside the task's own; where one is reached, the trajectory ends as `truncated`."""

    turns: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=2)
    """Of the whole trajectory (rollout.max_tokens holds as well)."""
    seconds: float | None = Field(None, gt=0)
    """Wall time. A turn that is being sampled then is still sampled; an environment that still answers is left."""


class TaskSection(Section):
    name: str
    """A task of docs/rollouts.md such as guess_number, or path/to/file.py:Class."""
    options: dict[str, Any] = {}
    """Arguments of the task's constructor."""
    limits: LimitsSection = LimitsSection()


class RolloutSection(Section):
    max_lag: int = Field(2, ge=0)
    """Lag (in versions) that admission aims at; 0 = synchronous. A trajectory overtaken by later ones can exceed it."""
    max_token_lag: int | None = Field(None, ge=0)
    """Last resort: a trajectory with a token older than this is dropped, and counted, instead of trained."""
    concurrency: int = Field(256, ge=1)
    """Most episodes in flight, of all controllers together."""
    controllers: int = Field(1, ge=1)
    """Controller processes, which deal the prompts in turn: for fleets that one process cannot feed."""
    redundancy: int = Field(0, ge=0)
    """Rollouts of a group beyond rollouts_per_prompt: the first rollouts_per_prompt that end are trained, the others
    cancelled. That favours short ones (docs/pacing.md)."""
    max_new_tokens: int = Field(1024, ge=1)
    """Most tokens sampled in one turn."""
    max_tokens: int = Field(32768, ge=2)
    """Longest trajectory, all its segments together; a longer one ends as `truncated`."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds for one generation request (of at most request_tokens)."""
    request_tokens: int = Field(4096, ge=1)
    """Most tokens of one request; a longer turn is asked for in pieces, so that an engine that dies loses no more."""
    starvation_timeout: float = Field(3600.0, gt=0)
    """Seconds that the learner waits for one batch of trajectories before it gives up."""
    environment_retries: int = Field(2, ge=0)
    """Fresh tries of an episode whose environment failed, before it is recorded as `error`."""
    routing_replay: bool = False
    """Record which experts the engine routes each token to, and train the policy with the same ones
    (docs/routing-replay.md)."""
    quarantine_after: int = Field(3, ge=0)
    """A prompt of which the episodes failed in this many groups, with no success between, is not played any more and is
    counted; 0 = never."""

    @model_validator(mode="after")
    def _enough_for_each_controller(self):
        if self.concurrency < self.controllers:
            raise ValueError(f"concurrency={self.concurrency} leaves some of controllers={self.controllers} without an "
                             f"episode: at least one each")
        return self


class EvaluationSetSection(Section):
    task: TaskSection
    episodes: int = Field(ge=1)
    """Prompts of the task's fixed evaluation set."""
    samples: int | None = Field(None, ge=1)
    """Episodes of each prompt, if not evaluation.samples."""
    weight: float = Field(1.0, gt=0)
    """In the mean over all sets."""


class EvaluationSection(Section):
    episodes: int = Field(0, ge=0)
    """Prompts of the run's own task's fixed evaluation set, played before the first and after the last step; 0 = none.
    """
    sets: dict[str, EvaluationSetSection] = {}
    """Further sets by name, of any tasks."""
    samples: int = Field(1, ge=1)
    """Episodes of each prompt: avg@samples, and pass@k for k = 1, 2, 4 … samples."""
    every: int = Field(0, ge=0)
    """Also after every so many policy updates, beside the training episodes and behind them in the engines' queues;
    0 = never."""
    pinned: bool = False
    """An evaluation within the run belongs to one version: the learner waits for it before it trains on. Without, the
    weights change under it, and the record says from which to which version."""
    temperature: float = Field(1.0, ge=0)
    only: bool = False
    """With mode=rollout: evaluate and record no trajectories (the verb `evaluate`)."""

    @property
    def count(self) -> int:
        """Number of sets."""
        return len(self.sets) + bool(self.episodes)


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
