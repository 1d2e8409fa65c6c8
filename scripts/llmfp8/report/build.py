"""Writes the page of runs and their CSV files."""
import os
import re
import sys

from ..run_export import write_csv
from ..support import InputError, parse_json, replacement, require_regular
from .document import TYPES, document
from .page import report

MOST_OF_A_DOCUMENT = 64 << 20   # bytes


def read(run):
    """Reads what is new; returns whether there was any."""
    try:
        return run.poll()
    except OSError as error:
        raise InputError(f"{run.path}: {error.strerror}") from None


def csv_paths(runs, out):
    """A file for each run; names that are equal or no file names get a number."""
    if len(runs) == 1:
        return [out.with_suffix(".csv")]
    names = [re.sub(r"[^\w.-]", "_", run.name)[:80] for run in runs]
    names = [name if names.count(name) == 1 else f"{name}.{i + 1}" for i, name in enumerate(names)]
    return [out.with_suffix(f".{name}.csv") for name in names]


def document_in(path):
    """The JSON object of plan, doctor or bench in a file, or on standard input ("-"); None if the file has none."""
    if path == "-":
        data = sys.stdin.buffer.read(MOST_OF_A_DOCUMENT)
    else:
        if os.path.isdir(path) or not os.path.exists(path):
            return None
        require_regular(path)
        with open(path, "rb") as file:
            data = file.read(4096)
            if b'"type":"header"' in data[:200].replace(b" ", b"") or not data.lstrip().startswith(b"{"):
                return None
            data += file.read(MOST_OF_A_DOCUMENT)
    try:
        found = parse_json(data)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.get("type") in TYPES:
        return found
    if path == "-":
        raise InputError("standard input: not what plan --json, doctor --json or bench --json prints")
    return None


def write_document(data, out):
    with replacement(out) as temporary:
        temporary.write_text(document(data), encoding="utf-8", errors="replace")


def write(runs, out, benches=()):
    """The page, and a CSV of each run beside it."""
    for run, path in zip(runs, csv_paths(runs, out)):
        with replacement(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            write_csv(run, file)
    with replacement(out) as temporary:
        temporary.write_text(report(runs, benches), encoding="utf-8", errors="replace")
