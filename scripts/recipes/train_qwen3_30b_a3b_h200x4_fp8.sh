#!/bin/bash
# Qwen3-30B-A3B (128 experts, 8 per token), FP8 blockwise, expert parallelism: 4 H200, 1,000 steps of 32 x 4096 tokens
# = 131 M tokens of SlimPajama.
. "$(dirname "$0")/recipes.sh"
qwen3_30b_a3b_h200 --fp8-recipe blockwise "$@"
