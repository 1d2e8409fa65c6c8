#!/bin/bash
# What to run on a machine with 2 or more GPUs after a change of ZeRO, with its outputs in one folder:
#
#   dev/gpu_checks/zero_check.sh OUT ['TRAIN_SHARDS'] [RANKS]
#
# The operations between ranks against the CPU's; then short runs on RANKS (2) ranks, for every recipe and wire: equal
# to the bit whether repeated, without overlap, with --zero 0 or with weights gathered in FP8 (a search may end with
# other matmul algorithms, so it is off); then the timing table of MODEL (llama3-small):
# RANKS ranks against one, exposed communication, overlap on and off, each wire, and the planned
# memory beside what the driver counts. TRAIN_SHARDS: a glob of token shards, quoted; without it this repository's own
# text. PARTS ("ops bits speed") chooses, STEPS (10) is the length of a timed run, MICRO (1) its micro-batch,
# OPTIONS are added to every run; MPIRUN, JOBS and NO_BUILD as in comm_check.sh. What fails is told at the end (exit 1).
set -u
out=$(realpath -m "$1") shards=${2:-} count=${3:-2}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out"
failed=()
read -ra mpirun <<< "${MPIRUN:-mpirun --allow-run-as-root --oversubscribe --bind-to none}"
read -ra options <<< "${OPTIONS:-}"
build=${BUILD:-build/cuda}

train() {   # NAME RANKS BINARY OPTION...: log in OUT/NAME.jsonl
    local name=$1 ranks=$2 binary=$3 launcher=()
    shift 3
    [ "$ranks" -gt 1 ] && launcher=("${mpirun[@]}" -np "$ranks")
    rm -rf "$out/$name.jsonl" "$out/save"
    timeout 300 "${launcher[@]}" "$build/$binary" --train-data "$shards" --log-file "$out/$name.jsonl" "$@" \
        "${options[@]}" > "$out/$name.txt" 2>&1 || { failed+=("$name"); tail -n 3 "$out/$name.txt"; }
}

ops() {
    "$build/tests_gpu" -tc='gpu wire*' > "$out/ops.txt" 2>&1 || failed+=(ops)
    grep -h 'test cases' "$out/ops.txt"
}

# One configuration in all the ways that must not matter.
equal() {   # NAME BINARY OPTION...
    local name=$1 binary=$2 logs=()
    shift 2
    local common=(--train-iters 6 --micro-batch-size 2 --global-batch-size $((4 * count)) --bucket-mb 40
                  --fp8-stats-interval 3 --gemm-search off "$@")
    train "$name" "$count" "$binary" "${common[@]}"
    train "$name-again" "$count" "$binary" "${common[@]}"
    train "$name-no-overlap" "$count" "$binary" "${common[@]}" --overlap off
    train "$name-zero0" "$count" "$binary" "${common[@]}" --zero 0
    logs=("$out/$name.jsonl" "$out/$name"-{again,no-overlap,zero0}.jsonl)
    if [[ " $* " == *" --fp8-recipe "* ]]; then
        train "$name-gather8" "$count" "$binary" "${common[@]}" --fp8-param-gather
        logs+=("$out/$name-gather8.jsonl")
    fi
    python3 dev/gpu_checks/rank_report.py same "${logs[@]}" || failed+=("$name: not equal to the bit")
}

bits() {
    local gpt2=(train_gpt2 --model gpt2-124M) llama=(train_llama --model llama3-small --num-layers 4 --seq-length 1024)
    # Weights are on their way while something else than a step needs them: on rank 0 alone, too.
    local between=(--valid-data "$shards" --eval-interval 1 --eval-iters 1 --sample-every 2 --sample-tokens 8)
    equal gpt2-bf16 "${gpt2[@]}" --grad-comm-dtype fp8 "${between[@]}" --save "$out/save" --save-interval 2 --keep 1
    equal gpt2-delayed "${gpt2[@]}" --fp8-recipe delayed --fp8-check-interval 1
    equal llama-delayed "${llama[@]}" --fp8-recipe delayed --grad-comm-dtype bf16 --fp8-check-interval 1
    equal llama-delayed-wire8 "${llama[@]}" --fp8-recipe delayed --grad-comm-dtype fp8 --grad-dtype bf16
    equal llama-1F1L "${llama[@]}" --fp8-recipe tensorwise --first-last-layers-bf16 --fp8-check-interval 1
    equal llama-blockwise "${llama[@]}" --fp8-recipe blockwise --grad-dtype bf16 "${between[@]}"
    grep -h '"type":"grad_wire"' "$out"/*.jsonl | tail -n 1
}

# 16 micro-batches a rank and step, then one.
speed() {
    local model=(train_llama --model "${MODEL:-llama3-small}" --fp8-recipe delayed --micro-batch-size "${MICRO:-1}"
                 --train-iters "${STEPS:-10}" --fp8-stats-interval 0)
    local micro=${MICRO:-1} logs=()
    timed() {   # NAME RANKS MICRO_BATCHES OPTION...
        train "$1" "$2" "${model[@]}" --global-batch-size $(($2 * $3 * micro)) "${@:4}"
        [ -s "$out/$1.jsonl" ] && logs+=("$out/$1.jsonl")
    }
    timed speed-one 1 16
    timed speed-16 "$count" 16
    timed speed-16-bf16 "$count" 16 --grad-comm-dtype bf16
    local one=("$count" 1 --grad-comm-dtype bf16)
    timed speed-1 "${one[@]}"
    timed speed-1-no-overlap "${one[@]}" --overlap off
    timed speed-1-gather8 "${one[@]}" --fp8-param-gather
    timed speed-1-zero0 "${one[@]}" --zero 0
    timed speed-1-wire8 "$count" 1 --grad-comm-dtype fp8 --fp8-param-gather
    timed speed-1-wire32 "$count" 1 --grad-comm-dtype fp32
    python3 dev/gpu_checks/rank_report.py table "${logs[@]}" || failed+=("the table")
}

if [ -z "${NO_BUILD:-}" ]; then
    make -j"${JOBS:-$(nproc)}" DEVICE=cuda train_gpt2 train_llama tests_gpu > "$out/build.txt" 2>&1 ||
        { tail -n 20 "$out/build.txt" >&2; exit 1; }
fi
[ -n "$shards" ] || shards=$(dev/gpu_checks/text_shards.sh "$out/data") || exit 1
nvidia-smi --query-gpu=index,name,power.limit,driver_version --format=csv,noheader > "$out/gpus.txt" 2>&1
for part in ${PARTS:-ops bits speed}; do
    echo "=== $part"
    "$part"
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'zero_check.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "zero_check.sh: all passed on $count ranks"
