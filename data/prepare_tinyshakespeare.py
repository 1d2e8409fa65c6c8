#!/usr/bin/env python3
"""Tiny Shakespeare (1.1 MB of plays) -> token shards, for first runs and demonstrations.

  data/prepare_tinyshakespeare.py                                    # shards/tinyshakespeare, GPT-2's tokenizer
  data/prepare_tinyshakespeare.py --tokenizer bytes                  # needs no packages
  data/prepare_tinyshakespeare.py --input input.txt                  # a copy that is here already

Downloads the text over HTTP next to the shards and checks its SHA-256.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.dataset_script import download, run_dataset  # noqa: E402
from llmfp8.support import run_main  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def choose(args):
    args.inputs = [str(download(URL, Path(args.out) / "input.txt", SHA256))]


def main():
    return run_dataset(__doc__, choose, out="shards/tinyshakespeare", tokenizer="gpt2", valid_fraction=0.1)


if __name__ == "__main__":
    run_main(main)
