#!/bin/bash
# What `make bench` runs: the benches of kernels and `bench` of whole steps, with their outputs in one folder.
#
#   dev/bench/bench.sh [OUT]          OUT: bench-DATE by default
#
#   MODELS    of "gpt2 small 8b": GPT-2 124M, llama3-small, Llama-3-8B (with a fourth of its optimizer steps' batches)
#   RECIPES   of "bf16 delayed tensorwise 1F1L blockwise" (the default) and int8-forward; 1F1L is tensorwise with the
#             first and last layer in BF16
#   KERNELS   of the names build/cuda/bench_*; empty: none; all by default
#   BUILD     folder of the executables (build/cuda)
#
# A model whose memory does not suffice is named and left out. Exit 1 if anything else fails.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$(realpath -m "${1:-bench-$(date +%F)}")
build=${BUILD:-build/cuda}
mkdir -p "$out"
failed=()

kernel() {   # NAME
    echo "=== $1"
    "$build/$1" > "$out/$1.txt" 2>&1 || { failed+=("$1"); tail -n 1 "$out/$1.txt"; }
}

step() {   # NAME BINARY OPTION...
    local name=$1 binary=$2
    shift 2
    echo "=== $name"
    "$build/$binary" bench --json "$@" > "$out/$name.json" 2> "$out/$name.txt" && return
    rm -f "$out/$name.json"
    tail -n 1 "$out/$name.txt"
    grep -q 'GiB are free' "$out/$name.txt" || failed+=("$name")
}

recipe_options() {
    case $1 in
        bf16) ;;
        1F1L) echo --fp8-recipe tensorwise --first-last-layers-bf16 ;;
        delayed | tensorwise | blockwise | int8-forward) echo --fp8-recipe "$1" ;;
        *) echo "bench.sh: no recipe '$1'" >&2; exit 2 ;;
    esac
}
model_options() {
    case $1 in
        gpt2) echo train_gpt2 --model gpt2-124M --seq-length 1024 --micro-batch-size 64 --global-batch-size 512 ;;
        small) echo train_llama --model llama3-small --seq-length 2048 --micro-batch-size 8 --global-batch-size 64 ;;
        8b) echo train_llama --model llama3-8B --seq-length 8192 --micro-batch-size 1 --global-batch-size 4 \
                 --grad-dtype bf16 --moment-dtype bf16 ;;
        tiny) echo train_gpt2 --model gpt2-tiny "${TINY_OPTIONS:-}" ;;
        *) echo "bench.sh: no model '$1'" >&2; exit 2 ;;
    esac
}

default_kernels=$(cd "$build" && ls -d bench_* 2>/dev/null)
for name in ${KERNELS-$default_kernels}; do kernel "$name"; done
for model in ${MODELS:-gpt2 small 8b}; do
    words=$(model_options "$model") || exit 2
    for recipe in ${RECIPES:-bf16 delayed tensorwise 1F1L blockwise}; do
        options=$(recipe_options "$recipe") || exit 2
        # Lists of words.
        # shellcheck disable=SC2086
        step "$model-$recipe" $words $options
    done
done
python3 dev/bench/bench_summary.py "$out" > "$out/summary.md" || failed+=(summary)
echo "$out/summary.md"
if [ ${#failed[@]} -gt 0 ]; then
    echo "bench.sh: failed: ${failed[*]}" >&2
    exit 1
fi
