"""The one-pass head on two ranks: vocabulary shards, and its weight gradient under DDP with overlapped reduction."""
from __future__ import annotations

import json

import pytest
from reference import make_model


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    folder = tmp_path_factory.mktemp("head")
    for name in ("tied", "untied"):
        make_model(folder / name, tied=name == "tied", layers=4)
    run_ranks("head_worker.py", 2, str(folder))
    return json.loads((folder / "head.json").read_text())


def test_shards_equal_full_log_softmax(results):
    """If this fails, log-probs, mask or gradients depend on how the vocabulary is split."""
    for name, error in results["shards"].items():
        assert error <= (1e-5 if name.startswith("d ") else 1e-6), (name, error)


@pytest.mark.parametrize("layout", ["dp2", "dp2, tied", "pp2", "pp2, tied", "pp2 vpp2", "pp2 vpp2, tied", "tp2"])
def test_main_grad_equals_autograd(results, layout):
    """If this fails, adding the head's gradient in the forward loses, doubles or reduces it too early, or loss scaling
    is not applied to it."""
    assert results[layout] < 1e-5
