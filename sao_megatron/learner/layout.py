"""Does the model fit the parallel layout? Checked from config.json alone, before any process starts."""
from __future__ import annotations

from sao_megatron.config import RunConfig
from sao_megatron.errors import UserError


def check(config: RunConfig, hf_config: dict) -> None:
    """Raise UserError naming the first number that the layout does not divide."""
    parallel = config.parallel
    rules = [("num_attention_heads", "tp", "attention heads"), ("num_key_value_heads", "tp", "key/value heads"),
             ("vocab_size", "tp", "vocabulary"), ("num_experts", "ep", "experts"),
             ("moe_intermediate_size", "etp", "expert width"), ("num_hidden_layers", "pp", "layers")]
    for field, size_name, what in rules:
        size = getattr(parallel, size_name)
        if hf_config.get(field, size) % size:
            raise UserError(f"parallel.{size_name}={size} does not divide the model's {what} ({field}="
                            f"{hf_config[field]}): choose a divisor")
