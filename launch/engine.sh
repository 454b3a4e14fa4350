#!/usr/bin/env bash
# One engine of a prepared run. Usage: launch/engine.sh runs/<name> --index 0
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python" -m sao_megatron.cli engine "$@"
