"""The GPUs of an engine, whose machine may have no learner rank: counters in a file of the run's folder.

    python -m sao_megatron.telemetry.engine_gpus FOLDER PORT arguments-of-python …

becomes `python arguments …`, the engine, with a reader beside it that writes FOLDER/PORT-RANK.json every few seconds
and ends with it. An engine over several machines has a reader, and a RANK, on each. The controller takes the files up.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from sao_megatron.child import end_with_parent
from sao_megatron.telemetry.machine import Gpus

EVERY = 5.0
"""Seconds between two looks."""
FRESH = 60.0
"""Seconds after which a file is of an engine that has ended (clocks of machines may differ by some)."""


def of_engine(folder: Path, port: int) -> list[dict[str, float]]:
    """Counters of each GPU of the engine that listens on `port`, by name of machine.GPU_FIELDS; [] if unknown."""
    found = []
    for path in sorted(folder.glob(f"{port}-*.json"), key=lambda path: int(path.stem.rpartition("-")[2])):
        with suppress(OSError, ValueError):  # gone, or of a machine that died while it wrote
            said = json.loads(path.read_text())
            found += said["gpus"] if abs(time.time() - said["time"]) < FRESH else []
    return found


def own(uuids: list[str], visible: str | None) -> list[str]:
    """Of a machine's GPUs those that CUDA_VISIBLE_DEVICES names, by number or by the beginning of a UUID."""
    if not visible:
        return uuids
    return [next(uuid for uuid in uuids if uuid.startswith(name)) if name.startswith("GPU-") else uuids[int(name)]
            for name in visible.split(",")]


def read_on(path: Path) -> None:
    """Write the file again and again; return at once where there is no GPU, or no library to read it with."""
    gpus = Gpus()
    uuids = own(gpus.uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    part = path.with_suffix(".part")
    while uuids:
        with suppress(OSError):  # a full disk does not end what nobody needs
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"time": time.time(), "gpus": [gpus.read(uuid) for uuid in uuids]}))
            part.replace(path)
        time.sleep(EVERY)


def main(folder: str, port: str, *arguments: str) -> None:
    path = Path(folder) / f"{port}-{os.environ.get('RANK', '0')}.json"
    if not arguments:
        read_on(path)
        return
    subprocess.Popen([sys.executable, "-m", __spec__.name, folder, port], preexec_fn=end_with_parent)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
