#!/usr/bin/env python3
"""Text -> token shards (llm.c's format) of a training and a validation split.

  data/prepare_text.py --tokenizer bytes --out DIR --valid-fraction 0.1 README.md src/
  data/prepare_text.py --tokenizer gpt2 --out DIR openwebtext         # or another data set by its name
  data/prepare_text.py --tokenizer Meta-Llama-3-8B/tokenizer.json --out DIR corpus/*.jsonl.zst

Inputs: text files, JSON lines (both also .gz or .zst), parquet, folders of them, tinyshakespeare, and Hugging Face
datasets (openwebtext, slimpajama, slimpajama-6b, fineweb, fineweb-edu, hf:OWNER/NAME), which are streamed: nothing but
the shards is stored. Writes DIR/train_000000.bin, ..., DIR/valid_000000.bin, ..., each with a .meta.json; README.md
describes both. The split of a document depends on its text only, and the output is the same for any --workers. Files
get their final names after all have been written. The same command continues an interrupted run.

--tokenizer bytes needs the standard library only; the other packages are pinned in ../requirements.txt.
"""
import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.support import Parser, run_main, whole_number  # noqa: E402
from llmfp8.text_shards import add_options, prepare  # noqa: E402


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, or the name of a data set")
    add_options(parser)
    parser.add_argument("--document-bytes", type=whole_number, default=8192, metavar="N",
                        help="text files are cut into documents of about N bytes, at ends of lines, so that both "
                             "splits get parts of a large file; 0: a file is a document (default %(default)s)")
    parser.add_argument("--format", default="auto", choices=("auto", "text", "jsonl", "parquet"),
                        help="format of the files (default: by file name)")
    parser.add_argument("--text-field", default="text", metavar="NAME",
                        help="field or column with the text (default %(default)s)")
    return prepare(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
