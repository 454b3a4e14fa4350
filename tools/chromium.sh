#!/usr/bin/env bash
# Chromium for the test of the page that `sao-megatron inspect --html` writes. Installed only where that takes no
# password; without it that test is skipped and says so.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v $name >/dev/null && exit 0
done
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "chromium: installing it with apt-get, for the test of the page"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0
fi
echo "chromium: none found, the test of the page will be skipped; install it, for example with" \
    "'sudo apt-get install chromium'"
