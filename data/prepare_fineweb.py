#!/usr/bin/env python3
"""FineWeb and FineWeb-Edu (15 T and 1.3 T tokens of filtered web pages) -> token shards.

  data/prepare_fineweb.py                                            # 10 B tokens: shards/fineweb, GPT-2's tokenizer
  data/prepare_fineweb.py --edu --sample 100BT --tokenizer Meta-Llama-3-8B/tokenizer.json --out shards/fineweb-edu
  data/prepare_fineweb.py --input sample/10BT/*.parquet              # files that are here already

Streams HuggingFaceFW/fineweb or fineweb-edu from the Hugging Face hub: nothing but the shards is stored. --sample all
reads everything, --dataset-config CC-MAIN-2024-10 a single crawl.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.dataset_script import run_dataset  # noqa: E402
from llmfp8.support import InputError, run_main  # noqa: E402

SAMPLES = {"10BT": "sample-10BT", "100BT": "sample-100BT", "350BT": "sample-350BT", "all": "default"}


def add_options(parser):
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu: pages that a model found educational")
    parser.add_argument("--sample", choices=SAMPLES, help="tokens of it (default 10BT)")


def choose(args):
    if args.sample and args.dataset_config:
        raise InputError(f"--sample {args.sample} and --dataset-config {args.dataset_config} both choose a part")
    args.dataset_config = args.dataset_config or SAMPLES[args.sample or "10BT"]
    args.inputs = ["hf:HuggingFaceFW/fineweb-edu" if args.edu else "hf:HuggingFaceFW/fineweb"]


def main():
    return run_dataset(__doc__, choose, add_options, out="shards/fineweb", tokenizer="gpt2", valid_fraction=0.001)


if __name__ == "__main__":
    run_main(main)
