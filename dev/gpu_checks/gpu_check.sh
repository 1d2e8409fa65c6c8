#!/bin/bash
# What to run on a GPU machine after a change of kernels, with its outputs in one folder:
#
#   dev/gpu_checks/gpu_check.sh OUT 'TRAIN_SHARDS' PART...
#
#   tests     every CUDA operation against the CPU one, the project's tests, runs of the executables
#   sanitize  memcheck, racecheck and initcheck on small shapes; hazards inside cuBLASLt's kernels are told apart
#   bench     every kernel against the device's copy rate, matmuls against the library
#   gpt2, small, 8b   training speed of BF16 and of every recipe: GPT-2 124M, llama3-small, Llama-3-8B
#
# TRAIN_SHARDS is a glob of GPT-2 token shards, quoted. STEPS (8) is the length of a speed run, JOBS that of make.
# A part that fails is told at the end (exit 1). Speeds are scripts/compare's, in OUT/NAME/compare.md and .csv.
set -u
out=$(realpath -m "$1") shards=$2
shift 2
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out"
failed=()

run() {   # NAME COMMAND...: output to OUT/NAME.txt
    local name=$1
    shift
    "$@" > "$out/$name.txt" 2>&1 || failed+=("$name")
}

speed() {   # NAME BINARY OPTION...
    local name=$1 binary=$2
    shift 2
    run "$name" "$binary" --train-data "$shards" --train-iters "${STEPS:-8}" --log-file "$out/$name.jsonl" "$@"
}
recipes() {   # NAME BINARY OPTION...
    local logs=()
    speed "$1-bf16" "${@:2}"
    for recipe in delayed tensorwise blockwise; do speed "$1-$recipe" "${@:2}" --fp8-recipe "$recipe"; done
    speed "$1-1F1L" "${@:2}" --fp8-recipe tensorwise --first-last-layers-bf16
    for recipe in bf16 delayed tensorwise blockwise 1F1L; do logs+=("$recipe=$out/$1-$recipe.jsonl"); done
    run "$1-compare" scripts/compare --no-plots --out "$out/$1" "${logs[@]}"
    sed -n '/^| configuration | precision/,/^$/p' "$out/$1-compare.txt"
}

tests() {
    run tests_gpu build/cuda/tests_gpu
    run tests build/cuda/tests
    LLMC_BUILD=$PWD/build/cuda run test_train python3 -m unittest tests.test_train
    grep -h "test cases" "$out/tests_gpu.txt" "$out/tests.txt"
    tail -n 1 "$out/test_train.txt"
}

# The library's kernels synchronise through barriers that racecheck does not follow.
sanitize() {
    for tool in memcheck racecheck initcheck; do
        GPU_TEST_SMALL=1 run "$tool" compute-sanitizer --tool "$tool" build/cuda/tests_gpu -tce='*device*'
        echo "$tool: $(grep -hE 'SUMMARY' "$out/$tool.txt"); of ours:" \
             "$(grep -E 'Race reported|^========= (Invalid|Uninitialized)' "$out/$tool.txt" | grep -vc nvjet)"
    done
}

bench() {
    for bench in build/cuda/bench_*; do run "$(basename "$bench")" "$bench"; done
    cat "$out"/bench_*.txt
}

make -j"${JOBS:-$(nproc)}" DEVICE=cuda train_gpt2 train_llama build/cuda/tests build/cuda/tests_gpu benches \
    > "$out/build.txt" 2>&1 || { tail -n 20 "$out/build.txt" >&2; exit 1; }
nvidia-smi --query-gpu=name,power.limit,driver_version --format=csv,noheader > "$out/gpu.txt"
for part in "$@"; do
    echo "=== $part"
    case $part in
        tests | sanitize | bench) "$part" ;;
        gpt2) recipes gpt2 ./train_gpt2 --model gpt2-124M --micro-batch-size 64 --global-batch-size 512 ;;
        small) recipes small ./train_llama --model llama3-small --micro-batch-size 8 --global-batch-size 64 ;;
        8b) recipes 8b ./train_llama --model llama3-8B --micro-batch-size 1 --global-batch-size 4 --grad-dtype bf16 \
                --moment-dtype bf16 --lr 3e-5 ;;
        *) echo "gpu_check.sh: no part '$part'" >&2; exit 2 ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check.sh: failed: ${failed[*]}" >&2
    exit 1
fi
