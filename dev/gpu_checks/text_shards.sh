#!/bin/bash
# This repository's own text as byte-level token shards in a folder; prints the glob of those to train on.
set -e
cd "$(dirname "$0")/../.."
find llmc tests data dev scripts \( -name '*.cpp' -o -name '*.h' -o -name '*.py' -o -name '*.cu*' \) -print0 |
    xargs -0 python3 data/prepare_text.py --tokenizer bytes --out "$1" --valid-fraction 0.05 --overwrite --quiet >&2
echo "$1/train_*.bin"
