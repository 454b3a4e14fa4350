"""RunConfig: everything a run needs to know, one pydantic model per section.

A recipe is a YAML file with these sections; `key.subkey=value` on the command line overrides it. Unknown
keys, wrong types and layouts that do not fit are refused with one sentence before any process starts.
"""
from sao_megatron.config.algorithm import (
    AdamSection,
    AlgorithmSection,
    BatchSection,
    CriticAdamSection,
    CriticSection,
    WarmupSection,
)
from sao_megatron.config.cluster import ClusterSection, ContainerSection, Placement, placement
from sao_megatron.config.loading import load, overridden, parse, save
from sao_megatron.config.model import ModelSection, ParallelSection
from sao_megatron.config.rollouts import (
    EngineSection,
    EvaluationSection,
    EvaluationSetSection,
    LimitsSection,
    PublicationSection,
    RolloutSection,
    TaskSection,
)
from sao_megatron.config.run import RunConfig
from sao_megatron.config.sandbox import SandboxSection
from sao_megatron.config.section import Section
from sao_megatron.config.watching import AlarmSection, CheckpointSection, TokensSection, WritersSection

__all__ = [
    "AdamSection",
    "AlarmSection",
    "AlgorithmSection",
    "BatchSection",
    "CheckpointSection",
    "ClusterSection",
    "ContainerSection",
    "CriticAdamSection",
    "CriticSection",
    "EngineSection",
    "EvaluationSection",
    "EvaluationSetSection",
    "LimitsSection",
    "ModelSection",
    "ParallelSection",
    "Placement",
    "PublicationSection",
    "RolloutSection",
    "RunConfig",
    "SandboxSection",
    "Section",
    "TaskSection",
    "TokensSection",
    "WarmupSection",
    "WritersSection",
    "load",
    "overridden",
    "parse",
    "placement",
    "save",
]
