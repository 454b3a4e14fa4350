"""Every benchmark of tools/benchmark as a process of seconds. What it measures at such a size means nothing and is not
looked at, only that it is measured, shown and written. If one fails, a command of the documentation does not run, or
loses what it measured."""
from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 300
"""For one, on a machine that does other things too."""
NO_BENCHMARKS = {"common", "stub_engine", "waiting"}  # what the others import, start and play


@dataclass(frozen=True)
class Case:
    """The arguments of a script's smallest run, and what comes of it: `key` of each row, a printed line for each, the
    numbers that each has, and how many aims there are."""

    arguments: str
    key: str
    rows: list
    line: str
    numbers: list[str]
    aims: int


CASES = {
    "async_speedup": Case(
        "--only 'single rollouts' --batch 8 --concurrency 8 --steps 1 --skip 0 --turns 1 --seconds 0.01",
        "schedule", ["single rollouts"], r"single rollouts +[\d.]+ +[\d.]+ ",
        ["seconds_per_trajectory", "of_bound", "learner_busy", "episode_mean_s", "lag_mean"], 1),
    "controller": Case(
        "--concurrency 4 --latency 0.1 --seconds 0.5", "concurrency", [4], r"turns_per_second +[\d.]+$",
        ["turns_per_second", "share_of_possible", "cpu_ms_per_turn", "busiest_core"], 1),
    "engine": Case(
        "--concurrency 1 2 --seconds 0.2", "concurrency", [1, 2], r"concurrency [12]: \d+ requests/s, median \d+ ms",
        ["requests_per_second", "median_ms"], 2),
    "logprob": Case(
        "--tokens 256 --vocabulary 8192 --hidden 32 --rounds 1 --share 0.2 --head 'one pass'",
        "head", ["full", "one pass"], r" +20% +(?:full|one pass)( +[\d.]+){4}$",
        ["seconds", "elapsed", "peak_bytes", "time_ratio", "memory_ratio"], 2),
    "pauses": Case(
        "--requests 2 --prompt 16 --tokens 400 --publications 1 --between 0.1 --layers 1 --hidden 64 --experts 2",
        "mode", ["retract", "in_place", "abort"], r"\w+ +paused [\d.]+ s, lost -?[\d.]+ s a publication$",
        ["paused_s", "lost_s", "turns_s"], 2),
    "publication_model": Case(
        "", "model", ["Qwen3-30B-A3B", "GLM-4.5-Air", "744B MoE"], r"\| [\w.\- ]+ \| \d, \d+ \| \d+( \| [\d.]+){5} \|$",
        ["GB", "gather", "send and load", "in all"], 3),
    "publish": Case(
        "--layers 1 --hidden 64 --experts 2 --bucket-mib 1 2 --rounds 1", "bucket", [1, 2],
        r"\| (?:send|load)( \| [\d.]+){2} \|$", ["bytes"], 1),
    "routing_replay": Case(
        "--trajectories 2 --tokens 8", "learner", ["float32", "float32", "bfloat16", "bfloat16"],
        r"b?float\d\d +learner, (?:own|engine) +routing: \|difference\| mean [\d.]+, ", ["mean", "p99", "max"], 2),
    "sandbox": Case(
        "--seconds 0.2", "what",
        ["Python with numpy and sympy, started anew (ms)", "a session, started, used once and ended (ms)",
         "short pieces of code a second and core", "memory of an idle session (MB)"], r".{50} +[\d.]+$", ["value"], 2),
    "telemetry": Case(
        "--steps 1 --trajectories 1", "size", ["demo", "larger"], r"\w+: \d+ tokens, [\d.]+ s a step without any of it",
        ["step", "with_all", "waited", "beside", "drawing"], 1),
}


def run(script: str, path: Path) -> subprocess.CompletedProcess:
    """Its end, or that of SIGINT, at which it ends what it has started."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / f"tools/benchmark/{script}.py"), *shlex.split(CASES[script].arguments), "--json",
         str(path)], env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, cwd=path.parent, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory) -> Iterator[dict[str, tuple[Future, Path]]]:
    """Those that are asked for, two at a time: most of each is imports, on one core."""
    folder, pool = tmp_path_factory.mktemp("benchmarks"), ThreadPoolExecutor(2)
    chosen = [item.callspec.params["script"] for item in request.session.items
              if item.path == Path(__file__) and "ended" in item.fixturenames]
    paths = {script: folder / f"{script}.json" for script in chosen}
    yield {script: (pool.submit(run, script, path), path) for script, path in paths.items()}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("script", CASES)
def test_what_is_measured_is_shown_and_written_with_its_aims(script, ended):
    case, (future, path) = CASES[script], ended[script]
    done = future.result()
    assert done.returncode == 0, done.stderr[-3000:]
    result, lines = json.loads(path.read_text()), done.stdout.splitlines()
    assert [row[case.key] for row in result["rows"]] == case.rows
    for row in result["rows"]:
        assert all(math.isfinite(row[number]) for number in case.numbers), row
    assert len([line for line in lines if re.match(case.line, line)]) == len(case.rows), done.stdout
    assert len(result["aims"]) == case.aims
    for aim in result["aims"]:
        value, wanted = aim["value"], aim["aim"]
        assert math.isfinite(value) and math.isfinite(wanted), aim
        assert aim["met"] is (value >= wanted if aim["at_least"] else value <= wanted), aim
        [line] = [line for line in lines if line.startswith(f"{aim['what']}: ")]
        assert line.endswith(": met" if aim["met"] else ": missed"), line


def test_no_benchmark_is_left_out():
    assert {path.stem for path in (ROOT / "tools/benchmark").glob("*.py")} == CASES.keys() | NO_BENCHMARKS
