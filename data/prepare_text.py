#!/usr/bin/env python3
"""Text -> token shards (llm.c's format) of a training and a validation split.

  data/prepare_text.py --tokenizer bytes --out DIR --valid-fraction 0.1 README.md src/
  data/prepare_text.py --tokenizer gpt2 --out DIR openwebtext
  data/prepare_text.py --tokenizer Meta-Llama-3-8B/tokenizer.json --out DIR corpus/*.jsonl.zst

Inputs: text files, JSON lines (both also .gz or .zst), parquet, folders of them, and Hugging Face datasets
(openwebtext, slimpajama, or hf:OWNER/NAME, streamed). Writes DIR/train_000000.bin, ..., DIR/valid_000000.bin,
..., each with a .meta.json beside it; README.md describes both. Which split a document goes to depends on its
text only, and the output is the same for any --workers. No file gets its final name before all are
written.

--tokenizer bytes needs the standard library only; the other packages are pinned in ../requirements.txt.
"""
import argparse
import array
import collections
import hashlib
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shard_format import MAX_SHARD_TOKENS, MIN_TAIL_TOKENS, TYPECODES  # noqa: E402
from shard_format import SplitWriter, token_bytes_for  # noqa: E402
from support import InputError, Progress, run_main  # noqa: E402
from text_sources import Reader, find_sources  # noqa: E402
from text_tokenizers import load_tokenizer  # noqa: E402

