#!/usr/bin/env bash
# Make .venv: Python >= 3.12, the pinned packages, this package (editable). At once done when nothing changed.
#
# The stamp .venv/ready holds a checksum of every file that decides what is installed, and the repository's path
# (an editable install and a venv do not survive a move). A run that failed halfway leaves no stamp, so the next one
# goes on where it stopped. An existing .venv of a fitting Python is kept and brought up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/ready
NEEDED_GB=12  # the CUDA build of torch is what the package index serves: 6 GB installed, and its wheels in a cache

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# Python >= 3.12, able to make a venv, with the header files for the packages that come as C source.
fits() {
    "$1" -c 'import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info < (3, 12) or not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    # A name on PATH may be a pyenv shim of a version that is not active: only running it tells.
    for candidate in python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python3 \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-3.1[2-4]*/bin/python3; do
        if fits "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python >= 3.12 with venv and header files found (looked on PATH, in pyenv's and in uv's versions): install" \
        "one with 'pyenv install 3.12', 'uv python install 3.12' or 'apt-get install python3.12-venv python3.12-dev'," \
        "then run make again"
}

check_machine() {
    local compiler free_gb
    compiler=$(command -v cc || command -v gcc || command -v clang || true)
    [[ -n $compiler ]] || fail "no C compiler found (cc, gcc or clang): some packages come as C source, and Triton" \
        "compiles when it runs; install one, for example with 'apt-get install gcc', then run make again"
    free_gb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024 / 1024))
    ((free_gb >= NEEDED_GB)) || fail "$free_gb GB free on the disk of $PWD, $NEEDED_GB GB needed (torch is 6 GB):" \
        "free some, then run make again"
}

make_venv() {
    local python
    python=$(find_python)
    say "making $VENV with $python ($("$python" -V))"
    "$python" -m venv --clear $VENV || fail "$python -m venv failed: its output above says why"
}

# uv is about ten times faster than pip. It does not read pip's configuration (mirrors), so pip is also the second try.
get_uv() {
    $VENV/bin/python -m uv --version >/dev/null 2>&1 && return
    say "installing uv"
    $VENV/bin/python -m pip install --quiet uv >/dev/null 2>&1 || say "uv cannot be installed: using pip (slower)"
}

install() {
    if $VENV/bin/python -m uv --version >/dev/null 2>&1; then
        $VENV/bin/python -m uv pip install --quiet --python $VENV/bin/python "$@" && return
        say "uv failed (above): trying pip"
    fi
    $VENV/bin/python -m pip install --quiet "$@" || fail "installing $* failed: pip's output above says why" \
        "(no network, or no package index: see 'pip config list'); run make again to go on"
}

install_packages() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        # Never run by the authors, who had no machine with both a GPU and a package index. TransformerEngine builds
        # its torch part against the torch that is installed, hence two steps and no build isolation.
        say "GPU found: installing the package and its dependencies (torch is 6 GB: some minutes)"
        install --editable '.[dev]'
        say "GPU found: installing SGLang and TransformerEngine (compiles, up to half an hour)"
        install --no-build-isolation --editable '.[dev,gpu]'
    else
        say "no GPU found: installing the package, its dependencies and what SGLang needs on CPU (torch is 6 GB: some minutes)"
        install --constraint requirements/constraints.txt --requirement requirements/engine-cpu.txt --editable '.[dev]'
        say "installing SGLang without its CUDA dependencies"
        install --no-deps --requirement requirements/engine-cpu-no-deps.txt
    fi
    install --no-deps --requirement requirements/tasks-no-deps.txt
}

# uv installs sources only. Without this the first process of each kind pays for the compilation, and where
# PYTHONDONTWRITEBYTECODE is set every process does: 10 s for a learner, 12 s for an engine.
compile_bytecode() {
    say "compiling what the processes import"
    local command=(env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python")
    "${command[@]}" -c 'import sao_megatron.learner.runtime, tensorboard, transformers' >/dev/null 2>&1 &
    "${command[@]}" -m sao_megatron.engine.cpu --help >/dev/null 2>&1 || true
    wait
}

wanted=$({ echo "$PWD"; cat pyproject.toml requirements/*.txt tools/setup.sh; } | cksum)
[[ -x $VENV/bin/python && -f $STAMP && $(<$STAMP) == "$wanted" ]] && exit 0

rm -f $STAMP
compgen -G "$VENV/lib/python3*/site-packages/torch" >/dev/null || check_machine
fits $VENV/bin/python || make_venv
get_uv
install_packages
compile_bytecode
echo "$wanted" >$STAMP
say "done ($VENV)"
