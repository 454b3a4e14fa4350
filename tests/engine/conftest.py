"""`engine` is one server for the whole session. A test that publishes weights changes `engine.model` too, so that at
any time the model and the server hold the same weights."""
from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from served import QUICK, START_SECONDS, Engine, engine_process, make_tiny_model


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model")
    process = engine_process(folder / "model", "--weight-version", "0", "--enable-return-routed-experts")
    process.start(folder / "engine.log")
    try:
        process.wait_healthy(time.monotonic() + START_SECONDS)
        yield Engine(process.url, model, version=0)
    finally:
        process.stop(QUICK)
