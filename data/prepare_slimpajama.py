#!/usr/bin/env python3
"""SlimPajama (627 B tokens of web, books, code and papers) -> token shards.

  data/prepare_slimpajama.py --tokenizer Meta-Llama-3-8B/tokenizer.json --max-documents 1200000
  data/prepare_slimpajama.py --tokenizer gpt2 --sample 6B            # a random hundredth
  data/prepare_slimpajama.py --tokenizer gpt2 --input chunk1/*.jsonl.zst

Streams cerebras/SlimPajama-627B from the Hugging Face hub: nothing but the shards is stored. --dataset-split validation
or test reads its own held-out parts.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.dataset_script import run_dataset  # noqa: E402
from llmfp8.support import run_main  # noqa: E402

NAMES = {"627B": "slimpajama", "6B": "hf:DKYoon/SlimPajama-6B"}


def add_options(parser):
    parser.add_argument("--sample", default="627B", choices=NAMES, help="tokens of it (default %(default)s)")


def choose(args):
    args.inputs = [NAMES[args.sample]]


def main():
    return run_dataset(__doc__, choose, add_options, out="shards/slimpajama", valid_fraction=0.005)


if __name__ == "__main__":
    run_main(main)
