"""Writes the page of runs and their CSV files."""
import re

from ..run_export import write_csv
from ..support import InputError, replacement
from .page import report


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


def write(runs, out):
    """The page, and a CSV of each run beside it."""
    for run, path in zip(runs, csv_paths(runs, out)):
        with replacement(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            write_csv(run, file)
    with replacement(out) as temporary:
        temporary.write_text(report(runs), encoding="utf-8", errors="replace")
