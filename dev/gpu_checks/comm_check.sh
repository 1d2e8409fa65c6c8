#!/bin/bash
# What to run on a machine with several GPUs after a change of communication, with its outputs in one folder:
#
#   dev/gpu_checks/comm_check.sh OUT ['TRAIN_SHARDS']
#
# Every collective on 1, 2, 3, 4 and 8 ranks as far as there are GPUs, twice for the bits; NCCL's non-blocking mode; a
# rank that stays away and is cut off; refused placements; with TRAIN_SHARDS (a glob, quoted) the rates of the links
# before a few steps of training. MPIRUN replaces the launcher, JOBS that of make; NO_BUILD=1 takes build/cuda as it is.
# What fails is told at the end (exit 1).
set -u
out=$(realpath -m "$1") shards=${2:-}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out"
failed=()
read -ra mpirun <<< "${MPIRUN:-mpirun --allow-run-as-root --oversubscribe --bind-to none}"
gpus=$(nvidia-smi -L | wc -l)

ranks() {   # NAME EXIT_CODE RANKS COMMAND...: output to OUT/NAME.txt
    local name=$1 expected=$2 count=$3 status
    shift 3
    timeout 300 "${mpirun[@]}" -np "$count" "$@" > "$out/$name.txt" 2>&1
    status=$?
    [ "$status" = "$expected" ] || failed+=("$name (exit $status, not $expected)")
}
must_say() {   # NAME TEXT
    grep -qF -- "$2" "$out/$1.txt" || failed+=("$1 (does not say: $2)")
}
check=build/cuda/comm_check

if [ -z "${NO_BUILD:-}" ]; then
    make -j"${JOBS:-$(nproc)}" DEVICE=cuda $check train_llama > "$out/build.txt" 2>&1 ||
        { tail -n 20 "$out/build.txt" >&2; exit 1; }
fi
nvidia-smi --query-gpu=index,name,pci.bus_id,driver_version --format=csv,noheader > "$out/gpus.txt"
nvidia-smi topo -m >> "$out/gpus.txt" 2>&1

for count in 1 2 3 4 8; do
    [ "$count" -le "$gpus" ] || continue
    for run in a b; do
        ranks "check-$count-$run" 0 "$count" $check --large
        grep -hE '^(NCCL|sum of one|comm_check)' "$out/check-$count-$run.txt"
    done
    digests=$(sed -n 's/.*digest //p' "$out/check-$count-"[ab].txt | sort -u | wc -l)
    [ "$digests" = 1 ] || failed+=("check-$count (two runs differ in bits)")
done

if [ "$gpus" -gt 1 ]; then
    NCCL_COMM_BLOCKING=0 ranks non-blocking 0 2 $check
    echo "NCCL's non-blocking mode: $(grep -h '^sum of one' "$out/non-blocking.txt")"
    ranks stall 0 "$gpus" $check --seconds 20 --stall 1
    grep -h 'cut off' "$out/stall.txt"
    must_say stall "rank 0: cut off in"
    ranks one-too-many 2 $((gpus + 1)) $check
    must_say one-too-many "start at most one rank per GPU"
    CUDA_VISIBLE_DEVICES=0 ranks same-gpu 2 2 $check
    must_say same-gpu "are on the same GPU"
fi

if [ -n "$shards" ]; then
    ranks train 0 "$gpus" ./train_llama --model llama3-small --train-data "$shards" --train-iters 6 --check-comm \
        --micro-batch-size 8 --log-file "$out/train.jsonl"
    grep -hE '^ |check-comm|NCCL|ranks of host|iteration|WARNING' "$out/train.txt"
    must_say train "check-comm: pairs of ranks"
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf 'comm_check.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "comm_check.sh: all passed on $gpus GPUs"
