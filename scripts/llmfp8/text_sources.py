"""Reads documents, as UTF-8 bytes, from text, JSON lines and parquet files, folders and Hugging Face datasets."""
import gzip
import io
import itertools
import json
import os
import zlib
from pathlib import Path

from .support import InputError, need, one_line

ALIASES = {"openwebtext": "Skylion007/openwebtext", "slimpajama": "cerebras/SlimPajama-627B",
           "ultrachat_200k": "HuggingFaceH4/ultrachat_200k"}
COMPRESSED = {".gz", ".zst"}
JSON_LINES = {".jsonl", ".ndjson"}
PARQUET_REVISION = "refs/convert/parquet"


def text_of(text):
    if text is None:
        return b""
    if not isinstance(text, str):
        raise InputError(f"{type(text).__name__}, not text")
    # JSON may hold half of a surrogate pair, which UTF-8 cannot encode.
    return text.encode("utf-8", "replace")


class Source:
    """One input: a file of a kind, or a dataset's name. bytes: its size on disk, 0 for a dataset."""

    def __init__(self, kind, path, explicit):
        self.kind, self.path, self.explicit = kind, path, explicit
        self.bytes = 0 if kind == "dataset" else os.path.getsize(path)

    def identity(self):
        """Values that change when the input does."""
        changed = 0 if self.kind == "dataset" else os.stat(self.path).st_mtime_ns
        return [self.kind, self.path, self.bytes, changed]


def kind_of(path):
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
    last = suffixes[-1].lower() if suffixes else ""
    return "jsonl" if last in JSON_LINES else "parquet" if last == ".parquet" else "text"


def find_sources(inputs, kind="auto"):
    """Files in a fixed order: inputs as given, files of a folder by name, without hidden ones."""
    sources = []
    for name in inputs:
        if os.path.isdir(name):
            for folder, folders, files in os.walk(name):
                folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
                for file in sorted(files):
                    path = os.path.join(folder, file)
                    if not file.startswith(".") and os.path.isfile(path):
                        sources.append(Source(kind_of(path) if kind == "auto" else kind, path, False))
        elif os.path.isfile(name):
            sources.append(Source(kind_of(name) if kind == "auto" else kind, name, True))
        elif name in ALIASES:
            sources.append(Source("dataset", ALIASES[name], True))
        elif name.startswith("hf:"):
            sources.append(Source("dataset", name[3:], True))
        else:
            raise InputError(f"{name}: no such file or folder; a Hugging Face dataset is written "
                             f"hf:OWNER/NAME, {' or '.join(ALIASES)}")
    return sources


class Reader:
    """Iterates over the documents of all sources; done_bytes of them have been read."""

    def __init__(self, sources, field="text", document_bytes=8192, dataset_config="", dataset_split="train",
                 convert=text_of):
        self.sources, self.field, self.document_bytes = sources, field, document_bytes
        self.dataset_config, self.dataset_split = dataset_config, dataset_split
        self.field_option = "--text-field"
        self.convert = convert    # converts the field's value to bytes of a document; InputError if it cannot
        self.done_bytes = 0
        self.skipped_files = []   # binary files in a folder
        self.empty = 0            # documents without text
        self.documents = 0        # documents with text
        self.source = self.record = 0   # index of the open source, and the number of its documents that were read
        self.rows = self.rows_state = None   # the dataset that is being read, and the state in which it begins

    def position(self):
        """The position in the inputs, for start() of another Reader of the same inputs."""
        return {"source": self.source, "record": self.record, "documents": self.documents, "empty": self.empty,
                "skipped_files": self.skipped_files[:],
                "rows": self.rows.state_dict() if hasattr(self.rows, "state_dict") else None}

    def start(self, position):
        self.source, self.record, self.documents = position["source"], position["record"], position["documents"]
        self.empty, self.skipped_files = position["empty"], position["skipped_files"][:]
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
                if document:
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
            decompressor = zstandard.ZstdDecompressor(max_window_size=2 ** 31)
            return io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True), 1 << 20)
        return raw

    def _stream(self, source, pieces):
        """Yields the documents of pieces(stream) with their places in the file, which errors name."""
        try:
            with open(source.path, "rb") as raw:
                stream = self._open(source.path, raw)
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
            if b"\0" in stream.peek(4096)[:4096]:
                if source.explicit:
                    raise InputError(f"{source.path}: not a text file: it has zero bytes")
                self.skipped_files.append(source.path)
                return
            while True:
                piece = stream.read(self.document_bytes or -1)
                if not piece:
                    return
                if self.document_bytes:
                    # Continues to the end of the line; a very long line is cut between characters.
                    piece += stream.readline(self.document_bytes)
                    while stream.peek(1)[:1] and 0x80 <= stream.peek(1)[0] < 0xc0:
                        piece += stream.read(1)
                yield piece
        return itertools.islice(self._stream(source, pieces), skip, None)

    def _json_lines(self, source, skip):
        def pieces(stream):
            records = 0
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                records += 1
                if records <= skip:
                    continue
                where = f"{source.path}: line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:   # also bytes that are not UTF-8
                    raise InputError(f"{where}: not JSON: {error}") from None
                yield self._field_of(row, where)
        return self._stream(source, pieces)

    def _field_of(self, row, where):
        if not isinstance(row, dict) or self.field not in row:
            names = ", ".join(sorted(map(str, row))[:20]) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{where}: no field '{self.field}' (there is: {names}); pass {self.field_option}")
        try:
            return self.convert(row[self.field])
        except InputError as error:
            raise InputError(f"{where}: field '{self.field}' is {error}") from None

    def _parquet(self, source, skip):
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
                for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[self.field]):
                    for text in batch.column(0).to_pylist():
                        rows += 1
                        if rows <= skip:
                            continue
                        yield (self._field_of({self.field: text}, f"{source.path}: row {rows}"),
                               source.bytes * rows // total)
        except (arrow.ArrowException, OSError) as error:
            raise InputError(f"{source.path}: not a readable parquet file: {one_line(error)}") from None

    def _dataset(self, source, skip):
        """Streams the dataset, without storing it."""
        datasets = need("datasets", "datasets", f"the dataset {source.path}")
        arguments = {"split": self.dataset_split, "streaming": True}
        if self.dataset_config:
            arguments["name"] = self.dataset_config
        try:
            try:
                rows = datasets.load_dataset(source.path, **arguments)
            except RuntimeError as error:
                # The hub keeps a parquet copy of datasets that are a script, on another branch.
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
            raise InputError(f"dataset {source.path}: {one_line(error)}") from None
