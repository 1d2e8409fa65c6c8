#!/bin/bash
# llama3-small, BF16: one H200, 3,000 steps of 64 x 2048 tokens = 393 M tokens of SlimPajama.
# Measured: 1.145 s/it (dev/results/2026-11-22-h200-tables), so 1.0 hours.
. "$(dirname "$0")/recipes.sh"
llama3_small "$@"
