"""Guards for all tests."""
import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_cpu_shim_in_this_process():
    """The shim that lets Megatron run on a CPU makes Transformers compute wrongly: only workers may install it."""
    yield
    assert "sao_megatron.learner.mcore_cpu" not in sys.modules, "a test imported the learner: give it a worker process"
