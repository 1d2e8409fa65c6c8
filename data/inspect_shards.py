#!/usr/bin/env python3
"""Shows the content of token shards: header, counts, smallest and largest id, decoded text, bigram entropy.

  data/inspect_shards.py DIR/train_000000.bin
  data/inspect_shards.py --show 5000:200 --tokenizer bytes DIR/valid_000000.bin
  data/inspect_shards.py --bigram-entropy DIR/valid_*.bin

Reads every format that the trainer reads (README.md); a headerless file needs --token-dtype. Standard library only.
check_shards.py compares shards with their .meta.json.
"""
import argparse
import collections
import itertools
import math
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.shard_format import DTYPES, Shard, shard_paths  # noqa: E402
from llmfp8.support import InputError, Parser, count_text, run_main  # noqa: E402
from llmfp8.text_tokenizers import add_tokenizer_options, load_tokenizer  # noqa: E402


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", metavar="SHARD", help="a .bin file, or a pattern in quotes")
    parser.add_argument("--token-dtype", default="", choices=("uint16", "uint32"), help="of headerless files")
    parser.add_argument("--show", default="0:64", metavar="FIRST:COUNT", help="tokens to decode (default %(default)s)")
    parser.add_argument("--tokenizer", default="", metavar="NAME",
                        help="bytes, gpt2 or a tokenizer.json (default: what the .meta.json names)")
    add_tokenizer_options(parser)
    parser.add_argument("--bigram-entropy", action="store_true",
                        help="print only the entropy of a token given the previous one, over all shards")
    args = parser.parse_args()
    args.shards = shard_paths(args.shards)
    try:
        first, _, count = args.show.partition(":")
        args.first, args.count = int(first), int(count)
    except ValueError:
        args.first = -1
    if args.first < 0 or args.count < 0:
        raise InputError(f"--show {args.show}: must be FIRST:COUNT, both 0 or more")
    return args


def bigram_entropy(shards):
    """H(next | current) in nats, and the number of pairs; pairs do not cross shards."""
    pairs = collections.Counter()
    for shard in shards:
        pairs.update(itertools.pairwise(shard.tokens))
    current = collections.Counter()
    for (first, _), count in pairs.items():
        current[first] += count
    total = sum(pairs.values())
    if not total:
        raise InputError("the shards hold no two tokens in a row")
    nats = math.fsum(count * math.log(current[first] / count) for (first, _), count in pairs.items())
    return nats / total, total


def id_range(tokens):
    bounds = [(min(ids), max(ids)) for ids in tokens.blocks()]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def tokenizer_of(args, meta):
    """(tokenizer, remark), or (None, the reason why nothing is decoded)."""
    named = (meta.get("tokenizer") or {}).get("name", "")
    name = args.tokenizer or (named if named in ("bytes", "gpt2") else "")
    if not name:
        return None, f"pass --tokenizer to decode ({named or 'not named by a .meta.json'})"
    try:
        tokenizer = load_tokenizer(name, args.vocab_bpe, args.encoder_json, args.separator)
    except InputError as error:
        if args.tokenizer:
            raise
        return None, str(error)
    if meta and tokenizer.sha256 != (meta.get("tokenizer") or {}).get("sha256"):
        return tokenizer, "another tokenizer than the one of the .meta.json"
    return tokenizer, ""


def describe(shard, args):
    meta = shard.read_meta()
    low_high = id_range(shard.tokens) if shard.count else (0, -1)
    print(f"{shard.path}")
    print(f"  format     {shard.format}, {DTYPES[shard.token_bytes]}, tokens from byte {shard.offset}")
    print(f"  size       {count_text(shard.bytes, 'byte')}, {count_text(shard.count, 'token')}")
    print(f"  ids        {low_high[0]} to {low_high[1]}" if shard.count else "  ids        none")
    documents = meta.get("documents", shard.documents)
    if documents is not None:
        print(f"  documents  {documents}")
    if meta:
        tokenizer = meta.get("tokenizer") or {}
        print(f"  meta       {meta.get('split')} split, tokenizer {tokenizer.get('name')} (sha256 "
              f"{str(tokenizer.get('sha256'))[:12]}...), vocabulary {meta.get('vocab_size')}")
    counted, flags = shard.read_mask()
    if flags is not None:
        print(f"  loss mask  {count_text(counted, 'target')} of {count_text(shard.count, 'token')}")
    ids = list(shard.tokens[args.first:args.first + args.count])
    if not ids:
        return
    print(f"  tokens     {args.first} to {args.first + len(ids) - 1}: {' '.join(map(str, ids[:16]))}"
          + (" ..." if len(ids) > 16 else ""))
    tokenizer, remark = tokenizer_of(args, meta)
    print(f"  text{'       ' + remark if remark else ''}")
    if tokenizer is not None:
        show_text(tokenizer, ids, flags and flags[args.first:args.first + args.count])


def show_text(tokenizer, ids, flags):
    """Prints lines of text; with a loss mask, those that count as targets begin with >."""
    for counts, pairs in itertools.groupby(zip(flags or bytes(len(ids)), ids), key=lambda pair: pair[0]):
        for line in tokenizer.decode([token for _, token in pairs]).split("\n"):
            print(f"    {'>' if counts else '|'} {line}")


def main():
    args = parse_arguments()
    shards = [Shard(path, args.token_dtype) for path in args.shards]
    if args.bigram_entropy:
        entropy, pairs = bigram_entropy(shards)
        print(f"bigram entropy {entropy:.6f} nats a token ({count_text(pairs, 'pair')}, "
              f"{count_text(len(shards), 'shard')})")
        return 0
    for shard in shards:
        describe(shard, args)
    return 0


if __name__ == "__main__":
    run_main(main)
