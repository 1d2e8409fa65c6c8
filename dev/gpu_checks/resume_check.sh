#!/bin/bash
# What to run on a machine with 2, 4 or 8 GPUs after a change of checkpoints, with its outputs in one folder:
#
#   dev/gpu_checks/resume_check.sh OUT ['TRAIN_SHARDS'] [RANKS]
#
# For each of RECIPES ("none delayed"), short runs of a small Llama: RANKS (all GPUs) ranks without a stop, then the
# same steps on RANKS -> RANKS / 2 -> RANKS ranks, each continuing from the other's checkpoint. A checkpoint that is
# saved again right after it was loaded must have equal files; the same number of ranks must repeat every bit; with
# another number the first loss after loading, whose weights and samples are equal, may differ by the order of a sum in
# double alone, and later ones by what that number does to an uninterrupted run. Then saves behind training: how long
# training stood still for them, and that nothing else changed. The table comes last. TRAIN_SHARDS: a glob of token
# shards, quoted; without it this repository's own text. MODEL replaces the model's options (two searches may end with
# different matmul algorithms, so they are off), STEPS (4) the steps between checkpoints, which must take longer than a
# save takes to reach the disk, SAVE the folder of the checkpoints (OUT/saved; 14 bytes a parameter, up to 6 at a time);
# BUILD, MPIRUN, JOBS and NO_BUILD as in zero_check.sh. What fails is told at the end (exit 1).
set -u
out=$(realpath -m "$1") shards=${2:-} count=${3:-$(nvidia-smi -L | wc -l)}
cd "$(dirname "$0")/../.." || exit 1
half=$((count / 2)) steps=${STEPS:-4} saved=$(realpath -m "${SAVE:-$out/saved}")
[ "$half" -ge 1 ] || { echo "resume_check.sh: needs at least 2 ranks" >&2; exit 2; }
mkdir -p "$out" "$saved"
failed=()
read -ra mpirun <<< "${MPIRUN:-mpirun --allow-run-as-root --oversubscribe --bind-to none}"
default="--model llama3-small --num-layers 6 --micro-batch-size 4 --global-batch-size 64 --gemm-search off"
read -ra model <<< "${MODEL:-$default}"
build=${BUILD:-build/cuda}

train() {   # NAME RANKS LAST_STEP OPTION...: log in OUT/NAME.jsonl, checkpoints in saved/NAME
    local name=$1 ranks=$2 last=$3 launcher=()
    shift 3
    [ "$ranks" -gt 1 ] && launcher=("${mpirun[@]}" -np "$ranks")
    rm -rf "$out/$name.jsonl" "${saved:?}/$name"
    timeout 300 "${launcher[@]}" "$build/train_llama" --train-data "$shards" "${model[@]}" --lr-decay-style constant \
        --train-iters "$last" --log-file "$out/$name.jsonl" "$@" > "$out/$name.txt" 2>&1 ||
        { failed+=("$name"); tail -n 3 "$out/$name.txt"; }
}
step() { printf '%s/%s/step-%08d' "$saved" "$1" "$2"; }   # RUN STEP
report() { python3 dev/gpu_checks/resume_report.py "$@" || failed+=("$*"); }

# Loads a checkpoint, saves it under another name before any step, and compares.
reload() {   # NAME RANKS RUN STEP OPTION...
    local name=$1 ranks=$2 from
    from=$(step "$3" "$4")
    train "$name" "$ranks" "$4" --save "$saved/$name" --resume "$from" "${@:5}"
    report files "$from" "$(step "$name" "$4")" | tee "$out/$name.files"
    rm -rf "${saved:?}/$name"
}

recipe() {   # RECIPE
    local r=$1 a=$steps b=$((2 * steps)) c=$((3 * steps)) fp8=()
    [ "$r" = none ] || fp8=(--fp8-recipe "$r")
    train "$r-straight" "$count" "$c" --save "$saved/$r-straight" --save-interval "$steps" "${fp8[@]}"
    train "$r-straight-half" "$half" "$c" "${fp8[@]}"
    reload "$r-load-half" "$half" "$r-straight" "$a" "${fp8[@]}"
    train "$r-half" "$half" "$c" --save "$saved/$r-half" --save-interval "$steps" \
        --resume "$(step "$r-straight" "$a")" "${fp8[@]}"
    reload "$r-load-back" "$count" "$r-half" "$b" "${fp8[@]}"
    train "$r-back" "$count" "$c" --resume "$(step "$r-half" "$b")" "${fp8[@]}"
    train "$r-same" "$count" "$c" --save "$saved/$r-same" --resume "$(step "$r-straight" "$b")" "${fp8[@]}"
    report files "$(step "$r-straight" "$c")" "$(step "$r-same" "$c")" | tee "$out/$r-same.files"
    rm -rf "${saved:?}/$r"-{half,same}
    train "$r-async" "$count" "$c" --save "$saved/$r-async" --save-interval "$steps" --save-async "${fp8[@]}"
    report files "$(step "$r-straight" "$c")" "$(step "$r-async" "$c")" | tee "$out/$r-async.files"
    rm -rf "${saved:?}/$r"-{straight,async}
}

if [ -z "${NO_BUILD:-}" ]; then
    make -j"${JOBS:-$(nproc)}" DEVICE=cuda train_llama > "$out/build.txt" 2>&1 ||
        { tail -n 20 "$out/build.txt" >&2; exit 1; }
fi
[ -n "$shards" ] || shards=$(dev/gpu_checks/text_shards.sh "$out/data") || exit 1
nvidia-smi --query-gpu=index,name,power.limit,driver_version --format=csv,noheader > "$out/gpus.txt" 2>&1
read -ra recipes <<< "${RECIPES:-none delayed}"
for r in "${recipes[@]}"; do recipe "$r"; done
echo
for r in "${recipes[@]}"; do report table "$out" "$r"; done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'resume_check.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "resume_check.sh: all passed on $count -> $half -> $count ranks"
