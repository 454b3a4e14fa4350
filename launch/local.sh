#!/usr/bin/env bash
# A whole run on this machine. Usage: launch/local.sh configs/guess-number-cpu.yaml [key=value ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python" -m sao_megatron.cli train "$@"
