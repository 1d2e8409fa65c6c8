#!/bin/bash
# What to run on a machine with several GPUs after a change of the watch or of the launch wrapper:
#
#   dev/gpu_checks/watch_check.sh OUT [RANKS]
#
# In the middle of training on RANKS (2) GPUs under scripts/launch/launch_mpi.sh a rank is killed or stopped, the first
# and the last, or hangs by --inject, or the wrapper gets a signal. Ends with a table: what was done, seconds until no
# rank was left, exit code, MiB used on the GPUs before and after, who was said to wait for whom. Each run also shows
# that the GPUs can be used after the one before. TIMEOUT (10) is --comm-timeout, BUILD (build/cuda) the build,
# OPTIONS replaces those of the model; JOBS and NO_BUILD as in comm_check.sh. Exit 1 if one is not as it must be.
set -u
out=$(realpath -m "$1") count=${2:-2}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out"
timeout_s=${TIMEOUT:-10} build=${BUILD:-build/cuda} failed=()
read -ra options <<< "${OPTIONS:---model llama3-small --fp8-recipe delayed --micro-batch-size 2 --bucket-mb 40}"
row() { printf '%-12s %8s %5s %11s %10s  %s' "$@"; }
rows=("$(row "what" "seconds" "exit" "MiB before" "MiB after" "said")")

if [ -z "${NO_BUILD:-}" ]; then
    make -j"${JOBS:-$(nproc)}" DEVICE=cuda train_llama > "$out/build.txt" 2>&1 ||
        { tail -n 20 "$out/build.txt" >&2; exit 1; }
fi
shards=$(dev/gpu_checks/text_shards.sh "$out/data") || exit 1

used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null | head -n "$count" |
                 awk '{ sum += $1 } END { print sum + 0 }'; }
now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }
children_of() { cat "/proc/$1/task/"*/children 2>/dev/null | tr ' ' '\n' | grep . | sort -n; }
living() {   # of the ranks: neither gone nor a zombie
    local pid stat
    for pid in "${ranks[@]}"; do
        read -r stat 2>/dev/null < "/proc/$pid/stat" && [[ $stat != *") Z "* ]] && echo "$pid"
    done
}
# Until the log has a step of that number, or the wrapper has ended.
wait_for_step() {
    until grep -qsE "\"step\":$1[,}]" "$log" || ! kill -0 "$wrapper" 2>/dev/null; do sleep 0.2; done
}

# NAME EXIT LIMIT_S TEXT ACTION [OPTION...]: ACTION is eval'ed in the middle of the training; the text must be said.
drill() {
    local name=$1 expected=$2 limit=$3 text=$4 action=$5 before after start took code said pid
    local errors="$out/$name.err"
    log="$out/$name.jsonl"
    shift 5
    rm -rf "$log" "$out/save"
    before=$(used_mib)
    scripts/launch/launch_mpi.sh --allow-run-as-root --oversubscribe --bind-to none -np "$count" "$build/train_llama" \
        --train-data "$shards" --train-iters 1000000 --log-interval 1 --comm-timeout "$timeout_s" --log-file "$log" \
        --global-batch-size $((4 * count)) "${options[@]}" "$@" > "$out/$name.txt" 2> "$errors" &
    wrapper=$!
    wait_for_step 4
    ranks=()
    for pid in $(children_of "$wrapper"); do   # mpirun; its ranks are started in their order
        mapfile -t -O ${#ranks[@]} ranks < <(children_of "$pid")
    done
    [ ${#ranks[@]} = "$count" ] || failed+=("$name: ${#ranks[@]} ranks run")
    wait_for_step "${step:-8}"
    start=$(now_ms)
    eval "$action"
    while [ -n "$(living)" ] && [ $(($(now_ms) - start)) -lt 120000 ]; do sleep 0.05; done
    took=$(($(now_ms) - start))
    wait "$wrapper"
    code=$?
    for _ in {1..50}; do   # the driver takes a moment
        after=$(used_mib)
        [ "$after" -le $((before + 16)) ] && break
        sleep 0.1
    done
    said=$(grep -hE "$text" "$errors" "$out/$name.txt" | tail -n 1)
    [ "$code" = "$expected" ] || failed+=("$name: exit $code, not $expected")
    [ -n "$said" ] || failed+=("$name: nobody said: $text")
    [ "$took" -le $((limit * 1000)) ] || failed+=("$name: took $took ms, at most $limit s")
    [ "$after" -le $((before + 16)) ] || failed+=("$name: $before MiB were used before, $after after")
    [ -z "$(living)" ] || { failed+=("$name: ranks live on"); kill -KILL "${ranks[@]}"; }
    rows+=("$(row "$name" "$((took / 1000)).$((took / 100 % 10))" "$code" "$before" "$after" "${said:0:150}")")
}

last=$((count - 1)) limit=$((timeout_s + 5))
lost='launch_mpi.sh: rank [0-9]+ .* (is gone|is stopped by a signal|without progress)'
drill kill-first 6 $limit "$lost" 'kill -KILL "${ranks[0]}"'
drill kill-last 6 $limit "$lost" 'kill -KILL "${ranks[last]}"'
drill stop-first 6 $limit "$lost" 'kill -STOP "${ranks[0]}"'
drill stop-last 6 $limit "$lost" 'kill -STOP "${ranks[last]}"'
step=10 drill stall 6 $limit "$lost" : --inject "stall:rank=$last@step=12"
rm -rf "${out:?}/save"   # a run refuses a folder of another one's checkpoints
drill term-saves 0 60 'a signal to the launch wrapper after step' 'kill -TERM "$wrapper"' --save "$out/save"
step=10 drill second-term 143 10 'second signal' 'sleep 1; kill -TERM "$wrapper"; sleep 1; kill -TERM "$wrapper"' \
    --inject "stall:rank=$last@step=12"

printf '%s\n' "${rows[@]}"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'watch_check.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "watch_check.sh: all passed on $count ranks, --comm-timeout $timeout_s"
