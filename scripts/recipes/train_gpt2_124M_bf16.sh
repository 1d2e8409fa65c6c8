#!/bin/bash
# GPT-2 124M, BF16: one H200, 17,200 steps of 512 x 1024 tokens = 9.02 B tokens, OpenWebText once.
. "$(dirname "$0")/recipes.sh"
gpt2_124m "$@"
