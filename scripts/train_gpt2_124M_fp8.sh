#!/bin/bash
# GPT-2 124M, FP8 with delayed scaling: one H200, 17,200 steps of 512 x 1024 tokens = 9.02 B tokens,
# OpenWebText once.
# Measured: 0.756 s/it (dev/results/2026-11-21-h200-fp8-small.md), so 3.6 hours.
# Options are passed on: --dry-run, --synthetic-data (timing alone, no shards needed), --save DIR.
. "$(dirname "$0")/rows.sh"
gpt2_124m --fp8-recipe delayed --fp8-min-gain 1 "$@"
