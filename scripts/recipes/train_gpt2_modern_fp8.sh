#!/bin/bash
# GPT-2 with RMSNorm, rope, 4 key and value heads and qk-norm, FP8 with delayed scaling: one H200, 2,000 steps of
# 512 x 1024 tokens = 1.05 B tokens of OpenWebText.
. "$(dirname "$0")/recipes.sh"
gpt2_modern --fp8-recipe delayed --fp8-min-speedup 1 "$@"
