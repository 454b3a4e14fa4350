"""One SGLang server as a child process: its command line, its environment, its life.

The server and everything it forks form one process group of their own, so that stopping it leaves nothing
behind. Its output goes to a log file; if it dies while starting, the error quotes the line that says why.
"""
from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from sao_megatron.blame import last_words
from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.run_folder import RunFolder

POLL_SECONDS = 0.2
FREE_PORTS = range(10000, 32768)
"""Where ports are sought: Linux gives those above to outgoing connections, and an engine binds its port up to a minute
after it was found free, and once more where it is started again."""


def engine_command(config: RunConfig, model_dir: Path, port: int, gpu: bool) -> list[str]:
    """Command line of one server for the HF folder `model_dir` (config.json alone gives random weights)."""
    engine = config.engine
    counted = ["-m", "sao_megatron.telemetry.engine_gpus", str(RunFolder(config.run_dir).gpus_dir), str(port)]
    server = [*counted, "-m", "sglang.launch_server"] if gpu else ["-m", "sao_megatron.engine.cpu"]
    command = [sys.executable, *server,
               "--model-path", str(model_dir), "--host", engine.host, "--port", str(port),
               "--tp-size", str(engine.tp), "--dtype", config.model.dtype,
               "--max-running-requests", str(engine.max_running_requests),
               "--skip-tokenizer-init", "--skip-server-warmup",  # token in, token out
               # Older episodes first, evaluations last (their requests say so); before all the learner's probes.
               "--enable-priority-scheduling", "--disable-priority-preemption", "--default-priority-value", "99",
               "--sleep-on-idle",  # else the scheduler keeps one core busy while it waits
               "--enable-metrics",  # rollout/engine_metrics.py reads them
               "--log-level", "warning"]  # a line per request and per batch costs more than a short request
    if not list(model_dir.glob("*.safetensors")):
        command += ["--load-format", "dummy"]  # the learner's first publication brings the weights
    if config.rollout.routing_replay:
        command += ["--enable-return-routed-experts"]
    if config.mode == "rollout":
        command += ["--weight-version", "0"]  # nobody publishes: what the engine starts with is version 0
    if not gpu or config.publication.mode == "in_place":
        # With overlap the first token after an in-place update carries the new version but was sampled from the old
        # weights. A CPU gains nothing from overlap.
        command += ["--disable-overlap-schedule"]
    if config.publication.mode == "in_place":
        # The prefix cache cannot be flushed under running requests: later episodes would go on from keys and values of
        # ever older weights.
        command += ["--disable-radix-cache"]
    if not gpu:
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                    "--grammar-backend", "none", "--max-total-tokens", str(engine.max_total_tokens),
                    # The pool is max_total_tokens; this only decides how much memory others may take while the server
                    # starts, which SGLang counts as its own weights.
                    "--mem-fraction-static", "0.8"]
    return command + engine.extra_args


def engine_environment(gpu: bool, tp: int = 1) -> dict[str, str]:
    """What a server's environment needs on top of its parent's; `tp` is config.engine.tp."""
    # /health answers by itself; otherwise it generates a token, which hangs while generation is paused.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if not gpu:
        environment["OMP_NUM_THREADS"] = "1"
        # glibc gives large blocks back to the system and faults in new pages for each bucket of weights, at the cost of
        # the transfer itself; a GPU's allocator keeps them. (Measured by tools/benchmark/publish.py.)
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
        if tp > 1:  # one core per tensor-parallel rank; SGLang does not choose them itself
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tp))
    return environment


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listened on a moment ago."""
    while True:
        port = random.SystemRandom().choice(FREE_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port


class EngineProcess:
    """Starts, watches and stops one server.

    `environment` is added to this process's own; `url` is where the server can be reached, http://host:port.
    """

    def __init__(self, command: list[str], environment: dict[str, str], url: str):
        self.command, self.environment, self.url = command, environment, url
        self.log_path: Path | None = None
        self._process: subprocess.Popen | None = None

    def start(self, log_path: Path) -> None:
        """Start the server; its output is appended to `log_path`."""
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also its group; None before `start`."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Exit code of the server, None while it runs."""
        if self._process is None:
            raise RuntimeError("EngineProcess.start() was not called")
        return self._process.poll()

    def wait_healthy(self, deadline: float) -> None:
        """Wait until the server answers; RunError if it dies or time.monotonic() passes `deadline`."""
        while not answers(self.url):
            code = self.poll()
            if code is not None:
                raise RunError(f"engine {self.url} died while starting (exit code {code}): {self._last_words()}")
            if time.monotonic() > deadline:
                raise RunError(f"engine {self.url} was not healthy in time (engine.start_timeout); "
                               f"its log ends with {self._last_words()}")
            time.sleep(POLL_SECONDS)

    def stop(self, grace: float = 5.0) -> None:
        """SIGTERM to the server, and after at most `grace` seconds SIGKILL to all its processes. Safe to repeat."""
        if self._process is None:
            return
        # Not to the group: the server would report its own children's end as a crash.
        self._process.terminate()
        deadline = time.monotonic() + grace
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        return f"{last_words(self.log_path)[0][:500]!r} (log: {self.log_path})"


def answers(url: str, timeout: float = 5.0) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
