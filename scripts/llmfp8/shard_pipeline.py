"""Converts documents to shards with worker processes, and continues interrupted runs. The caller's Plan has the
documents and their encoder.

Every CHECKPOINT_SECONDS the run saves and syncs its state in prepare.state.json in the folder: how far the inputs were
read and each split was written. The same command continues from there; the shards are byte for byte those of an
uninterrupted run.
"""
import collections
import dataclasses
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Callable

from .shard_format import SplitWriter
from .support import (InputError, Progress, count_text, end_with_parent, one_line, only_user_of, parse_json,
                      replacement)
from .text_sources import Reader

SPLITS = ("train", "valid")
BATCH_BYTES = 1 << 19      # text a worker gets at a time
INLINE_BYTES = 4 << 20     # less text than this is not worth starting workers
CHECKPOINT_SECONDS = 60
STATE_NAME = "prepare.state.json"
STATE_IN_WORK = re.compile(r"\.prepare\.state\.\w{8}\.json")   # of replacement(); a run that is killed leaves one
OWN_NAME = re.compile(r"(train|valid)_\d{6}\.(bin|mask|meta\.json)(\.tmp)?")


@dataclasses.dataclass
class Plan:
    folder: Path
    reader: Reader
    # A module's function. Each worker calls it with encoder_arguments; it returns a function from a batch of documents
    # to {split: (tokens as bytes, lengths, mask or b"")}.
    make_encoder: Callable
    encoder_arguments: tuple
    token_bytes: int
    shard_tokens: int
    meta: dict                  # in every sidecar
    signature: dict             # must be the same to continue an interrupted run; keys are names for messages
    valid_fraction: float
    masked: bool = False
    empty: str = "documents without text"
    max_documents: int = 0
    workers: int = 0
    overwrite: bool = False
    quiet: bool = False


def choose_workers(plan):
    sources = plan.reader.sources
    small = sum(source.bytes for source in sources) < INLINE_BYTES and all(s.kind != "dataset" for s in sources)
    return plan.workers or (1 if small else min(64, os.cpu_count() or 1))


def batches(reader, max_documents):
    """(documents, the reader's position after them, bytes read so far)."""
    if 0 < max_documents <= reader.documents:
        return
    batch, size = [], 0
    for document in reader:
        batch.append(document)
        size += len(document)
        last = reader.documents == max_documents
        if size >= BATCH_BYTES or last:
            yield batch, reader.position(), reader.done_bytes
            batch, size = [], 0
        if last:
            return
    if batch:
        yield batch, reader.position(), reader.done_bytes


def start_worker(parent, make_encoder, arguments):
    """Builds the encoder in a worker process, since the libraries' objects cannot be sent between processes."""
    end_with_parent(parent)
    work.encode = make_encoder(*arguments)


def work(documents):
    return work.encode(documents)


def encoded(plan, workers):
    """(result, position, bytes read) of every batch, in order."""
    all_batches = batches(plan.reader, plan.max_documents)
    if workers == 1:
        encode = plan.make_encoder(*plan.encoder_arguments)
        for documents, position, done_bytes in all_batches:
            yield encode(documents), position, done_bytes
        return
    with ProcessPoolExecutor(workers, initializer=start_worker,
                             initargs=(os.getpid(), plan.make_encoder, plan.encoder_arguments)) as pool:
        ahead = collections.deque()   # bounded, so that reading does not get too far ahead of writing

        def next_result():
            future, position, done_bytes = ahead.popleft()
            return future.result(), position, done_bytes
        try:
            for documents, position, done_bytes in all_batches:
                ahead.append((pool.submit(work, documents), position, done_bytes))
                if len(ahead) >= 4 * workers:
                    yield next_result()
            while ahead:
                yield next_result()
        except BrokenProcessPool:
            raise InputError("a worker process died: for lack of memory (lower --workers), or because the tokenizer's "
                             "library ended it (take the model's own tokenizer.json again)") from None
        finally:
            for future, *_ in ahead:
                future.cancel()


class StateFile:
    """Reads the state that an interrupted run has left ({} if none), and saves that of this run."""

    def __init__(self, plan):
        self.path, self.signature = plan.folder / STATE_NAME, plan.signature
        self.state = self._read(plan)
        self.saved = bool(self.state)
        self.next = time.monotonic() + CHECKPOINT_SECONDS

    def _read(self, plan):
        try:
            state = parse_json(self.path.read_text())
            was, now = state["signature"], json.loads(json.dumps(plan.signature))
            differs = [name for name in {**was, **now} if was.get(name) != now.get(name)]
            problem = f"that differs in {differs[0]}: repeat its command to continue it" if differs else ""
        except FileNotFoundError:
            return {}
        except (ValueError, LookupError, TypeError, AttributeError):
            problem = "whose state is not readable"
        if not problem:
            return state
        if not plan.overwrite:
            raise InputError(f"{plan.folder} holds an interrupted run {problem}, choose another --out, or pass "
                             "--overwrite")
        self.path.unlink()
        return {}

    def restore(self, writers, reader):
        """Puts writers and reader where the interrupted run was."""
        try:
            for split, writer in writers.items():
                writer.import_state(self.state["writers"][split])
            reader.start(self.state["position"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path}: is damaged ({one_line(error)}); remove it and pass --overwrite to begin "
                             "again") from None

    def save(self, writers, position, finished=False):
        state = {"signature": self.signature, "position": position, "finished": finished,
                 "writers": {split: writer.export_state() for split, writer in writers.items()}}
        with replacement(self.path) as temporary, open(temporary, "w") as file:
            json.dump(state, file)
        self.saved = True
        self.next = time.monotonic() + CHECKPOINT_SECONDS


