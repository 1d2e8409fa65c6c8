#!/usr/bin/env python3
"""OpenWebText (8 M documents, 9 B tokens of GPT-2) -> token shards.

  data/prepare_openwebtext.py                                        # shards/openwebtext, GPT-2's tokenizer
  data/prepare_openwebtext.py --max-documents 100000
  data/prepare_openwebtext.py --input openwebtext/*.parquet          # files that are here already

Streams Skylion007/openwebtext from the Hugging Face hub: nothing but the shards is stored.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.dataset_script import run_dataset  # noqa: E402
from llmfp8.support import run_main  # noqa: E402


def choose(args):
    args.inputs = ["openwebtext"]


def main():
    return run_dataset(__doc__, choose, out="shards/openwebtext", tokenizer="gpt2", valid_fraction=0.005)


if __name__ == "__main__":
    run_main(main)
