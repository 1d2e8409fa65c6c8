#!/bin/bash
# mpirun for runs that are to save when they are told to stop.
#
#   scripts/launch/launch_mpi.sh -np 8 ./train_llama ...                     one host
#   scripts/launch/launch_mpi.sh --hostfile hosts -np 16 ./train_llama ...   several; a line a host: "node1 slots=8"
#
# Arguments are mpirun's. OpenMPI's mpirun kills its ranks two seconds after a SIGTERM or SIGINT; here these (and
# SIGUSR1) make the ranks finish their step, save and leave with 0: they are told through shared memory, since mpirun
# passes SIGUSR1 on only if whoever started it has not blocked it. A second SIGTERM or SIGINT, 1 s or more after the
# first, ends them at once. mpirun is in a session of its own, so that Ctrl-C reaches this script alone; should it be
# sent SIGTERM itself (a batch system that signals every process), ranks have 300 s more.
#
# Exit code: the ranks' own. A rank that was killed gives 6 like one that hangs, and what each rank was doing last is
# printed. MPIRUN names another mpirun.
set -u
mpirun=${MPIRUN:-mpirun}
grace_s=300
if [ $# = 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi
command -v "$mpirun" >/dev/null || { echo "launch_mpi.sh: no $mpirun found: install OpenMPI" >&2; exit 2; }

# The heartbeats of the ranks are in shared memory that outlives them (llmc/fault/heartbeat.h). The lock says that it is
# still in use: mpirun inherits the descriptor that holds it. The file gets the name by which other launchers find it
# once it is locked.
table=$(mktemp /dev/shm/llmfp8-new-XXXXXXXX) || exit 7
exec {table_lock}<>"$table"
! command -v flock >/dev/null || flock -s "$table_lock"
named=${table/-new-/-launch-}
mv "$table" "$named" || exit 7
table=$named
if command -v flock >/dev/null; then
    for left in /dev/shm/llmfp8-launch-*; do   # of launchers that were killed
        # flock would create a file that another launcher has just removed.
        ( exec {left_lock}<"$left" && flock -n -x "$left_lock" && rm -f "$left" ) 2>/dev/null
    done
fi
trap 'rm -f "$table"' EXIT
export LLMFP8_HEARTBEATS=${table##*/}

stops=0 told=0 first_us=0
# A signal within a second of the first is another copy of it: timeout(1) and batch systems send several.
on_stop() {
    local now_us=${EPOCHREALTIME//[.,]/}
    if [ "$stops" = 0 ]; then stops=1 first_us=$now_us
    elif [ $((now_us - first_us)) -ge 1000000 ]; then stops=2
    fi
}
trap on_stop TERM INT
trap '[ "$stops" != 0 ] || on_stop' USR1
env --block-signal=TERM setsid "$mpirun" --mca odls_base_sigkill_timeout "$grace_s" "$@" &
pid=$!

# The table begins with text: "outcome NNN" once the ranks have met ("outcome end" if all ended as they should), the
# reason, and a line for each rank.
heartbeat_lines() { head -c 65536 "$table" | tr -d '\0' | sed 's/ *$//'; }
# Sets ended: the exit code that the ranks ended with, "end", 0 if none has ended, "" if they have not met.
read_outcome() {
    local head=""
    read -r -N 11 head < "$table"
    ended=""
    [[ $head =~ ^outcome\ ([0-9]{3})$ ]] && ended=$((10#${BASH_REMATCH[1]}))
    [ "$head" = "outcome end" ] && ended=end
}
# mpirun's own processes on this host that live: the ranks, and those that lead to other hosts. While it waits for the
# grace to be over, it does not take notice of their end.
children=()
list_children() {
    local some=() child stat
    children=()
    read -r -d '' -a some 2>/dev/null < <(cat "/proc/$pid/task/"*/children 2>/dev/null)
    for child in "${some[@]}"; do
        read -r stat 2>/dev/null < "/proc/$child/stat" && [[ $stat != *") Z "* ]] && children+=("$child")
    done
}
# Kills the ranks that are left. Two SIGTERM make mpirun end at once; it removes the files of ranks that are gone by
# then.
end_mpirun() {
    list_children
    [ ${#children[@]} = 0 ] || kill -KILL "${children[@]}" 2>/dev/null
    sleep 0.3
    kill -INT "$pid" 2>/dev/null
    sleep 0.3
    kill -INT "$pid" 2>/dev/null
    for _ in {1..30}; do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null
}

# With that grace mpirun would wait twice as long after a rank that failed, even when all are gone: it is ended as soon
# as nothing of the run can be left.
most=0 quiet=0 forced=""
while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2 &
    wait $!   # which a signal ends at once
    read_outcome
    if [ "$stops" -ge 2 ]; then
        echo "launch_mpi.sh: second signal, the run ends without a checkpoint" >&2
        end_mpirun
        forced=143
        break
    fi
    # Once they have met, ranks look at a byte behind the text. Those of one rank, or of other hosts alone, never say
    # that they have: they get SIGUSR1 when they had the time to catch it, which they would die of before.
    if [ "$stops" = 1 ] && [ "$told" = 0 ] && { [ -n "$ended" ] || [ "$SECONDS" -ge 15 ]; }; then
        { [ -n "$ended" ] && printf 1 | dd of="$table" bs=1 seek=65536 conv=notrunc status=none; } || kill -USR1 "$pid"
        told=1
    fi
    list_children
    now=${#children[@]}
    [ "$now" -gt "$most" ] && most=$now
    # Tenths of a second that mpirun may outlive its run: an end that the ranks wrote down (a GPU may take its time),
    # no rank left, or one lost before they had met.
    limit=0
    if [ "${ended:-0}" != 0 ] && [ "$now" = 0 ]; then limit=6
    elif [ "${ended:-0}" != 0 ]; then limit=100
    elif [ "$most" -gt 0 ] && [ "$now" = 0 ]; then limit=50
    elif [ -z "$ended" ] && [ "$now" -lt "$most" ]; then limit=100
    fi
    if [ "$limit" = 0 ]; then quiet=0; else quiet=$((quiet + 2)); fi
    if [ "$limit" != 0 ] && [ "$quiet" -ge "$limit" ]; then
        end_mpirun
        forced=137
        break
    fi
done
while :; do   # a signal ends the waiting, too
    wait "$pid" 2>/dev/null
    code=$?
    kill -0 "$pid" 2>/dev/null || break
done
read_outcome
if [ "$ended" = end ]; then code=0   # mpirun may have got a signal of its own
elif [ "${ended:-0}" != 0 ] && [ "$forced" != 143 ]; then code=$ended
elif [ -n "$forced" ] && [ "$code" != 0 ]; then code=$forced
fi
[ "$code" = 137 ] && code=6
if [ "$code" = 6 ]; then
    # Lines that a rank writes at its end may be lost between it and mpirun.
    echo "launch_mpi.sh: a rank was lost or hung; what the ranks said and did last:" >&2
    heartbeat_lines | tail -n +2 | sed '/^$/d; s/^/launch_mpi.sh: /' >&2
fi
exit "$code"