def prepare_folder(folder, overwrite, keep_temporary):
    """Returns the shards in the folder that will be replaced."""
    for path in folder.iterdir():
        if STATE_IN_WORK.fullmatch(path.name):
            path.unlink()
    own = sorted(path for path in folder.iterdir() if OWN_NAME.fullmatch(path.name))
    old = [path for path in own if path.suffix != ".tmp"]
    if old and not overwrite:
        raise InputError(f"{folder} already has {old[0].name}; choose another --out, or pass --overwrite")
    for path in own:
        if path.suffix == ".tmp" and not keep_temporary:   # of a run that was killed before it had a state
            path.unlink()
    return old


def number_of(count, noun):
    return f"{count_text(count, noun)} that {'is' if count == 1 else 'are'}"


def skipped(plan):
    """One line per kind of what was left out."""
    reader = plan.reader
    if reader.skipped_files:
        path, what = reader.skipped_files[0]
        yield f"skipped {number_of(len(reader.skipped_files), 'file')} not text, the first is {path}: {what}"
    if reader.not_text:
        reasons = ", ".join(f"{count} with {why}" for why, count in sorted(reader.not_text.items()))
        count, places = sum(reader.not_text.values()), reader.not_text_places
        yield (f"skipped {number_of(count, 'document')} not text ({reasons})"
               f"{', the first ones are' if count > len(places) else ''}: {', '.join(places)}")
    if reader.empty:
        yield f"skipped {reader.empty} {plan.empty}"


def check_splits(writers, plan):
    if not any(writer.total_documents for writer in writers.values()):
        raise InputError(f"the inputs hold no text ({'; '.join(skipped(plan)) or 'they are empty'})")
    wanted = SPLITS if plan.valid_fraction > 0 else SPLITS[:1]
    for split in wanted:
        if not writers[split].total_documents:
            others = sum(writer.total_documents for writer in writers.values())
            raise InputError(f"none of the documents ({others}) falls into the {split} split with --valid-fraction "
                             f"{plan.valid_fraction}; change it, or lower --document-bytes (text files)")


def write_all(plan, writers, state):
    progress = Progress(sum(source.bytes for source in plan.reader.sources), plan.quiet)
    try:
        for result, position, done_bytes in encoded(plan, choose_workers(plan)):
            for split in SPLITS:
                writers[split].write(*result[split])
            progress.update(done_bytes, sum(len(result[split][1]) for split in SPLITS),
                            sum(sum(result[split][1]) for split in SPLITS))
            if time.monotonic() >= state.next:
                state.save(writers, position)
    finally:
        progress.close()
    check_splits(writers, plan)
    for writer in writers.values():
        writer.finish()


def make_files(plan, writers, state):
    """Writes all shards under temporary names. A failure leaves nothing, or a state from which a run can continue."""
    try:
        write_all(plan, writers, state)
        # Renaming all files is not atomic.
        state.save(writers, plan.reader.position(), finished=True)
    except BaseException as error:
        if not state.saved:
            for writer in writers.values():
                writer.discard()
        hint = "the same command continues from there"
        if state.saved and isinstance(error, InputError):
            raise InputError(f"{error}; {hint}") from None
        if state.saved and isinstance(error, KeyboardInterrupt):
            print(hint, file=sys.stderr)
        raise


def run(plan):
    """Writes the shards and returns the writers by split."""
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        with only_user_of(plan.folder) as alone:
            if not alone:
                raise InputError(f"--out {plan.folder}: another run is writing shards there: wait for its end, or "
                                 "name another folder")
            return run_alone(plan)
    except OSError as error:
        raise InputError(f"{error.filename or plan.folder}: cannot write: {error.strerror or error}") from None


def run_alone(plan):
    """run(), for a folder that no other run writes to."""
    writers = {}
    try:
        state = StateFile(plan)
        # A run that was interrupted while renaming its files has some final names already.
        finished = bool(state.state.get("finished"))
        old = prepare_folder(plan.folder, plan.overwrite or finished, state.saved)
        writers = {split: SplitWriter(plan.folder, split, plan.token_bytes, plan.shard_tokens, plan.meta, plan.masked)
                   for split in SPLITS}
        if state.saved:
            state.restore(writers, plan.reader)
            print(f"continuing after {count_text(plan.reader.documents, 'document')} of an interrupted run", flush=True)
        if not finished:
            make_files(plan, writers, state)
        new = {final for writer in writers.values() for _, final in writer.published}
        for writer in writers.values():
            writer.publish()
        for path in old:
            if path not in new:
                path.unlink()
        state.path.unlink(missing_ok=True)
    finally:
        for writer in writers.values():
            writer.close()
    return writers


def report(plan, writers):
    for line in skipped(plan):
        print(line)
    for split, writer in writers.items():
        parts = [f"{count_text(writer.total_tokens, 'token')} in {count_text(writer.total_documents, 'document')}"]
        parts += [f"{writer.total_counted} count as targets"] if plan.masked else []
        parts.append(count_text(writer.shards, "shard"))
        print(f"{split}: {', '.join(parts)}: {plan.folder}/{split}_*.bin (vocabulary {plan.meta['vocab_size']})")
