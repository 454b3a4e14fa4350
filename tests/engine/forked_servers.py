"""Several SGLang servers from one process, which imports SGLang once: most of a server's start on a CPU.

    python forked_servers.py JSON     # a list of argument lists, each as for sao_megatron.engine.cpu
"""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from sao_megatron.engine import cpu


def main(servers: list[list[str]]) -> None:
    cpu.prepare()
    children = []
    for arguments in servers:
        while not (Path(arguments[arguments.index("--model-path") + 1]) / "config.json").exists():
            time.sleep(0.1)  # it is made meanwhile
        children.append(os.fork())
        if not children[-1]:
            cpu.serve(arguments)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