SPLITS = ("train", "valid")
BATCH_BYTES = 1 << 19      # text a worker gets at a time
INLINE_BYTES = 4 << 20     # less text than this is not worth starting workers
OWN_NAME = re.compile(r"(train|valid)_\d{6}\.(bin|meta\.json)(\.tmp)?")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT",
                        help="file, folder, openwebtext, slimpajama, hf:OWNER/NAME")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the shards go; made if missing")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="bytes, gpt2, or a tokenizer.json")
    parser.add_argument("--vocab-bpe", default="", metavar="FILE",
                        help="gpt2 without a network: its vocab.bpe ...")
    parser.add_argument("--encoder-json", default="", metavar="FILE", help="... and encoder.json")
    parser.add_argument("--separator", default="", metavar="TOKEN",
                        help="of a tokenizer.json: the token that starts a document (default: a known one)")
    parser.add_argument("--valid-fraction", type=float, default=0.01, metavar="F",
                        help="share of the documents for validation, 0 to below 1 (default %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens of a shard (default %(default)s)")
    parser.add_argument("--document-bytes", type=int, default=8192, metavar="N",
                        help="text files are cut into documents of about N bytes, at ends of lines, so that "
                             "both splits get parts of a large file; 0: a file is a document "
                             "(default %(default)s)")
    parser.add_argument("--format", default="auto", choices=("auto", "text", "jsonl", "parquet"),
                        help="of the files (default: by their names)")
    parser.add_argument("--text-field", default="text", metavar="NAME",
                        help="field or column with the text (default %(default)s)")
    parser.add_argument("--dataset-config", default="", metavar="NAME",
                        help="configuration of a Hugging Face dataset")
    parser.add_argument("--dataset-split", default="train", metavar="NAME",
                        help="split of it (default %(default)s)")
    parser.add_argument("--max-documents", type=int, default=0, metavar="N", help="stop after N; 0: all")
    parser.add_argument("--workers", type=int, default=0, metavar="N",
                        help="processes; 0: one a core, at most 64")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    if not 0 <= args.valid_fraction < 1:
        raise InputError(f"--valid-fraction {args.valid_fraction}: must be at least 0 and below 1")
    most = MAX_SHARD_TOKENS - MIN_TAIL_TOKENS
    if not 1 <= args.shard_tokens <= most:
        raise InputError(f"--shard-tokens {args.shard_tokens}: must be 1 to {most}")
    for name in ("document_bytes", "max_documents", "workers"):
        if getattr(args, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
    return args


def is_validation(document, fraction):
    """By the hash of the text alone: repeated documents stay on one side, their order does not matter."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2 ** 64


class Tokenize:
    """Batch of documents -> for each split (bytes of the tokens, number of tokens of each document)."""

    def __init__(self, tokenizer, token_bytes, valid_fraction):
        self.tokenizer, self.typecode, self.valid_fraction = tokenizer, TYPECODES[token_bytes], valid_fraction

    def __call__(self, documents):
        tokens = {split: array.array(self.typecode) for split in SPLITS}
        lengths = {split: [] for split in SPLITS}
        for document in documents:
            split = SPLITS[is_validation(document, self.valid_fraction)]
            out = tokens[split]
            before = len(out)
            out.append(self.tokenizer.separator)
            out.extend(self.tokenizer.encode(document))
            lengths[split].append(len(out) - before)
        if sys.byteorder != "little":
            for out in tokens.values():
                out.byteswap()
        return {split: (tokens[split].tobytes(), lengths[split]) for split in SPLITS}


def start_worker(load_arguments, token_bytes, valid_fraction):
    """A worker process builds its tokenizer once: the libraries' objects do not travel between processes."""
    work.tokenize = Tokenize(load_tokenizer(*load_arguments), token_bytes, valid_fraction)


def work(documents):
    return work.tokenize(documents)


def batches(documents, max_documents):
    batch, size = [], 0
    for number, document in enumerate(documents, 1):
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
        if number == max_documents:
            break
    if batch:
        yield batch


def tokenized(all_batches, args, tokenizer, token_bytes, workers):
    """The result of every batch, in order."""
    if workers == 1:
        yield from map(Tokenize(tokenizer, token_bytes, args.valid_fraction), all_batches)
        return
    load_arguments = (args.tokenizer, args.vocab_bpe, args.encoder_json, args.separator)
    with ProcessPoolExecutor(workers, initializer=start_worker,
                             initargs=(load_arguments, token_bytes, args.valid_fraction)) as pool:
        ahead = collections.deque()   # bounded, so that reading does not run away from writing
        try:
            for batch in all_batches:
                ahead.append(pool.submit(work, batch))
                if len(ahead) >= 4 * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BrokenProcessPool:
            raise InputError("a worker process died, likely for lack of memory; lower --workers") from None
        finally:
            for future in ahead:
                future.cancel()


def prepare_folder(folder, overwrite):
    """Makes the folder; returns the shards in it that are to be replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    own = sorted(path for path in folder.iterdir() if OWN_NAME.fullmatch(path.name))
    for path in own:
        if path.suffix == ".tmp":   # of a run that was killed
            path.unlink()
    old = [path for path in own if path.suffix != ".tmp"]
    if old and not overwrite:
        raise InputError(f"{folder} already has {old[0].name}; choose another --out, or pass --overwrite")
    return old


def check_splits(writers, args, reader):
    if not any(writer.total_documents for writer in writers.values()):
        raise InputError(f"the inputs hold no text ({reader.empty} empty documents, "
                         f"{len(reader.skipped_files)} binary files)")
    wanted = SPLITS if args.valid_fraction > 0 else SPLITS[:1]
    for split in wanted:
        if not writers[split].total_documents:
            others = sum(writer.total_documents for writer in writers.values())
            raise InputError(f"none of {others} documents falls into the {split} split with --valid-fraction "
                             f"{args.valid_fraction}; change it, or lower --document-bytes (text files)")


def main():
    args = parse_arguments()
    folder = Path(args.out)
    tokenizer = load_tokenizer(args.tokenizer, args.vocab_bpe, args.encoder_json, args.separator)
    sources = find_sources(args.inputs, args.format)
    total_bytes = sum(source.bytes for source in sources)
    small = total_bytes < INLINE_BYTES and all(source.kind != "dataset" for source in sources)
    workers = args.workers or (1 if small else min(64, os.cpu_count() or 1))
    token_bytes = token_bytes_for(tokenizer.vocab_size)
    meta = {"vocab_size": tokenizer.vocab_size,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256,
                          "separator": tokenizer.separator},
            "valid_fraction": args.valid_fraction}
    reader = Reader(sources, args.text_field, args.document_bytes, args.dataset_config, args.dataset_split)
    try:
        old = prepare_folder(folder, args.overwrite)
        writers = {split: SplitWriter(folder, split, token_bytes, args.shard_tokens, meta)
                   for split in SPLITS}
        progress = Progress(total_bytes, args.quiet)
        try:
            text = batches(reader, args.max_documents)
            for result in tokenized(text, args, tokenizer, token_bytes, workers):
                for split in SPLITS:
                    writers[split].write(*result[split])
                progress.update(reader.done_bytes, sum(len(lengths) for _, lengths in result.values()),
                                sum(sum(lengths) for _, lengths in result.values()))
            check_splits(writers, args, reader)
            for writer in writers.values():
                writer.finish()
            for path in old:
                path.unlink()
            for writer in writers.values():
                writer.publish()
        finally:
            progress.close()
            for writer in writers.values():
                writer.discard()
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot write: {error.strerror or error}") from None
    if reader.skipped_files:
        print(f"passed over {len(reader.skipped_files)} binary files, the first is {reader.skipped_files[0]}")
    if reader.empty:
        print(f"passed over {reader.empty} documents without text")
    for split, writer in writers.items():
        print(f"{split}: {writer.total_tokens} tokens in {writer.total_documents} documents, "
              f"{len(writer.published) // 2} shards: {folder}/{split}_*.bin "
              f"(vocabulary {tokenizer.vocab_size})")
    return 0


if __name__ == "__main__":
    run_main(main)
