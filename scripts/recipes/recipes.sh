# shellcheck shell=bash
# What the recipes share, sourced by each of them: a recipe is a model below and the options after it.
# Options are passed on: --dry-run, --synthetic-data (timing alone, no shards needed), --save DIR.
#
# scripts/README.md has the environment variables.
set -u
unset CDPATH   # or cd may lead elsewhere
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
recipe=$(basename "$0" .sh)

refuse() { echo "$recipe: $*" >&2; exit 2; }
# Checked before any arithmetic, in which bash would run the $(commands) of a value like a[$(command)].
[[ ${RANKS:-1} =~ ^[1-9][0-9]{0,5}$ ]] || refuse "RANKS=${RANKS@Q}: give the number of GPUs, from 1, in digits"

# given OPTION WORD...: whether the option is among the words.
given() {
    local option=$1 word
    shift
    for word in "$@"; do
        word=${word//_/-}
        [[ $word = "$option" || ( $word = "$option"=* && $word != *=false ) ]] && return 0
    done
    return 1
}
# dry WORD...: whether the words ask for something that needs no data, no model and no other ranks.
dry() {
    local option
    for option in --dry-run --help --help-all --print-config --version; do given "$option" "$@" && return; done
    return 1
}

# shards FOLDER TOKENIZER SOURCE... -- WORD...: sets `data` to the options for the shards of this source, and says how
# they are made where there are none. Nothing with --synthetic-data, or --train-data of the user's own.
shards() {
    local folder=${DATA:-$1} make source=()
    make=$(printf ' %q' "$root/data/prepare_text.py" --tokenizer "$2" --valid-fraction 0.005 --out "$folder")
    shift 2
    while [ "$1" != -- ]; do source+=("$1"); shift; done
    shift
    data=()
    ! given --synthetic-data "$@" && ! given --train-data "$@" && ! given -i "$@" || return 0
    data=(--train-data "$folder/train_*.bin")
    ! compgen -G "$folder/valid_*.bin" >/dev/null && ! dry "$@" \
        || data+=(--valid-data "$folder/valid_*.bin" --eval-interval 250 --eval-iters 64)
    dry "$@" || compgen -G "$folder/train_*.bin" >/dev/null || refuse "no shards in $folder; this makes them:
 $make ${source[*]}
(or DATA=FOLDER with shards of your own; or --synthetic-data, for timing alone)"
}
# 1.2 M documents are about 1.3 B tokens, enough for every recipe.
slimpajama() {
    shards shards/slimpajama "${TOKENIZER:-Meta-Llama-3-8B/tokenizer.json}" --max-documents 1200000 slimpajama -- "$@"
}
openwebtext() { shards shards/openwebtext gpt2 openwebtext -- "$@"; }

# steps NUMBER WARMUP WORD...: sets `length`. If the user's words say how long, it is empty, and the warm-up is the
# trainer's default.
steps() {
    length=()
    given --train-iters "${@:3}" || given -x "${@:3}" || given --epochs "${@:3}" \
        || length=(--train-iters "$1" --lr-warmup-iters "$2")
}

# run RANKS EXECUTABLE OPTION...: later options win. The log is logs/RECIPE.jsonl unless --log-file or --save places it.
run() {
    local ranks=${RANKS:-$1} executable=${LLMC_BUILD:-$root}/$2 log=()
    shift 2
    [ -x "$executable" ] || refuse "$executable is missing: run make"
    dry "$@" && exec "$executable" --ranks "$ranks" "$@"
    given --log-file "$@" || given --save "$@" || log=(--log-file "logs/$recipe.jsonl")
    [ "$ranks" = 1 ] && exec "$executable" "${log[@]}" "$@"
    exec "$root/scripts/launch/launch_mpi.sh" -np "$ranks" "$executable" --ranks "$ranks" "${log[@]}" "$@"
}

llama3_8b_h200() {
    slimpajama "$@"
    steps 1000 100 "$@"
    run 8 train_llama --model llama3-8B --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 \
        --lr 3e-4 "${length[@]}" "${data[@]}" "$@"
}
llama31_70b_h200() {
    slimpajama "$@"
    steps 1000 100 "$@"
    run 4 train_llama --model llama3.1-70B --seq-length 8192 --micro-batch-size 1 --global-batch-size 16 \
        --zero 3 --offload masters,activations --offload-fraction 0.95 --recompute block-keep-attention \
        --grad-dtype bf16 --grad-shard-dtype bf16 --moment-dtype bf16 --lr 1.5e-4 "${length[@]}" "${data[@]}" "$@"
}
qwen3_30b_a3b_h200() {
    slimpajama "$@"
    steps 1000 100 "$@"
    run 4 train_llama --model qwen3-30B-A3B --seq-length 4096 --micro-batch-size 2 --global-batch-size 32 \
        --expert-parallel "${RANKS:-4}" --recompute block --grad-dtype bf16 --moment-dtype bf16 --lr 3e-4 \
        "${length[@]}" "${data[@]}" "$@"
}
llama3_small() {
    slimpajama "$@"
    steps 3000 150 "$@"
    run 1 train_llama --model llama3-small --seq-length 2048 --micro-batch-size 8 --global-batch-size 64 \
        --lr 3e-4 "${length[@]}" "${data[@]}" "$@"
}
gpt2_124m() {
    openwebtext "$@"
    steps 17200 700 "$@"
    run 1 train_gpt2 --model gpt2-124M --seq-length 1024 --micro-batch-size 64 --global-batch-size 512 \
        --lr 6e-4 "${length[@]}" "${data[@]}" "$@"
}
gpt2_modern() {
    steps 2000 200 "$@"
    gpt2_124m --normalization RMSNorm --position-embedding-type rope --num-query-groups 4 --qk-layernorm \
        "${length[@]}" "$@"
}
finetune_llama31_8b() {
    local model=${MODEL:-Llama-3.1-8B} weights=()
    weights=(--load "$model")
    if [ ! -e "$model/config.json" ]; then
        dry "$@" || given --synthetic-data "$@" || refuse "no Hugging Face model in $model; this fetches it:
  hf download meta-llama/Llama-3.1-8B --local-dir $model
(or MODEL=FOLDER; or --synthetic-data, for timing alone, from initial weights)"
        echo "$recipe: no model in $model: its shape, with initial weights" >&2
        weights=(--model llama3-8B --rope-scaling-factor 8 --max-position-embeddings 131072)
    fi
    slimpajama "$@"
    steps 480 100 "$@"
    run 8 train_llama "${weights[@]}" --seq-length 4096 --micro-batch-size 4 \
        --global-batch-size "$((32 * ${RANKS:-8}))" --recompute block --lr 2e-4 "${length[@]}" "${data[@]}" "$@"
}
