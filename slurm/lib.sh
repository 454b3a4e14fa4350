# What the sbatch scripts share. Sourced, not run: sets REPOSITORY and PYTHON.
# shellcheck shell=bash

say() { echo "$(date '+%F %T') slurm: $*"; }
fail() { say "$*" >&2; exit 2; }

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${SAO_PYTHON:-$REPOSITORY/.venv/bin/python}
[[ -x $PYTHON ]] || fail "$PYTHON does not exist: run 'make setup' in $REPOSITORY, or set SAO_PYTHON to the interpreter" \
    "of an environment with this package"

# A node's address: its name may resolve only inside Slurm, or to more than one network.
node_address() {
    local given
    given=$(scontrol --oneliner show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    getent ahostsv4 "$given" | awk '{ print $1; exit }'
}

# Run a command as a child that gets Slurm's early warning. If it ends with 75 (well ended before its end: the time is
# up, or a node is lost), the job goes back into the queue, and this script starts again on the nodes it then gets.
run_and_requeue() {
    local child code=0
    "$@" &
    child=$!
    trap 'say "the time limit is near"; kill -USR1 "$child"' USR1
    trap 'kill -TERM "$child"' TERM
    while kill -0 "$child" 2>/dev/null; do  # a trap interrupts wait
        code=0
        wait "$child" || code=$?
    done
    trap - USR1 TERM
    if [[ $code == 75 ]]; then
        say "back into the queue"
        scontrol requeue "${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}"
        sleep 120  # Slurm ends this script
    fi
    say "ended with exit code $code"
    exit "$code"
}
