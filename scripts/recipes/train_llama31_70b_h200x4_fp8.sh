#!/bin/bash
# Llama-3.1-70B, FP8 with delayed scaling: 4 H200, 1,000 steps of 16 x 8192 tokens = 131 M tokens of SlimPajama.
# Masters and activations are in host memory: 327 GiB of it, pinned.
. "$(dirname "$0")/recipes.sh"
llama31_70b_h200 --fp8-recipe delayed --fp8-amax-history-len 1024 "$@"
