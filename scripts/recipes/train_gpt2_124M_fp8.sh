#!/bin/bash
# GPT-2 124M, FP8 with delayed scaling: one H200, 17,200 steps of 512 x 1024 tokens = 9.02 B tokens of OpenWebText.
. "$(dirname "$0")/recipes.sh"
gpt2_124m --fp8-recipe delayed --fp8-min-speedup 1 "$@"
