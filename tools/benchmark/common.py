"""What the benchmarks share: a model, engines, and how a result is told."""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sao_megatron.config import RunConfig
from sao_megatron.engine.process import EngineProcess, engine_command, engine_environment, free_port

START_SECONDS = 600.0


def qwen3_moe(*, vocab: int, hidden: int, heads: int, layers: int, experts: int, width: int,
              **fields: Any) -> dict[str, Any]:
    """config.json of a Qwen3-MoE that engines and learners both read; `width` is an expert's."""
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": vocab,
            "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": hidden // heads,
            "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True,
            "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 1024,
            "tie_word_embeddings": False} | fields


def engine_of(config: RunConfig, model: Path, gpu: bool) -> EngineProcess:
    """An engine of the folder `model` at a free port, not started."""
    port = free_port()
    return EngineProcess(engine_command(config, model, port, gpu), engine_environment(gpu), f"http://127.0.0.1:{port}")


@contextmanager
def running(engines: list[EngineProcess], folder: Path) -> Iterator[None]:
    """The engines answer within, and have ended afterwards; their logs are in `folder`."""
    try:
        for number, engine in enumerate(engines):
            engine.start(folder / f"engine-{number}.log")
        for engine in engines:
            engine.wait_healthy(time.monotonic() + START_SECONDS)
        yield
    finally:
        for engine in engines:
            engine.stop(grace=0.1)


def be_the_only_rank() -> None:
    """What torch.distributed reads of a process that is the whole learner."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


@dataclass(frozen=True)
class Aim:
    """`value` is to be at least `aim`, or at most. A value that is not a number misses it."""

    what: str
    value: float
    aim: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.aim if self.at_least else self.value <= self.aim

    def __str__(self) -> str:
        return (f"{self.what}: {self.value:.4g} (aim: at {'least' if self.at_least else 'most'} {self.aim:.4g}): "
                f"{'met' if self.met else 'missed'}")


def conclude(rows: list[dict], aims: list[Aim], path: Path | None, **more: Any) -> None:
    """The end of every benchmark: a line for each aim and, if there is a path, all of it as JSON there."""
    for aim in aims:
        print(aim)
    if path:
        told = [asdict(aim) | {"met": aim.met} for aim in aims]
        path.write_text(json.dumps({"rows": rows, "aims": told, **more}, indent=1) + "\n")
