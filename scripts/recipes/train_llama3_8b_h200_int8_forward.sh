#!/bin/bash
# Llama-3-8B, the forward pass in INT8: 8 H200, 1,000 steps of 128 x 8192 tokens = 1.05 B tokens of SlimPajama.
. "$(dirname "$0")/recipes.sh"
llama3_8b_h200 --fp8-recipe int8-forward "$@"
