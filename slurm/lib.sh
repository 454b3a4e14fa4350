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

# Ask Slurm not to give the job, which waits in the queue, the nodes that the launcher has named: one a line. (Of a
# heterogeneous job this is for all components.)
exclude_nodes() {
    local job=$1 bad given
    bad=$(paste -sd, "$SAO_EXCLUDE")
    [[ $bad ]] || return 0
    given=$(scontrol --oneliner show job "$job" | sed -n "s/^JobId=$job .* ExcNodeList=\([^ ]*\).*/\1/p")
    [[ $given != "(null)" ]] || given=
    scontrol update JobId="$job" ExcNodeList="${given:+$given,}$bad"
    say "without $bad"
}

# Run a command as a child that gets Slurm's early warning. If it ends with 75 (well ended before its end: the time is
# up, or a node is lost or bad), the job goes back into the queue, and this script starts again on the nodes it then gets.
run_and_requeue() {
    local child code=0 job=${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}
    SAO_EXCLUDE=$(mktemp)
    export SAO_EXCLUDE
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
        trap '' TERM  # Slurm ends this script
        scontrol requeue "$job"
        exclude_nodes "$job"
        rm -f "$SAO_EXCLUDE"
        sleep 120
    fi
    rm -f "$SAO_EXCLUDE"
    say "ended with exit code $code"
    exit "$code"
}
