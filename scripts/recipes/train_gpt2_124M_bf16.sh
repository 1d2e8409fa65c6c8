#!/bin/bash
# GPT-2 124M, BF16: one H200, 17,200 steps of 512 x 1024 tokens = 9.02 B tokens, OpenWebText once.
# Measured: 0.851 s/it (dev/results/2026-11-22-h200-tables), so 4.1 hours.
. "$(dirname "$0")/recipes.sh"
gpt2_124m "$@"
