#!/usr/bin/env python3
"""HellaSwag (10,042 questions in its validation split) -> the file of the trainer's --hellaswag-data.

  data/prepare_hellaswag.py                                          # shards/hellaswag_val.bin, GPT-2's tokenizer
  data/prepare_hellaswag.py --input hellaswag_val.jsonl              # a copy that is here already
  data/prepare_hellaswag.py --tokenizer Meta-Llama-3-8B/tokenizer.json --with-separator --out shards/llama3_val.bin

Streams Rowan/hellaswag from the Hugging Face hub. --input: JSON lines with ctx, endings and label, as in
github.com/rowanz/hellaswag. Context, space and ending are encoded as one text, which gives llm.c's tokens with GPT-2's
tokenizer; an ending whose first token begins in the context is refused.
Vocabularies of up to 16 bits give llm.c's format, larger ones the same in 32 bits.
"""
import argparse
import array
import itertools
import json
import struct
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.shard_format import HEADER_BYTES, TYPECODES, meta_path  # noqa: E402
from llmfp8.support import InputError, Parser, count_text, replacement, run_main, whole_number  # noqa: E402
from llmfp8.text_sources import Reader, Source, find_sources, text_of  # noqa: E402
from llmfp8.text_tokenizers import add_tokenizer_options, load_tokenizer  # noqa: E402

DATASET = "Rowan/hellaswag"
MAGIC = 20240522
VERSIONS = {2: 1, 4: 2}   # by bytes of a word


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="", metavar="FILE", help="JSON lines in place of the download")
    parser.add_argument("--dataset-split", default="validation", metavar="NAME",
                        help="split of the download (default %(default)s; those of test have no labels)")
    parser.add_argument("--out", default="shards/hellaswag_val.bin", metavar="FILE", help="default %(default)s")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                        help="bytes, gpt2, or a tokenizer.json (default %(default)s)")
    add_tokenizer_options(parser)
    parser.add_argument("--with-separator", action="store_true", help="contexts begin with that token (llm.c's do not)")
    parser.add_argument("--max-examples", type=whole_number, default=0, metavar="N", help="stop after N; 0: all")
    return parser.parse_args()


def question_of(row):
    """(context, endings, label) of a row."""
    context, endings, label = (row.get(name) for name in ("ctx", "endings", "label"))
    if not isinstance(context, str) or not context:
        raise InputError(f"field 'ctx' is {json.dumps(context)}, not text")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) for e in endings):
        raise InputError("field 'endings' is not a list of at least two texts")
    try:
        label = int(label)   # the hub has it as text
    except (TypeError, ValueError):
        label = -1
    if not 0 <= label < len(endings):
        raise InputError(f"field 'label' is {json.dumps(row.get('label'))}, not the number of an ending (0 to "
                         f"{len(endings) - 1})")
    return context, endings, label


def example_of(number, question, tokenizer, word_bytes, with_separator):
    """The bytes of an example."""
    context, endings, label = question
    largest = 2 ** (8 * word_bytes) - 1
    start = [tokenizer.separator] if with_separator else []
    shared = list(tokenizer.encode(text_of(context)))
    words = [largest, 0, number, label, len(endings), len(start) + len(shared), *start, *shared]
    for ending in endings:
        tokens = list(tokenizer.encode(text_of(f"{context} {ending}")))
        if tokens[:len(shared)] != shared:
            raise InputError(f"the tokens of 'ctx' change when the ending {ascii(ending)[:60]} follows: take the "
                             "blanks off the end of ctx")
        words += [len(tokens) - len(shared), *tokens[len(shared):]]
    words[1] = len(words) * word_bytes
    if max(words[1:]) >= largest:
        raise InputError(f"example {number} of {words[1]} bytes does not fit into {8 * word_bytes} bits")
    return array.array(TYPECODES[word_bytes], words).tobytes()


def write_file(path, examples, word_bytes, tokenizer):
    """Writes the file, and a sidecar by which the trainer compares tokenizers, under temporary names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(meta_path(path)) as temporary:
        temporary.write_text(json.dumps({"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.meta()}) + "\n")
    header = struct.pack("<4i", MAGIC, VERSIONS[word_bytes], len(examples), max(map(len, examples)))
    with replacement(path) as temporary, open(temporary, "wb") as file:
        file.writelines([header.ljust(HEADER_BYTES, b"\0"), *examples])


def main():
    args = parse_arguments()
    if args.max_examples < 0:
        raise InputError(f"--max-examples {args.max_examples}: must not be negative")
    tokenizer = load_tokenizer(args.tokenizer, args.vocab_bpe, args.encoder_json, args.separator)
    word_bytes = 2 if tokenizer.vocab_size < 2 ** 16 else 4   # the largest word starts an example
    sources = find_sources([args.input], "jsonl") if args.input else [Source("dataset", DATASET, True)]
    reader = Reader(sources, "ctx", dataset_split=args.dataset_split, convert=lambda row, _: example_of(
        reader.documents, question_of(row), tokenizer, word_bytes, args.with_separator))
    reader.field_option = "rows of HellaSwag"
    examples = list(itertools.islice(reader, args.max_examples or None))
    if reader.not_text:
        raise InputError(f"not text: {reader.not_text_places[0]}")
    if not examples:
        raise InputError(f"{args.input or DATASET}: has no example")
    try:
        write_file(Path(args.out), examples, word_bytes, tokenizer)
    except OSError as error:
        raise InputError(f"{args.out}: cannot write: {error.strerror or error}") from None
    print(f"{args.out}: {count_text(len(examples), 'example')} of {tokenizer.name}, {8 * word_bytes}-bit tokens")
    return 0


if __name__ == "__main__":
    run_main(main)
