#!/usr/bin/env python3
"""Reads every token of shards and checks header and size, every id, checksum and documents.

  data/check_shards.py DIR/*.bin
  data/check_shards.py --vocab-size 50257 --token-dtype uint16 nanogpt/train.bin

Prints one line per shard, also after a damaged one, and a summary; exits with 2 if a shard is damaged. Compares the
file with its .meta.json: tokens, dtype, SHA-256, vocabulary, loss mask, and that documents start at exactly the listed
tokens, with the separator. To check ids it needs the .meta.json or --vocab-size. All shards must be of one tokenizer,
and no two may have the same bytes, such as a validation shard that is also trained on. Reads every format that the
trainer reads (README.md). Standard library only; numpy makes it about 7 times faster.
"""
import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.shard_format import DTYPES, NOT_SHARDS, Shard, file_sha256, shard_paths  # noqa: E402
from llmfp8.support import InputError, Parser, count_text, run_main, whole_number  # noqa: E402

CHUNK = 1 << 22   # tokens looked at together


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", metavar="SHARD",
                        help="a .bin file, or a pattern in quotes; a mask, sidecar or index stands for its shard")
    parser.add_argument("--vocab-size", type=whole_number, default=0, metavar="N",
                        help="ids must be below N (default: what the .meta.json says)")
    parser.add_argument("--token-dtype", default="", choices=("uint16", "uint32"), help="of headerless files")
    parser.add_argument("--workers", type=whole_number, default=0, metavar="N", help="processes; 0: one per core")
    args = parser.parse_args()
    args.shards = shard_paths(args.shards)
    for name in ("vocab_size", "workers"):
        if getattr(args, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
    return args


class Found:
    """The result for one shard. damage: one line, empty if the shard is complete."""

    def __init__(self, path):
        self.path, self.damage, self.remark = path, "", ""
        self.tokens = self.documents = self.highest = 0
        self.sha256 = self.tokenizer = ""
        self.counted = None   # tokens that count as targets; None without a loss mask


def scan(shard, limit, separator):
    """Largest id and positions of separators of a whole shard; an id >= limit is an error."""
    try:
        import numpy
    except ImportError:
        numpy = None
    highest, starts = -1, []
    for first in range(0, shard.count, CHUNK):
        tokens = shard.tokens[first:first + CHUNK]
        ids = numpy.asarray(tokens) if numpy else tokens
        highest = max(highest, int(ids.max()) if numpy else max(ids))
        if highest >= limit:
            token = first + next(i for i, token in enumerate(tokens) if token >= limit)
            raise InputError(f"byte {shard.offset + token * shard.token_bytes} (token {token}): id "
                             f"{shard.tokens[token]} is not below the vocabulary size {limit}")
        if separator is not None:
            starts += ((numpy.flatnonzero(ids == separator) + first).tolist() if numpy else
                       [first + i for i, token in enumerate(tokens) if token == separator])
    return highest, starts


def check_documents(offsets, starts):
    """Requires that the sidecar's offsets are the positions of separators."""
    if offsets == starts:
        return
    listed, there = set(offsets), set(starts)
    wrong = min(listed ^ there, default=None)
    if wrong is None:
        raise InputError("the .meta.json does not list the documents in their order, each once")
    raise InputError(f"token {wrong} " + ("does not start a document as the .meta.json says" if wrong in listed else
                                          "starts a document that the .meta.json does not list"))


def check(path, token_dtype, vocab_size):
    """Checks one shard."""
    found = Found(path)
    try:
        if path.endswith(NOT_SHARDS):
            raise InputError("belongs to a .bin file that is not there")
        shard = Shard(path, token_dtype)
        meta = shard.read_meta()
        tokenizer = meta.get("tokenizer") or {}
        found.tokens, found.tokenizer = shard.count, tokenizer.get("sha256", "")
        if not shard.count:
            raise InputError("holds no tokens")
        limit = vocab_size or meta.get("vocab_size") or 2 ** 32
        found.highest, starts = scan(shard, limit, tokenizer.get("separator"))
        found.sha256 = file_sha256(path)
        found.counted, _ = shard.read_mask()
        if not meta:
            found.remark = "no .meta.json" + ("" if vocab_size else ", ids not held against a vocabulary")
            return found
        if not meta.keys() & {"tokens", "dtype", "checksum", "documents", "document_offsets"}:
            found.documents = len(starts)
            found.remark = "its .meta.json has no counts and no checksum"
            return found
        says = {**meta, "sha256": (meta.get("checksum") or {}).get("value")}
        for what, value in (("tokens", shard.count), ("dtype", DTYPES[shard.token_bytes]), ("sha256", found.sha256)):
            if says.get(what) != value:
                raise InputError(f"{what} is {value}, its .meta.json says {says.get(what)}")
        check_documents(meta.get("document_offsets") or [], starts)
        if meta.get("documents") != len(starts):
            raise InputError(f"has {count_text(len(starts), 'document')}, its .meta.json says {meta.get('documents')}")
        found.documents = len(starts)
    except InputError as error:
        message = str(error)
        stem = str(path).removesuffix(".bin")   # of the files beside it as well
        found.damage = message if message.startswith(stem) else f"{path}: {message}"
    except OSError as error:
        found.damage = f"{path}: cannot read: {error.strerror or error}"
    return found


def check_together(all_found):
    """Checks for shards with the same bytes or with another tokenizer."""
    first_of, tokenizer = {}, None
    for found in all_found:
        if found.damage:
            continue
        same = first_of.setdefault(found.sha256, found)
        if same is not found:
            found.damage = f"{found.path}: holds the same bytes as {same.path}"
        elif found.tokenizer:
            tokenizer = tokenizer or found
            if found.tokenizer != tokenizer.tokenizer:
                found.damage = f"{found.path}: made with another tokenizer than {tokenizer.path}"


def report(found):
    if found.damage:
        return f"DAMAGED {found.damage}"
    documents = f", {count_text(found.documents, 'document')}" if found.documents else ""
    remark = f" ({found.remark})" if found.remark else ""
    mask = "" if found.counted is None else f", {found.counted} count as targets"
    return f"whole {found.path}: {count_text(found.tokens, 'token')}{documents}{mask}, ids to {found.highest}{remark}"


def main():
    args = parse_arguments()
    workers = min(args.workers or os.cpu_count() or 1, len(args.shards))
    work = [args.shards, [args.token_dtype] * len(args.shards), [args.vocab_size] * len(args.shards)]
    if workers == 1:
        all_found = [check(*one) for one in zip(*work)]
    else:
        with ProcessPoolExecutor(workers) as pool:
            all_found = list(pool.map(check, *work))
    check_together(all_found)
    for found in all_found:
        print(report(found))
    damaged = sum(bool(found.damage) for found in all_found)
    tokens = sum(found.tokens for found in all_found if not found.damage)
    print(f"{count_text(len(all_found), 'shard')}, {damaged} damaged, {count_text(tokens, 'token')} in the others")
    return 2 if damaged else 0


if __name__ == "__main__":
    run_main(main)
