#!/bin/bash
# Llama-3-8B, FP8 with tensorwise current scaling, first and last layer BF16:
# 8 H200, 1,000 steps of 128 x 8192 tokens = 1.05 B tokens of SlimPajama.
. "$(dirname "$0")/recipes.sh"
llama3_8b_h200 --fp8-recipe tensorwise --first-last-layers-bf16 "$@"
