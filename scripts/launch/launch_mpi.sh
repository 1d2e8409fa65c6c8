#!/bin/bash
# Starts ranks with mpirun; a run that is told to stop saves first.
#
#   scripts/launch/launch_mpi.sh -np 8 ./train_llama ...                     one host
#   scripts/launch/launch_mpi.sh --hostfile hosts -np 16 ./train_llama ...   several; a line a host: "node1 slots=8"
#
# Arguments are mpirun's. OpenMPI's mpirun kills its ranks two seconds after a SIGTERM or SIGINT; here these (and
# SIGUSR1) make the ranks finish their step, save and leave with 0. A second SIGTERM or SIGINT, 1 s or more after the
# first, ends them at once. mpirun is in a session of its own, so that Ctrl-C reaches this script alone. SIGTERM is
# blocked in mpirun and, under Slurm, in its daemons on other hosts, since batch systems signal every process.
#
# Exit code: the ranks' own. A rank that was killed gives 6 like one that hangs, and what each rank was doing last is
# printed. MPIRUN names another mpirun.
set -u
early=""
trap 'early=1' TERM USR1   # until the handler is there
trap '' PIPE   # of this script's own lines
closed=""
true >&2 || exec 2>/dev/null   # closed: the next file that is opened would get its number
true 2>/dev/null 3>&1 || { exec >/dev/null; closed="standard output was closed"; }
mpirun=${MPIRUN:-mpirun}
if [ $# = 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi
command -v "$mpirun" >/dev/null || { echo "launch_mpi.sh: no $mpirun found: install OpenMPI" >&2; exit 2; }
# With too few open files mpirun hangs.
files=$(ulimit -n)
[ "$files" = unlimited ] || [ "$files" -ge 128 ] ||
    { echo "launch_mpi.sh: ulimit -n $files: mpirun needs 128 open files: raise it with ulimit -n" >&2; exit 2; }

# With too little address space it crashes (llmc/base/system/process_limits.cpp has what a rank needs).
memory=$(ulimit -v)
[ "$memory" = unlimited ] || [ "$memory" -ge 524288 ] || {
    echo "launch_mpi.sh: ulimit -v $memory: mpirun needs 524288 kB of address space: raise it with ulimit -v" >&2
    exit 2
}

# The heartbeats of the ranks are in shared memory that outlives them (llmc/fault/heartbeat.h); a file beside it asks
# the ranks of this host to stop (llmc/fault/shutdown.cpp). The lock says that both are still in use: mpirun inherits
# the descriptor that holds it. The file gets the name by which other launchers find it once it is locked.
processes=$(readlink /proc/self/ns/pid)   # containers that share /dev/shm have processes of their own
new=/dev/shm/llmfp8-new-${processes//[!0-9]/}
table=$(mktemp "$new-$$-XXXXXXXX" 2>&1) ||
    { echo "launch_mpi.sh: $table: heartbeats of the ranks need /dev/shm: mount or free it" >&2; exit 7; }
# OpenMPI hangs if the ranks cannot have that memory.
if ! head -c 1048576 /dev/zero 2>/dev/null >"$table"; then
    rm -f "$table"
    echo "launch_mpi.sh: /dev/shm is full: free 1 MiB of it, or mount it larger" >&2
    exit 7
fi
: > "$table"
exec {table_lock}<>"$table"
! command -v flock >/dev/null || flock -s "$table_lock"
named=/dev/shm/llmfp8-launch-${table##*-}
mv "$table" "$named" || exit 7
table=$named
if command -v flock >/dev/null; then
    for left in /dev/shm/llmfp8-launch-????????; do   # of launchers that were killed
        # flock would create a file that another launcher has just removed.
        ( exec {left_lock}<"$left" && flock -n -x "$left_lock" &&
            rm -f "$left".{stop,output,events} "$left" ) 2>/dev/null
    done
    for left in /dev/shm/llmfp8-launch-????????.events; do   # whose table an older launcher has removed
        [ -e "${left%.events}" ] || rm -f "$left"
    done
    for left in "$new"-*; do   # of launchers that were killed before they could lock it
        maker=${left#"$new"-}
        kill -0 "${maker%-*}" 2>/dev/null || rm -f "$left"
    done
fi
# Ranks of this host write lines into this pipe (llmc/fault/heartbeat.cpp): that they begin, and that the table has the
# outcome. mpirun inherits the pipe, so that the pipe ends when mpirun and this script have ended.
mkfifo -m 600 "$table.events" || { rm -f "$table"; exit 7; }
exec {events}<>"$table.events"
timers=()
# The table goes last: by its name the next launcher finds what is left if this one is killed here.
trap 'rm -f "$table".{stop,output,events} "$table"; [ ${#timers[@]} = 0 ] || kill "${timers[@]}" 2>/dev/null' EXIT
export LLMFP8_HEARTBEATS=${table##*/}

# later SECONDS COMMAND...
later() {
    ( trap 'kill $!; exit' TERM; sleep "$1" & wait $!; shift; "$@" ) >/dev/null 2>&1 {events}>&- &
    timers+=($!)
}
# Ranks of other hosts do not see the file. If no rank of this host has met them 15 s after the start, all ranks get
# SIGUSR1 through mpirun. By then they catch the signal; earlier, they would die of it.
signal_others() { [ -s "$table" ] || kill -USR1 "$pid"; }
# shellcheck disable=SC2046
kill_children() { kill -KILL $(cat "/proc/$pid/task/"*/children); }
kill_all() { kill_children; kill -KILL "$pid"; }
pid="" stops=0 first_us=0 ends=""
# A signal within a second of the first is another copy of it: timeout(1) and batch systems send several.
on_stop() {
    local now_us=${EPOCHREALTIME//[.,]/}
    if [ "$stops" = 0 ]; then
        stops=1 first_us=$now_us
        : > "$table.stop"
        later $((SECONDS < 15 ? 15 - SECONDS : 0)) signal_others
    elif [ "$1" != USR1 ] && [ -z "$ends" ] && [ $((now_us - first_us)) -ge 1000000 ]; then
        echo "launch_mpi.sh: second signal, the run ends without a checkpoint" >&2
        ends=143
        [ -z "$pid" ] || kill -INT "$pid"   # mpirun kills its ranks and ends
        later 6 kill_all
    fi
}
for name in TERM INT USR1; do
    # shellcheck disable=SC2064
    trap "on_stop $name" "$name"
done
[ -z "$early" ] || on_stop TERM
if [ -n "${SLURM_JOB_ID:-}" ]; then
    export OMPI_MCA_orte_launch_agent="${OMPI_MCA_orte_launch_agent-env --block-signal=TERM orted}"
    export PRTE_MCA_prte_launch_agent="${PRTE_MCA_prte_launch_agent-env --block-signal=TERM prted}"
fi
# mpirun would end when nobody reads its output any more (| head -1), and its ranks with it. So tee reads it to the end,
# whatever becomes of this script's own output; tee's other copy goes to /dev/null. If standard output cannot be
# written, what tee says goes to a file that the first rank looks at (llmc/train/log/log.cpp).
drain() { trap '' INT TERM USR1 HUP; exec tee --output-error=warn /dev/null 2>>"$1"; }
printf %s "$closed" >"$table.output"
exec {out}<> <(:) {err}<> <(:)   # pipes; each end is opened anew from /dev/fd, so that tee finds their end
drain "$table.output" <"/dev/fd/$out" {out}>&- {err}>&- {events}>&- &
drains=($!)
drain /dev/null <"/dev/fd/$err" >&2 {out}>&- {err}>&- {events}>&- &
drains+=($!)
# If this script is killed, mpirun passes SIGUSR1 on, so that the ranks save and leave.
orphan=()
! command -v setpriv >/dev/null || orphan=(setpriv --pdeathsig USR1 --)
env --block-signal=TERM setsid "${orphan[@]}" "$mpirun" "$@" >"/dev/fd/$out" 2>"/dev/fd/$err" {out}>&- {err}>&- &
pid=$!
exec {out}>&- {err}>&-
# The mpirun of OpenMPI 4 may lock up when a rank dies while it registers, and does not notice that death.
# after_rank PID END: the rank is of this host and holds the pipe with this reading end open while it lives.
after_rank() {
    local stat
    cat "/proc/$1/fd/$2" & wait $!
    sleep 2 & wait $!
    ! { stat=$(<"/proc/$1/stat") && [[ ${stat##*) } = "Z $pid "* ]]; } || kill_all
}
# mpirun would wait for the daemon of a host that it no longer reaches. It has 10 s from the outcome that the ranks
# wrote down. Then what is left of its children, also the ssh to that host, is killed; a second SIGINT ends it at once.
after_outcome() {
    sleep 10 & wait $!
    kill_children
    kill -INT "$pid"
    sleep 0.3 & wait $!
    kill -INT "$pid"
    sleep 3 & wait $!
    kill_all
}
(
    trap 'kill $(jobs -pr); exit' TERM
    told=""
    while read -r event place rank end; do
        case $event$told in
            rank*) [ "$place" != "$processes" ] || { trap 'kill $!; exit' TERM; after_rank "$rank" "$end"; } & ;;
            outcome) told=1; { trap 'kill $!; exit' TERM; after_outcome; } & ;;
        esac
    done
    # shellcheck disable=SC2046
    kill $(jobs -pr)
) <"/dev/fd/$events" {events}>&- >/dev/null 2>&1 &
timers+=($!)
while :; do
    wait "$pid" 2>/dev/null   # a signal ends this wait, too
    kill -0 "$pid" 2>/dev/null || break
done
wait "$pid" 2>/dev/null
code=$?
later 5 kill -KILL "${drains[@]}"   # if something that outlives mpirun keeps its output open
wait "${drains[1]}" 2>/dev/null
wait "${drains[0]}" 2>/dev/null ||
    echo "launch_mpi.sh: standard output could not be written to the end; the run went on without it" >&2

# The table begins with text: "outcome NNN" once the ranks have met ("outcome end" if all ended as they should), the
# reason, and a line for each rank.
heartbeat_lines() { head -c 65536 "$table" | tr -d '\0' | sed 's/ *$//'; }
outcome=$(head -c 11 "$table" | tr -d '\0')
if [ -n "$ends" ]; then code=$ends
elif [ "$outcome" = "outcome end" ]; then code=0   # mpirun may have got a signal of its own
elif [[ $outcome =~ ^outcome\ ([0-9]{3})$ && ${BASH_REMATCH[1]} != 000 ]]; then code=$((10#${BASH_REMATCH[1]}))
fi
[ "$code" = 137 ] && code=6
if [ "$code" = 6 ]; then
    # Lines that a rank writes at its end may be lost between it and mpirun.
    echo "launch_mpi.sh: a rank was lost or hung; what the ranks said and did last:" >&2
    heartbeat_lines | tail -n +2 | sed '/^$/d; s/^/launch_mpi.sh: /' >&2
fi
exit "$code"
