#!/bin/bash
# Llama-3-8B, FP8 in blocks: 8 H200, 1,000 steps of 128 x 8192 tokens = 1.05 B tokens of SlimPajama.
# Measured on 4 GPUs with half the batch: 8.46 s/it (dev/results/2026-11-22-h200-four), so 2.4 hours on 8.
# The published table has 12.4 (on H200 NVL) s/it.
. "$(dirname "$0")/recipes.sh"
llama3_8b_h200 --fp8-recipe blockwise "$@"
