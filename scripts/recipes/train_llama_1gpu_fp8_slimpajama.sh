#!/bin/bash
# llama3-small, FP8 with delayed scaling: one H200, 3,000 steps of 64 x 2048 tokens = 393 M tokens of SlimPajama.
. "$(dirname "$0")/recipes.sh"
llama3_small --fp8-recipe delayed --fp8-min-speedup 1 "$@"
