"""The documented metrics."""
from pathlib import Path

import numpy as np
from test_oracle_statistics import TASKS, reduced, tokens

from sao_megatron.telemetry import metrics
from sao_megatron.telemetry.statistics import Statistics

ROOT = Path(__file__).parents[2]


def test_the_document_is_the_table():
    """If this fails, docs/metrics.md is out of date: python -m sao_megatron.telemetry.metrics > docs/metrics.md"""
    assert (ROOT / "docs/metrics.md").read_text() == metrics.markdown() + "\n"


def test_every_statistic_is_documented():
    """If this fails, a run writes a metric that nobody explains."""
    statistics = reduced(tokens(0, 60, True), [20])
    statistics.add(value_tokens=3, value=1.0, error=np.ones(3), error_squared=np.ones(3))
    written = statistics.metrics()
    assert all(metrics.known(name) for name in written), [name for name in written if not metrics.known(name)]
    assert f"by_task/dropped {TASKS[0]}" in written and "critic/explained_variance" in written
    assert not metrics.known("by_lag/dropped 7") and not metrics.known("by_colour/dropped red")
    assert metrics.known("evaluation/guess_number/pass@16") and metrics.known("alarm/mask_share")
    assert not metrics.known("evaluation/guess_number/pass@") and not metrics.known("alarm/mask share")
    assert Statistics().metrics() == {}
