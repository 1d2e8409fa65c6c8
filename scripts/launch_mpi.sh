#!/bin/bash
# mpirun for runs that are to save when they are told to stop.
#
#   scripts/launch_mpi.sh -np 8 ./train_llama ...                                one host
#   scripts/launch_mpi.sh --hostfile hosts -np 16 ./train_llama ...              several; a line a host: "node1 slots=8"
#
# Arguments are mpirun's. OpenMPI's mpirun kills its ranks two seconds after a SIGTERM or SIGINT; here these (and
# SIGUSR1) make the ranks finish their step, save and leave with 0. A second SIGTERM or SIGINT ends them at once. mpirun
# is in a session of its own, so that Ctrl-C reaches this script alone; should it be sent SIGTERM itself (a batch system
# that signals every process), ranks have 300 s more.
#
# Exit code: the ranks' own. A rank that was killed gives 6 like one that hangs, and what each rank of this host was
# doing last is printed. MPIRUN names another mpirun.
set -u
mpirun=${MPIRUN:-mpirun}
grace_s=300
if [ $# = 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi
command -v "$mpirun" >/dev/null || { echo "launch_mpi.sh: no $mpirun found: install OpenMPI" >&2; exit 2; }

# What the ranks of this host are doing lies in shared memory that outlives them (llmc/board.h). The lock says that
# somebody still uses it: it is held through a descriptor that mpirun inherits.
board=$(mktemp /dev/shm/llmfp8-launch-XXXXXXXX) || exit 7
exec {board_lock}<>"$board"
if command -v flock >/dev/null; then
    flock -s "$board_lock"
    for left in /dev/shm/llmfp8-launch-*; do   # of launchers that were killed
        flock -n -x "$left" rm -f "$left" 2>/dev/null
    done
fi
trap 'rm -f "$board"' EXIT
export LLMFP8_BOARD=${board##*/}

stops=0 told=0
trap 'stops=$((stops + 1))' TERM INT
trap 'stops=$((stops > 0 ? stops : 1))' USR1
setsid "$mpirun" --mca odls_base_sigkill_timeout "$grace_s" "$@" &
pid=$!

# Lines of the board: "outcome NNN", then one a rank, once the ranks have met.
board_lines() { head -c 65536 "$board" | tr -d '\0' | sed 's/ *$//'; }
outcome() {
    local line
    line=$(board_lines | head -n 1)
    [[ $line =~ ^outcome\ ([0-9]+)$ ]] && echo $((10#${BASH_REMATCH[1]})) || echo 0
}
# mpirun's own processes on this host: the ranks, and those that lead to other hosts.
children() { cat "/proc/$pid/task/"*/children 2>/dev/null | wc -w; }

# With that grace mpirun would wait twice as long after a rank that failed, even when all are gone: it is ended as soon
# as nothing of the run can be left. Two signals are how it leaves at once.
end_mpirun() {
    for _ in 1 2; do
        kill -TERM "$pid" 2>/dev/null
        sleep 0.3
    done
}

most=0 quiet=0 forced=""
while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    met=$(board_lines | head -n 1)
    if [ "$stops" -ge 2 ]; then
        echo "launch_mpi.sh: second signal, the run ends without a checkpoint" >&2
        end_mpirun
        forced=143
    elif [ "$stops" = 1 ] && [ "$told" = 0 ] && [ -n "$met" ]; then
        kill -USR1 "$pid"   # mpirun passes it to all ranks
        told=1
    fi
    [ -n "$forced" ] && break
    now=$(children)
    [ "$now" -gt "$most" ] && most=$now
    # Tenths of a second that mpirun outlives its run: an end that the ranks wrote down, no rank left, or one lost
    # before they had met.
    limit=0
    if [ -n "$met" ] && [ "$(outcome)" != 0 ]; then limit=20
    elif [ "$most" -gt 0 ] && [ "$now" = 0 ]; then limit=20
    elif [ -z "$met" ] && [ "$now" -lt "$most" ]; then limit=100
    fi
    if [ "$limit" = 0 ]; then quiet=0; else quiet=$((quiet + 2)); fi
    if [ "$limit" != 0 ] && [ "$quiet" -ge "$limit" ]; then
        end_mpirun
        forced=137
    fi
done
wait "$pid" 2>/dev/null
code=$?
[ -n "$forced" ] && code=$forced
[ "$(outcome)" != 0 ] && [ "$code" != 143 ] && code=$(outcome)
[ "$code" = 137 ] && code=6
if [ "$code" = 6 ]; then
    echo "launch_mpi.sh: a rank was lost or hung. What the ranks did last:" >&2
    board_lines | tail -n +2 | sed 's/^/launch_mpi.sh: /' >&2
fi
exit "$code"
