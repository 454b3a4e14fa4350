#!/usr/bin/env bash
# The controller of a prepared run. Usage: launch/controller.sh runs/<name>
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python" -m sao_megatron.cli controller "$@"
