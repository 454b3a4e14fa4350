"""What a Slurm task runs before it becomes a role: `python -m sao_megatron.placement.task [NAME=VALUE …] -- command …`.

Writes the node's name as the log's first line, and sets what only the task knows: its rank, and the variables that
Slurm would overwrite (CUDA_VISIBLE_DEVICES). `%t` in the command stands for the task's number. Runs in the container.
"""
from __future__ import annotations

import os
import socket
import sys
import time


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    task, tasks = os.environ["SLURM_PROCID"], os.environ["SLURM_STEP_NUM_TASKS"]
    print(f"{socket.gethostname()}: job {os.environ['SLURM_JOB_ID']}, step {os.environ['SLURM_STEP_ID']}, task {task} "
          f"of {tasks}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    os.environ |= {"RANK": task, "WORLD_SIZE": tasks, "LOCAL_RANK": os.environ["SLURM_LOCALID"]}
    os.environ |= dict(argument.split("=", 1) for argument in arguments[:split])
    command = [argument.replace("%t", task) for argument in arguments[split + 1:]]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
