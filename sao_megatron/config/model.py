"""Sections of a recipe about the model and its layout over the learner's ranks."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from sao_megatron.config.section import Section


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
    """Layers for multi-token prediction (DeepSeek-V3, GLM) are not trained; `keep`: exports have them as they came."""

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
    vpp: int = Field(1, ge=1)
    """Virtual pipeline size: each pipeline rank holds this many runs of layers, which divides the pipeline's idle time
    by as much and sends activations as many times (the interleaved schedule of arXiv 2104.04473). 1 = none."""
    cp: int = Field(1, ge=1)
    """Context parallel size: the tokens of every sequence are spread over this many ranks."""
    ep: int = Field(1, ge=1)
    """Expert parallel size: the experts are spread over this many ranks."""
    etp: int = Field(1, ge=1)
    """Tensor parallel size inside one expert."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to the experts."""
    recompute: Literal["none", "full"] = "none"
    """full: keep only each layer's input and compute the layer again in the backward (a third more time; long contexts
    of large models fit no other way)."""

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
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} with pp=1: a virtual pipeline needs a pipeline: set vpp=1, or pp > 1")
        if self.ranks % (self.tp * self.pp * self.cp):
            raise ValueError(f"ranks={self.ranks} is not a multiple of tp*pp*cp = {self.tp}*{self.pp}*{self.cp}")
        if self.ranks % (self.ep * self.etp * self.pp):
            raise ValueError(f"ranks={self.ranks} is not a multiple of ep*etp*pp = {self.ep}*{self.etp}*{self.pp}")
        return self
