"""SGLang's server: `python -m sao_megatron.engine.server <arguments of sglang.launch_server>`, which it is but for its
metrics (engine/collectors.py). Where there is no GPU, engine/cpu.py first makes it run."""
from __future__ import annotations

import os
import sys


def serve(arguments: list[str]) -> None:
    """Serve until terminated; `arguments` are those of `sglang.launch_server`."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sao_megatron.engine.collectors import COLLECTORS
    try:
        server_args = prepare_server_args(arguments)
        server_args.stat_loggers = COLLECTORS
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins
    load_plugins()
    serve(sys.argv[1:])
