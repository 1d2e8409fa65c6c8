#!/bin/bash
# Llama-3.1-8B from its Hugging Face checkpoint, FP8 with delayed scaling, layers recomputed: 8 GPUs, 480 steps of
# 256 x 4096 tokens (4 sequences, 8 micro-batches a GPU) = 503 M tokens of SlimPajama, or of DATA.
. "$(dirname "$0")/recipes.sh"
finetune_llama31_8b --fp8-recipe delayed "$@"
