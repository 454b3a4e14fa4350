#!/usr/bin/env bash
# Slurm's daemons and shellcheck, for tests/slurm. Installed only where that takes no password; without them those tests
# are skipped and say so.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

missing=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
command -v shellcheck >/dev/null || missing+=(shellcheck)
((${#missing[@]})) || exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "slurm: installing ${missing[*]} with apt-get, for tests/slurm"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 && exit 0
fi
echo "slurm: ${missing[*]} not found, the tests that need them will be skipped; install them, for example with" \
    "'sudo apt-get install ${missing[*]}'"
