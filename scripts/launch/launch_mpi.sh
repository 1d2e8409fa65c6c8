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
# Exit code: the ranks' own. A rank that was killed gives 6 like one that hangs; then it is printed what each rank of
# this host did last, and which of several hosts sent no hang report. MPIRUN names another mpirun.
set -u
trap '' PIPE   # of this script's own lines
say() { echo "launch_mpi.sh: $*" >&2; }
true >&2 || exec 2>/dev/null   # closed: the next file that is opened would get its number
true 2>/dev/null 3>&1 || exec >/dev/null
mpirun=${MPIRUN:-mpirun}
[ $# != 0 ] && [ "$1" != --help ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
command -v "$mpirun" >/dev/null || { say "no $mpirun found: install OpenMPI"; exit 2; }

# The heartbeats of this host's ranks are in an unnamed file in shared memory, which outlives them (HeartbeatHeader in
# llmc/fault/heartbeat.h): bytes 8 to 11 ask the ranks to stop, and text for this script begins at byte 16.
file=$(mktemp /dev/shm/llmfp8-XXXXXXXX 2>&1) ||
    { say "$file: heartbeats of the ranks need /dev/shm: mount or free it"; exit 7; }
[ "$(ulimit -f)" = unlimited ] || [ "$(ulimit -f)" -ge 1024 ] || {
    rm -f "$file"; say "files may have $(ulimit -f) KiB (ulimit -f): heartbeats of the ranks need 1024"; exit 7; }
head -c 1048576 /dev/zero 2>/dev/null >"$file" ||   # OpenMPI hangs if the ranks cannot have that memory
    { rm -f "$file"; say "/dev/shm is full: free 1 MiB of it, or mount it larger"; exit 7; }
exec {table}<>"$file"
: >"$file"
rm "$file"
printf 'llmfp8.\n' >&"$table"
export LLMFP8_HEARTBEATS=/proc/$$/fd/$table
text() { head -c 53272 "$LLMFP8_HEARTBEATS" | tail -c +17 | tr -d '\0'; }   # lines: outcome, hosts, report, ranks

trap 'jobs -p | xargs -r kill 2>/dev/null' EXIT
later() { ( trap 'kill $!; exit' TERM; sleep "$1" & wait $!; shift; "$@" ) >/dev/null 2>&1 & }   # SECONDS COMMAND...
# Ranks of other hosts do not see the file. If no rank of this host has met them 15 s after the start, all ranks get
# SIGUSR1 through mpirun. By then they catch the signal; earlier, they would die of it.
signal_others() { [ "$(stat -L -c %s "$LLMFP8_HEARTBEATS")" -gt 16 ] || kill -USR1 "$pid"; }
children() { cat "/proc/$pid/task/"*/children; }
kill_all() { children | xargs -r kill -KILL; kill -KILL "$pid"; }
pid="" stops=0 first_us=0 ends=""
# A signal within a second of the first is another copy of it: timeout(1) and batch systems send several.
on_stop() {
    local now_us=${EPOCHREALTIME//[.,]/}
    if [ "$stops" = 0 ]; then
        stops=1 first_us=$now_us
        printf stop >&"$table"
        say "stopping after this step, then saving; again: end now"
        later $((SECONDS < 15 ? 15 - SECONDS : 0)) signal_others
    elif [ "$1" != USR1 ] && [ -z "$ends" ] && [ $((now_us - first_us)) -ge 1000000 ]; then
        say "second signal, the run ends without a checkpoint"
        ends=$((128 + $(kill -l "$1")))
        [ -z "$pid" ] || kill -INT "$pid"   # mpirun kills its ranks and ends
        later 6 kill_all
    fi
}
# shellcheck disable=SC2064
for name in TERM INT USR1; do trap "on_stop $name" "$name"; done
if [ -n "${SLURM_JOB_ID:-}" ]; then
    export OMPI_MCA_orte_launch_agent="${OMPI_MCA_orte_launch_agent-env --block-signal=TERM orted}"
    export PRTE_MCA_prte_launch_agent="${PRTE_MCA_prte_launch_agent-env --block-signal=TERM prted}"
fi
# mpirun would end when nobody reads its output any more (| head -1), and its ranks with it. So tee reads it to the end.
drain() { trap '' INT TERM USR1 HUP; exec tee --output-error=warn "$1" 2>/dev/null; }
# The hosts that sent a hang report.
said=$(mktemp /dev/shm/llmfp8-XXXXXXXX) && exec {reports}<>"$said" && rm "$said" || exit 7
exec {out}> >(drain /dev/null)
drains=($!)
exec {err}> >(drain >(grep -ao 'error: on [^ :]*' >&"$reports") >&2 {out}>&-)
drains+=($!)
# If this script is killed, mpirun passes SIGUSR1 on, so that the ranks save and leave.
orphan=()
! command -v setpriv >/dev/null || orphan=(setpriv --pdeathsig USR1 --)
env --block-signal=TERM setsid "${orphan[@]}" "$mpirun" "$@" >&"$out" 2>&"$err" {out}>&- {err}>&- &
pid=$!
exec {out}>&- {err}>&-

# Ends an mpirun that does not end by itself. That of OpenMPI 4 may lock up when a rank dies while it registers, which
# leaves a zombie; and it waits for the daemon of a host that it no longer reaches, for which it has 10 s from the
# outcome that the ranks wrote down.
watch() {
    local before dead="" child stat late=0
    trap 'kill $!; exit' TERM
    while sleep 2 & wait $! && kill -0 "$pid"; do
        before=$dead dead=""
        for child in $(children); do
            stat=$(<"/proc/$child/stat") && [[ ${stat##*) } != Z* ]] || dead+=" $child"
        done
        [ -z "$dead" ] || [ "$dead" != "$before" ] || kill_all
        [[ $(text) == "end "* ]] && [ $((++late)) -gt 5 ] || continue
        [ "$late" -gt 6 ] || children | xargs -r kill -KILL   # also the ssh to that host
        kill -INT "$pid"   # the second one ends it at once
        [ "$late" -lt 9 ] || kill_all
    done
}
watch >/dev/null 2>&1 &
while :; do
    wait "$pid" 2>/dev/null   # a signal ends this wait, too
    kill -0 "$pid" 2>/dev/null || break
done
wait "$pid" 2>/dev/null
code=$?
later 5 kill -KILL "${drains[@]}"   # if something that outlives mpirun keeps its output open
wait "${drains[1]}" 2>/dev/null
wait "${drains[0]}" 2>/dev/null || say "standard output could not be written to the end; the run went on without it"

[[ ! $(text) =~ ^end\ ([0-9]{3}) ]] || code=$((10#${BASH_REMATCH[1]}))   # else it is mpirun's
[ "$code" != 137 ] || code=6
code=${ends:-$code}
[ "$code" = 0 ] || [ -n "$ends" ] || [[ $(text) == "end "* ]] ||
    say "mpirun ended with exit code $code, and no rank has said why"
if [ "$code" = 6 ]; then
    # Lines that a rank writes at its end may be lost between it and mpirun.
    say "a rank was lost or hung; what the ranks of this host said and did last:"
    text | sed '/^end [0-9]*$/d; /^hosts /d; s/^/launch_mpi.sh: /' >&2
    for host in $(text | sed -n 's/^hosts \([^ ]* .*\)/\1/p'); do   # if there are several
        grep -q "on $host\$" "/proc/$$/fd/$reports" || say "no hang report came from $host"
    done
fi
exit "$code"
