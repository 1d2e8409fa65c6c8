"""Reads token shards in every format of data/README.md, and writes llm.c's. Standard library only.

Counts and offsets have any size; only llm.c's header limits a shard to 2^31 - 1 tokens.
"""
import array
import base64
import bisect
import glob
import hashlib
import itertools
import json
import os
import struct
import weakref
from pathlib import Path

from .support import LFS_ADVICE, LFS_POINTER, InputError, no_follow, parse_json, read_bounded, require_regular

HEADER_BYTES = 1024
MAGIC_V1, MAGIC_V7 = 20240520, 20240801
MAX_SHARD_TOKENS = 2 ** 31 - 1
MAX_META_BYTES = 1 << 30   # about 100 million documents
# A last shard with fewer tokens is appended to the one before it, because the trainer refuses a shard that is shorter
# than one sample.
MIN_TAIL_TOKENS = 65536
TYPECODES = {2: "H", 4: "I"}
DTYPES = {2: "uint16", 4: "uint32"}
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Other files that could be taken for headerless tokens; llmc/data/shards.cpp has the same list.
FOREIGN = (
    (b"\x8a\xd8\x34\x01", "an llm.c evaluation file (HellaSwag, MMLU), not a token shard"),
    (b"BIN.TOK\n", "an llmq token file"), (b"LOSSMASK", "a loss mask; name the .bin beside it"),
    (MEGATRON_MAGIC, "a Megatron index; name its .bin instead"), (b"\x93NUMPY", "a NumPy array file"),
    (b"PAR1", "a parquet file; tokenise it with data/prepare_text.py"), (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"\x1f\x8b\x08", "a gzip file; unpack it, or if it holds text, tokenise it with data/prepare_text.py"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it, or if it holds text, tokenise it with data/prepare_text.py"),
    (LFS_POINTER, LFS_ADVICE),
    (b"%PDF-", "a PDF; pdftotext makes text of it, and data/prepare_text.py shards of the text"),
)
TEXT_BYTES = bytes([*range(9, 14), *range(32, 256)])
MEGATRON_WIDTHS = {4: 4, 8: 2}   # dtype code -> bytes: int32, uint16
# A loss mask: magic, version, tokens, tokens that count as targets; then one bit per token.
MASK_SUFFIX = ".mask"
NOT_SHARDS = (".idx", MASK_SUFFIX, ".meta.json")   # ignored matches of a pattern
META_TYPES = {"tokenizer": (dict, "an object"), "checksum": (dict, "an object"), "loss_mask": (dict, "an object"),
              "document_offsets": (list, "a list"), "vocab_size": (int, "a number")}
MASK_MAGIC, MASK_VERSION = b"LOSSMASK", 1
MASK_HEADER = struct.Struct("<8sQQQ")
assert array.array("H").itemsize == 2 and array.array("I").itemsize == 4


def meta_path(shard_path):
    return Path(str(shard_path).removesuffix(".bin") + ".meta.json")


def mask_path(shard_path):
    return Path(str(shard_path).removesuffix(".bin") + MASK_SUFFIX)


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksum_of(path):
    return {"algorithm": "sha256", "of": "the whole file", "value": file_sha256(path)}


def shard_paths(words):
    """Expands paths and patterns to files, as the trainer does. A mask, sidecar or index that
    is named (by a shell's DIR/*) stands for its shard, once."""
    paths, named = [], {word for word in words if word.endswith(".bin")}
    for word in words:
        if os.path.lexists(word) and word.endswith(NOT_SHARDS):
            shard = word[:-len(next(filter(word.endswith, NOT_SHARDS)))] + ".bin"
            found = [word] if not os.path.lexists(shard) else [] if shard in named else [shard]
            named.add(shard)
        elif os.path.lexists(word):
            found = [word]
        else:
            found = [path for path in sorted(glob.glob(word)) if not path.endswith(NOT_SHARDS)] or [word]
        paths += found
    return paths


class Tokens:
    """The ids of a shard as a sequence: an id, a slice as an array, or all of them in turn. They are read when they are
    asked for, not mapped: a mapping of a file that is cut ends the process with SIGBUS."""

    BLOCK = 1 << 20

    def __init__(self, shard):
        self.shard = shard

    def __len__(self):
        return self.shard.count

    def __getitem__(self, key):
        if not isinstance(key, slice):
            return self[key:key + 1][0]
        first, end, _ = key.indices(len(self))
        width = self.shard.token_bytes
        ids = array.array(TYPECODES[width])
        ids.frombytes(self.shard.read(self.shard.offset + first * width, max(0, end - first) * width))
        return ids

    def blocks(self):
        return (self[first:first + self.BLOCK] for first in range(0, len(self), self.BLOCK))

    def __iter__(self):
        return itertools.chain.from_iterable(self.blocks())


class Shard:
    """An open shard with its tokens."""

    def __init__(self, path, token_dtype=""):
        self.path = Path(path)
        self.documents = None   # only Megatron's index counts them
        try:
            require_regular(path)
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
            self.bytes = os.fstat(self.file).st_size
            head = self.read(0, min(4096, self.bytes))
        except OSError as error:
            raise InputError(f"{path}: cannot open: {error.strerror}") from None
        if not self.bytes:
            raise InputError(f"{path}: the file is empty")
        index = self.path.with_suffix(".idx") if self.path.suffix == ".bin" else None
        magic = struct.unpack_from("<I", head)[0] if self.bytes >= 4 else 0
        if index is not None and index.is_file():
            self._read_megatron(index)
        elif magic in (MAGIC_V1, MAGIC_V7):
            self._read_llmc(magic, head)
        elif (what := self._foreign(token_dtype, head)):
            raise InputError(f"{path}: byte 0: wrong magic: this is {what}")
        elif token_dtype:
            self.format, self.offset = "raw", 0
            self.token_bytes = {"uint16": 2, "uint32": 4}[token_dtype]
            if self.bytes % self.token_bytes:
                raise InputError(f"{path}: odd size: {self.bytes} bytes is not a multiple of {self.token_bytes}")
        else:
            raise InputError(f"{path}: byte 0: wrong magic 0x{magic:08x} (known: llm.c {MAGIC_V1} and "
                             f"{MAGIC_V7}, or a Megatron .idx beside it); if headerless (nanoGPT), pass "
                             "--token-dtype")
        self.count = (self.bytes - self.offset) // self.token_bytes
        self.tokens = Tokens(self)

    def read(self, offset, count):
        data = b""
        while len(data) < count:
            more = os.pread(self.file, count - len(data), offset + len(data))
            if not more:
                raise InputError(f"{self.path}: byte {offset + len(data)} is missing: the file had {self.bytes} bytes "
                                 f"when it was opened and has {os.fstat(self.file).st_size} now")
            data += more
        return data

    @staticmethod
    def _foreign(token_dtype, start):
        """What the file is if it is known not to be tokens, else ""."""
        for magic, what in FOREIGN:
            if start.startswith(magic):
                return what
        is_text = not start.translate(None, TEXT_BYTES)
        is_text = is_text and (not token_dtype or len(start) >= 256)   # few ids may look like it
        return "text; data/prepare_text.py makes shards of it" if is_text else ""

    def _read_llmc(self, magic, head):
        if self.bytes < HEADER_BYTES:
            raise InputError(f"{self.path}: truncated in the header: it ends at byte {self.bytes} of "
                             f"{HEADER_BYTES}")
        _, version, count = struct.unpack_from("<III", head)
        expected, self.token_bytes = {MAGIC_V1: (1, 2), MAGIC_V7: (7, 4)}[magic]
        self.format, self.offset = f"llm.c v{expected}", HEADER_BYTES
        if version != expected:
            raise InputError(f"{self.path}: byte 4: version {version}, expected {expected}")
        end = HEADER_BYTES + count * self.token_bytes
        if self.bytes != end:
            raise InputError(f"{self.path}: the header (byte 8) says {count} tokens, which end at {end}, "
                             f"but the file has {self.bytes} bytes")

    def _read_megatron(self, index_path):
        index = index_path.read_bytes()
        if len(index) < 34 or index[:9] != MEGATRON_MAGIC:
            raise InputError(f"{index_path}: byte 0: wrong magic or truncated, expected MMIDIDX (Megatron)")
        version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
        if version != 1 or code not in MEGATRON_WIDTHS:
            raise InputError(f"{index_path}: byte 9: version {version} and token type {code}; supported "
                             "are version 1 and types 4 (int32) and 8 (uint16)")
        if len(index) != 34 + 12 * sequences + 8 * documents:
            raise InputError(f"{index_path}: {sequences} sequences and {documents} document ends do not fill "
                             f"its {len(index)} bytes")
        self.format, self.offset, self.token_bytes = "Megatron", 0, MEGATRON_WIDTHS[code]
        self.documents = max(0, documents - 1)
        lengths = array.array("i", index[34:34 + 4 * sequences])
        total = sum(lengths)
        if total * self.token_bytes != self.bytes:
            raise InputError(f"{self.path}: the index says {total} tokens, the file has {self.bytes} bytes")

    def read_mask(self):
        """The number of tokens that count as targets, and 0 or 1 per token as bytes; (None, None) without a mask."""
        meta = self.read_meta().get("loss_mask") or {}
        path = mask_path(self.path)
        if not path.is_file():
            if meta:
                raise InputError(f"{path}: is missing, but the .meta.json names it")
            return None, None
        content = path.read_bytes()
        if len(content) < MASK_HEADER.size or content[:8] != MASK_MAGIC:
            raise InputError(f"{path}: byte 0: wrong magic or truncated, expected {MASK_MAGIC.decode()}")
        _, version, tokens, counted = MASK_HEADER.unpack_from(content)
        packed = content[MASK_HEADER.size:]
        if version != MASK_VERSION or tokens != self.count or len(packed) != (tokens + 7) // 8:
            raise InputError(f"{path}: version {version}, of {tokens} tokens, {len(content)} bytes; expected version "
                             f"{MASK_VERSION}, {self.count} tokens, {MASK_HEADER.size + (self.count + 7) // 8} bytes")
        if int.from_bytes(packed, "little") >> tokens:
            raise InputError(f"{path}: bits after the last token are set")
        flags = unpack_bits(packed, tokens)
        if sum(flags) != counted or meta.get("counted", counted) != counted:
            raise InputError(f"{path}: {sum(flags)} bits are set, its header says {counted}, the .meta.json "
                             f"{meta.get('counted')}")
        listed = (meta.get("checksum") or {}).get("value")
        if meta and listed != file_sha256(path):
            raise InputError(f"{path}: sha256 is {file_sha256(path)}, the .meta.json says {listed}")
        return counted, flags

    def read_meta(self):
        """The sidecar as a dictionary, {} without one."""
        if not meta_path(self.path).exists():
            return {}
        try:
            meta = parse_json(read_bounded(meta_path(self.path), MAX_META_BYTES, "the .meta.json of a shard"))
        except ValueError as error:
            raise InputError(f"{meta_path(self.path)}: not readable: {error}") from None
        if not isinstance(meta, dict):
            raise InputError(f"{meta_path(self.path)}: not a JSON object")
        for name, (kind, what) in META_TYPES.items():
            if not isinstance(meta.get(name), (kind, type(None))):
                raise InputError(f"{meta_path(self.path)}: {name} is {json.dumps(meta[name])[:40]}, not {what}")
        return meta


def pack_bits(flags):
    """Packs bytes 0 and 1 as bits, the first in the lowest bit of the first byte; zeros fill the last byte."""
    if not flags:
        return b""
    digits = flags[::-1].translate(bytes.maketrans(b"\0\1", b"01"))
    return int(digits, 2).to_bytes((len(flags) + 7) // 8, "little")


def unpack_bits(packed, count):
    digits = f"{int.from_bytes(packed, 'little'):0{count}b}"[::-1] if count else ""
    return digits.encode().translate(bytes.maketrans(b"01", b"\0\1"))


class SplitWriter:
    """Writes the documents of one split into shards of shard_tokens, as NAME_000000.bin.tmp, ...

    Tokens are cut at exactly shard_tokens, so a document may continue in the next shard; a remainder shorter than
    MIN_TAIL_TOKENS stays in the last shard. publish() gives files their final names. masked: each shard also gets a
    loss mask, NAME_000000.mask.
    """

    def __init__(self, folder, split, token_bytes, shard_tokens, meta, masked=False):
        self.folder, self.split, self.token_bytes = Path(folder), split, token_bytes
        self.capacity, self.masked = shard_tokens, masked
        self.tail = min(MIN_TAIL_TOKENS, shard_tokens)
        self.meta = meta               # fields of every sidecar of the split
        self.pending = bytearray()     # tokens not written yet
        self.mask = bytearray()        # 0 or 1 for each token from the open shard's first on, pending ones included
        self.starts = []               # places of document starts in the split, from the open shard on
        self.total_tokens = self.total_documents = self.total_counted = 0
        self.first = 0                 # place in the split of the open shard's first token
        self.written = 0               # tokens in the open shard
        self.file = None
        self.shards = 0                # closed ones
        self.published = []            # (temporary path, final path), sidecars included

    def write(self, tokens, lengths, mask=b""):
        """tokens: bytes of whole documents; lengths: tokens per document; mask: one byte per token."""
        for length in lengths:
            self.starts.append(self.total_tokens)
            self.total_tokens += length
        self.total_documents += len(lengths)
        self.total_counted += sum(mask)
        self.pending += tokens
        self.mask += mask
        while self.pending:
            room = self.capacity - self.written
            if room > 0:
                self._write_pending(room)
            elif len(self.pending) >= self.tail * self.token_bytes:
                self._close_shard()
            else:
                break

    def finish(self):
        if self.pending:
            self._write_pending(len(self.pending) // self.token_bytes)
        if self.file is not None:
            self._close_shard()

    def _paths(self, suffix):
        """Temporary and final path of a file of the open shard."""
        final = self.folder / f"{self.split}_{self.shards:06d}{suffix}"
        return Path(f"{final}.tmp"), final

    def _write_pending(self, limit):
        if self.file is None:
            self.file = self._new_file(self._paths(".bin")[0])
            self.file.write(bytes(HEADER_BYTES))
        count = min(limit, len(self.pending) // self.token_bytes)
        self.file.write(self.pending[:count * self.token_bytes])
        del self.pending[:count * self.token_bytes]
        self.written += count

    def _close_shard(self):
        magic, version = (MAGIC_V1, 1) if self.token_bytes == 2 else (MAGIC_V7, 7)
        self.file.seek(0)
        self.file.write(struct.pack("<III", magic, version, self.written))
        self._sync_and_close(self.file)
        self.file = None
        inside = bisect.bisect_left(self.starts, self.first + self.written)
        offsets = [start - self.first for start in self.starts[:inside]]
        del self.starts[:inside]
        meta = {"format": f"llm.c v{version}", "split": self.split, "dtype": DTYPES[self.token_bytes],
                "tokens": self.written, **self.meta, "documents": len(offsets),
                "checksum": checksum_of(self._paths(".bin")[0])}
        if self.masked:
            meta["loss_mask"] = self._write_mask()
        # All offsets are on one line, because a file of a million lines is hard to read.
        text = json.dumps(meta, indent=1)[:-2] + ',\n "document_offsets": ' + json.dumps(offsets) + "\n}\n"
        with self._new_file(self._paths(".meta.json")[0]) as file:
            file.write(text.encode())
            self._sync_and_close(file)
        self._shard_is_closed()
        self.first += self.written
        self.written = 0

    def _write_mask(self):
        """Writes the mask of the open shard; returns the sidecar's entry."""
        flags = self.mask[:self.written]
        del self.mask[:self.written]
        temporary, final = self._paths(MASK_SUFFIX)
        with self._new_file(temporary) as file:
            file.write(MASK_HEADER.pack(MASK_MAGIC, MASK_VERSION, len(flags), sum(flags)) + pack_bits(flags))
            self._sync_and_close(file)
        return {"file": final.name, "counted": sum(flags), "checksum": checksum_of(temporary)}

    def _shard_is_closed(self):
        for suffix in (".bin", ".meta.json") + ((MASK_SUFFIX,) if self.masked else ()):
            self.published.append(self._paths(suffix))
        self.shards += 1

    @staticmethod
    def _new_file(path):
        """Temporary names are fixed, since an interrupted run finds its files by them. Anything at this path, even a
        link, is removed and never followed."""
        path.unlink(missing_ok=True)
        return open(path, "xb", opener=no_follow)

    @staticmethod
    def _sync_and_close(file):
        file.flush()
        os.fsync(file.fileno())
        file.close()

    # The state of an interrupted run; a writer with the same arguments can continue from it.

    def export_state(self):
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
        state = {name: getattr(self, name) for name in self.COUNTERS}
        return {**state, "shards": self.shards, "open": self.file is not None,
                "pending": base64.b64encode(self.pending).decode(),
                "mask": base64.b64encode(pack_bits(self.mask)).decode(), "mask_tokens": len(self.mask)}

    COUNTERS = ("starts", "total_tokens", "total_documents", "total_counted", "first", "written")

    def import_state(self, state):
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        self.pending = bytearray(base64.b64decode(state["pending"]))
        self.mask = bytearray(unpack_bits(base64.b64decode(state["mask"]), state["mask_tokens"]))
        for _ in range(state["shards"]):
            self._shard_is_closed()
        for temporary, final in self.published:
            if not temporary.is_file() and not final.is_file():
                raise InputError(f"{temporary} of the interrupted run is gone; remove {self.folder} to start over")
        if not state["open"]:
            return
        temporary, _ = self._paths(".bin")
        end = HEADER_BYTES + self.written * self.token_bytes
        if temporary.is_symlink() or not temporary.is_file() or temporary.stat().st_size < end:
            raise InputError(f"{temporary} of the interrupted run is gone or short; remove {self.folder} to start over")
        self.file = open(temporary, "r+b", opener=no_follow)
        self.file.truncate(end)
        self.file.seek(end)

    def publish(self):
        for temporary, final in self.published:
            if temporary.exists() or not final.exists():   # a run interrupted just here has renamed some
                os.replace(temporary, final)

    def close(self):
        if self.file is not None:
            self.file.close()

    def discard(self):
        """Removes what was not published."""
        self.close()
        for suffix in (".bin", ".meta.json", MASK_SUFFIX):
            self._paths(suffix)[0].unlink(missing_ok=True)
        for temporary, _ in self.published:
            temporary.unlink(missing_ok=True)
