#!/bin/bash
# GPT-2 124M, FP8 with delayed scaling: one H200, 17,200 steps of 512 x 1024 tokens = 9.02 B tokens,
# OpenWebText once.
# Measured: 0.687 s/it (dev/results/2026-11-22-h200-tables), so 3.3 hours.
. "$(dirname "$0")/recipes.sh"
gpt2_124m --fp8-recipe delayed --fp8-min-speedup 1 "$@"
