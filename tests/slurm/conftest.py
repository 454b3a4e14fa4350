"""One cluster for all tests here: five nodes, which say that they have eight GPUs each, which nobody opens."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from job import Job


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=5, gpus=8) as cluster:
        yield cluster


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[Job]:
    """A run's folder and its job, which ends with the test; the next one finds all nodes idle."""
    job = Job(cluster, tmp_path)
    yield job
    job.end()
    cluster.restore()
