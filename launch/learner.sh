#!/usr/bin/env bash
# The learner ranks of a prepared run, on this machine. Usage: launch/learner.sh runs/<name> RANKS
# (RANKS is parallel.ranks of runs/<name>/config.yaml; under Slurm, srun starts the ranks instead.)
set -euo pipefail
[[ $# -eq 2 ]] || { echo "usage: $0 runs/<name> RANKS" >&2; exit 2; }
exec "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node "$2" -m sao_megatron.cli learner "$1"
