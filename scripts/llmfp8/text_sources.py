"""Reads documents, as UTF-8 bytes, from text, JSON lines and parquet files, folders and Hugging Face datasets."""
import codecs
import gzip
import io
import itertools
import os
import zlib
from pathlib import Path

from .support import LFS_ADVICE, LFS_POINTER, InputError, need, one_line, parse_json, refuse_lfs_pointer

# Names of data sets: where they are on the Hugging Face hub, and the default of --dataset-config.
ALIASES = {"openwebtext": ("Skylion007/openwebtext", ""), "slimpajama": ("cerebras/SlimPajama-627B", ""),
           "slimpajama-6b": ("DKYoon/SlimPajama-6B", ""), "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
           "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
           "ultrachat_200k": ("HuggingFaceH4/ultrachat_200k", "")}
COMPRESSED = {".gz", ".zst"}
JSON_LINES = {".jsonl", ".ndjson"}
PARQUET_REVISION = "refs/convert/parquet"
NOT_UTF8 = "bytes that are not UTF-8"
NAMED = 5   # documents that are not text whose places a report names, at most
# Beginnings of files that are not text: what they are and what to do.
NOT_TEXT = (
    (LFS_POINTER, LFS_ADVICE), (b"%PDF-", "a PDF; pdftotext makes text of it"),
    (b"PAR1", "a parquet file; its name must end in .parquet (or --format parquet)"),
    (b"PK\x03\x04", "a zip archive or an office document; unpack it, or save it as text"),
    (b"\x1f\x8b", "a gzip file; its name must end in .gz"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; its name must end in .zst"),
    (b"\xff\xfe", "UTF-16; iconv -f UTF-16 -t UTF-8 makes UTF-8 of it"),
    (b"\xfe\xff", "UTF-16; iconv -f UTF-16 -t UTF-8 makes UTF-8 of it"),
)
JSON_ARRAY = "a JSON array; one document per line is read: jq -c '.[]' FILE > FILE.jsonl"


class NotText(Exception):
    """A document that is not text: what it has, and at which byte."""

    def __init__(self, why, byte=0):
        super().__init__(why)
        self.why, self.byte = why, byte


def check_utf8(document):
    """The one rule of the data tools for what is text: UTF-8 without zero bytes. Returns the document."""
    try:
        if not document.isascii():
            document.decode()
    except UnicodeDecodeError as error:
        raise NotText(NOT_UTF8, error.start) from None
    return without_zeros(document)


def without_zeros(document):
    if b"\0" in document:
        raise NotText("zero bytes", document.index(b"\0"))
    return document


def utf8_of(text):
    """A string as UTF-8 by the same rule; JSON may hold half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        return without_zeros(text.encode())
    except UnicodeEncodeError:
        raise NotText("half of a surrogate pair") from None


def text_of(text):
    if text is None:
        return b""
    if not isinstance(text, str):
        raise InputError(f"{type(text).__name__}, not text")
    return utf8_of(text)


def field_text(row, field):
    try:
        return text_of(row[field])
    except InputError as error:
        raise InputError(f"field '{field}' is {error}") from None


def what_it_is(start, json_array):
    """What a file with this beginning is if it is not text, else ""."""
    known = next((what for magic, what in NOT_TEXT if start.startswith(magic)), "")
    if known or b"\0" in start:
        return known or f"not text (byte {start.index(0)} is zero)"
    return JSON_ARRAY if json_array and start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else ""


class ZstdStream(io.RawIOBase):
    """The bytes of all frames of a zstd file; one that ends inside of a frame is an EOFError, as with gzip. (The
    package's own stream ends there without a word.)"""

    def __init__(self, raw, zstandard):
        super().__init__()
        self.raw, self.decompressor = raw, zstandard.ZstdDecompressor(max_window_size=2 ** 31)
        self.frame, self.compressed, self.text = None, b"", memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.text:
            self.compressed = self.compressed or self.raw.read(1 << 16)
            if not self.compressed:
                if self.frame is not None:
                    raise EOFError
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            self.text = memoryview(self.frame.decompress(self.compressed))
            self.compressed = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count


class Source:
    """One input: a file of a kind, or a dataset's name. explicit: named on the command line, not found in a folder.
    array: a JSON array is refused as such. config: of a dataset. bytes: its size on disk, 0 for a dataset."""

    def __init__(self, kind, path, explicit, array=False, config=""):
        self.kind, self.path, self.explicit, self.array, self.config = kind, path, explicit, array, config
        self.bytes = 0 if kind == "dataset" else os.path.getsize(path)

    def identity(self):
        """Values that change when the input does."""
        changed = 0 if self.kind == "dataset" else os.stat(self.path).st_mtime_ns
        return [self.kind, self.path, self.bytes, changed, self.config]


def kind_of(path):
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
    last = suffixes[-1].lower() if suffixes else ""
    return "jsonl" if last in JSON_LINES else "parquet" if last == ".parquet" else "text"


def file_source(path, kind, explicit):
    found = kind_of(path) if kind == "auto" else kind
    named_json = Path(path.removesuffix(".gz").removesuffix(".zst")).suffix.lower() == ".json"
    return Source(found, path, explicit, found == "jsonl" or kind == "auto" and named_json)


def refuse_folder(error):
    raise InputError(f"{error.filename}: cannot read: {error.strerror or error}") from None


def find_sources(inputs, kind="auto"):
    """Files in a fixed order: inputs as given, files of a folder by name, without hidden ones."""
    sources = []
    for name in inputs:
        if os.path.isdir(name):
            for folder, folders, files in os.walk(name, onerror=refuse_folder):
                folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
                for file in sorted(files):
                    path = os.path.join(folder, file)
                    if not file.startswith(".") and os.path.isfile(path):
                        sources.append(file_source(path, kind, False))
        elif os.path.isfile(name):
            sources.append(file_source(name, kind, True))
        elif name in ALIASES:
            path, config = ALIASES[name]
            sources.append(Source("dataset", path, True, config=config))
        elif name.startswith("hf:"):
            sources.append(Source("dataset", name[3:], True))
        else:
            raise InputError(f"{name}: no such file or folder; a Hugging Face dataset is hf:OWNER/NAME, or one of "
                             f"{', '.join(ALIASES)}")
    return sources


class Reader:
    """Iterates over the documents of all sources; done_bytes of them have been read."""

    def __init__(self, sources, field="text", document_bytes=8192, dataset_config="", dataset_split="train",
                 convert=field_text):
        self.sources, self.field, self.columns, self.document_bytes = sources, field, [field], document_bytes
        self.dataset_config, self.dataset_split = dataset_config, dataset_split
        self.field_option = "--text-field"
        self.convert = convert    # makes bytes of a document from (row, field); InputError if it cannot
        self.done_bytes = 0
        self.skipped_files = []   # [path, what it is] of files in a folder that are not text
        self.empty = 0            # documents without text
        self.not_text = {}        # why: number of documents that are not text
        self.not_text_places = []   # of the first NAMED
        self.documents = 0        # documents with text
        self.source = self.record = 0   # index of the open source, and the number of its documents that were read
        self.rows = self.rows_state = None   # the dataset that is being read, and the state in which it begins

    def position(self):
        """The position in the inputs, for start() of another Reader of the same inputs."""
        return {"source": self.source, "record": self.record, "documents": self.documents, "empty": self.empty,
                "skipped_files": self.skipped_files[:], "not_text": dict(self.not_text),
                "not_text_places": self.not_text_places[:],
                "rows": self.rows.state_dict() if hasattr(self.rows, "state_dict") else None}

    def start(self, position):
        self.source, self.record, self.documents = position["source"], position["record"], position["documents"]
        self.empty, self.skipped_files = position["empty"], position["skipped_files"][:]
        self.not_text, self.not_text_places = dict(position["not_text"]), position["not_text_places"][:]
        self.rows_state = position["rows"]

    def __iter__(self):
        finished = sum(source.bytes for source in self.sources[:self.source])
        while self.source < len(self.sources):
            source = self.sources[self.source]
            read = {"text": self._text, "jsonl": self._json_lines, "parquet": self._parquet,
                    "dataset": self._dataset}[source.kind]
            for document, place in read(source, self.record):
                self.done_bytes = finished + place
                self.record += 1
                if isinstance(document, NotText):
                    self.not_text[document.why] = self.not_text.get(document.why, 0) + 1
                    if len(self.not_text_places) < NAMED:
                        self.not_text_places.append(f"{document.place}: {document.why}")
                elif document:
                    self.documents += 1
                    yield document
                else:
                    self.empty += 1
            finished += source.bytes
            self.done_bytes = finished
            self.source += 1
            self.record, self.rows = 0, None

    def _open(self, path, raw):
        """A peekable stream of the decompressed bytes of an open file."""
        if path.endswith(".gz"):
            return gzip.GzipFile(fileobj=raw)
        if path.endswith(".zst"):
            zstandard = need("zstandard", "zstandard", path)
            return io.BufferedReader(ZstdStream(raw, zstandard), 1 << 20)
        return raw

    def _stream(self, source, pieces):
        """Yields the documents of pieces(stream) with their places in the file, which errors name."""
        try:
            with open(source.path, "rb") as raw:
                stream = self._open(source.path, raw)
                what = what_it_is(stream.peek(4096)[:4096], source.array)
                if what and (source.explicit or source.kind == "jsonl"):
                    raise InputError(f"{source.path}: this is {what}")
                if what:
                    self.skipped_files.append([source.path, what])
                    return
                for document in pieces(stream):
                    yield document, raw.tell()
        except OSError as error:
            raise InputError(f"{source.path}: cannot read: {error.strerror or error}") from None
        except EOFError:
            raise InputError(f"{source.path}: the compressed file is truncated") from None
        except zlib.error as error:
            raise InputError(f"{source.path}: {error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":   # of a package that may be absent
                raise
            raise InputError(f"{source.path}: {error}") from None

    def _text(self, source, skip):
        def pieces(stream):
            begin = len(stream.read(3)) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0
            while True:
                piece = stream.read(self.document_bytes or -1)
                if not piece:
                    return
                if self.document_bytes:
                    # Continues to the end of the line; a very long line is cut between characters.
                    piece += stream.readline(self.document_bytes)
                    while stream.peek(1)[:1] and 0x80 <= stream.peek(1)[0] < 0xc0:
                        piece += stream.read(1)
                yield self._checked(check_utf8, piece, lambda byte: f"{source.path}: byte {begin + byte}")
                begin += len(piece)
        return itertools.islice(self._stream(source, pieces), skip, None)

    def _json_lines(self, source, skip):
        def pieces(stream):
            records = end = 0
            for number, line in enumerate(stream, 1):
                begin, end = end, end + len(line)
                if not line.strip():
                    continue
                records += 1
                if records <= skip:
                    continue
                where = f"{source.path}: line {number}"
                try:
                    row = parse_json(line)
                except ValueError as error:   # also bytes that are not UTF-8, and zero bytes
                    damage = self._checked(check_utf8, line, lambda byte: f"{where} (byte {begin + byte})")
                    if not isinstance(damage, NotText):
                        raise InputError(f"{where}: not JSON: {error}") from None
                    yield damage
                    continue
                yield self._field_of(row, where, begin)
        return self._stream(source, pieces)

    @staticmethod
    def _checked(check, document, place):
        """Returns check(document), or the NotText that it raises, with its place(byte)."""
        try:
            return check(document)
        except NotText as error:
            error.place = place(error.byte)
            return error

    def _field_of(self, row, where, begin=None):
        """The document of a row; begin: the byte at which the row begins in its file."""
        if not isinstance(row, dict) or self.field not in row:
            names = ", ".join(sorted(map(str, row))[:20]) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{where}: no field '{self.field}' (there is: {names}); pass {self.field_option}")
        place = where if begin is None else f"{where} (from byte {begin})"
        try:
            return self._checked(lambda row: self.convert(row, self.field), row, lambda _: place)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def _parquet(self, source, skip):
        refuse_lfs_pointer(source.path)
        parquet = need("pyarrow.parquet", "pyarrow", source.path)
        arrow = need("pyarrow", "pyarrow", source.path)
        try:
            with parquet.ParquetFile(source.path) as file:
                if self.field not in file.schema_arrow.names:
                    raise InputError(f"{source.path}: no column '{self.field}' (there is: "
                                     f"{', '.join(file.schema_arrow.names)}); pass {self.field_option}")
                rows, total = 0, max(1, file.metadata.num_rows)
                groups = list(range(file.metadata.num_row_groups))
                while groups and rows + file.metadata.row_group(groups[0]).num_rows <= skip:
                    rows += file.metadata.row_group(groups.pop(0)).num_rows
                for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=self.columns):
                    for values in zip(*batch.columns):
                        rows += 1
                        if rows <= skip:
                            continue
                        document = self._checked(self._python_values, values, lambda _: f"{source.path}: row {rows}")
                        if not isinstance(document, NotText):
                            document = self._field_of(dict(zip(batch.schema.names, document)),
                                                      f"{source.path}: row {rows}")
                        yield document, source.bytes * rows // total
        except (arrow.ArrowException, OSError) as error:
            raise InputError(f"{source.path}: not a readable parquet file: {one_line(error)}") from None

    @staticmethod
    def _python_values(values):
        try:
            return [value.as_py() for value in values]
        except UnicodeDecodeError:
            raise NotText(NOT_UTF8) from None

    def _dataset(self, source, skip):
        """Streams the dataset, without storing it."""
        datasets = need("datasets", "datasets", f"the dataset {source.path}")
        arguments = {"split": self.dataset_split, "streaming": True}
        if self.dataset_config or source.config:
            arguments["name"] = self.dataset_config or source.config
        try:
            try:
                rows = datasets.load_dataset(source.path, **arguments)
            except RuntimeError as error:
                # For datasets that are a script, the hub keeps a parquet copy on another branch.
                if "scripts are no longer supported" not in str(error):
                    raise
                rows = datasets.load_dataset(source.path, revision=PARQUET_REVISION, **arguments)
            if skip and self.rows_state is not None:
                rows.load_state_dict(self.rows_state)   # does not fetch again what was read
            elif skip:
                rows = rows.skip(skip)
            self.rows, self.rows_state = rows, None
            for number, row in enumerate(rows, skip + 1):
                yield self._field_of(row, f"{source.path}: row {number}"), 0
        except InputError:
            raise
        except Exception as error:   # network, access and naming errors of many types
            raise InputError(f"dataset {source.path}: {one_line(error)}; files of it that are here already may be "
                             "named instead") from None
