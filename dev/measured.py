#!/usr/bin/env python3
"""Writes the measured numbers into the documents, and draws their pictures, from the rows of dev/measure.sh.

    dev/measured.py            writes each block and picture whose rows are there
    dev/measured.py --check    says which ones differ from their data

A block is what is between <!-- measured: NAME --> and <!-- end --> in README.md, scripts/README.md, docs/measured.md or
docs/guides.md; measured_blocks.py has a function for each. The rows are those of the version of llmc/ that was measured
last, of all folders of dev/results that have its rows, so that all numbers are of one version. While a block's rows are
not all there, it keeps its text: that of the folders which its first line names, and it is checked against these, or
one that says of which commit it is. Standard library only.
"""
import re
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.support import InputError, run_main  # noqa: E402

from measure import card_of, read_csv, read_rows  # noqa: E402
from measured_blocks import BLOCKS, PICTURES, Missing  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "scripts/README.md", "docs/measured.md", "docs/guides.md")
BLOCK = re.compile(r"<!-- measured: ([\w-]+)((?: of [\w.-]+)*) -->(.*?)<!-- end -->", re.S)
DATED = re.compile(r"commits?\s[0-9a-f]{7}|Not measured yet")   # in a text without rows


class Rows:
    """The measured rows of some folders, by machine (h200-x4), table and name. `used` has the folders of those that
    were asked for. The table "peers" is from peers.csv beside rows.csv, what the drivers of dev/peers printed there:
    rows TRAINER VERSION: PRECISION."""

    def __init__(self, folders, published, up="", text=""):
        """published: rows of dev/peers/published.csv; up: from a document to the root; text: of a block so far."""
        self.found, self.used, self.published, self.up, self.text = {}, {}, published, up, text
        for folder in folders:
            rows = read_rows(folder)
            if not rows:
                raise InputError(f"{folder}: a document names it, and it has no rows.csv")
            machine = f"{card_of(rows[0]['gpu'])}-x{rows[0]['gpus']}"
            for row in rows:
                if not row["failed"]:
                    self.found[machine, row["table"], row["row"]] = folder, row
            for row in read_csv(folder / "peers.csv"):
                if row["trainer"] == "trainer":   # the columns, once more
                    continue
                if row["gpu"] != rows[0]["gpu"]:
                    raise InputError(f"{folder}/peers.csv: measured on {row['gpu']}, rows.csv on {rows[0]['gpu']}")
                name = f"{row['trainer']} {row['version']}: {row['precision']}"
                self.found[machine, "peers", name] = folder, row

    def row(self, machine, table, name):
        if (machine, table, name) not in self.found:
            raise Missing(f"{machine} {table} {name}")
        folder, row = self.found[machine, table, name]
        self.used[machine, table, name] = folder
        return row

    def names(self, machine, table):
        """The rows of a table; a table without any is missing."""
        found = [name for where, its, name in self.found if (where, its) == (machine, table)]
        if not found:
            raise Missing(f"{machine} {table}")
        return found

    def folder(self, machine, table):
        """The name of the folder that has a table."""
        return self.found[machine, table, self.names(machine, table)[0]][0].name


def newest(root):
    """The folders with rows of the version of llmc/ that was measured last."""
    found = {}
    for path in sorted((root / "dev" / "results").glob("*/rows.csv")):
        rows = read_rows(path.parent)
        trees = {row["llmc_tree"] for row in rows}
        if len(trees) != 1:
            raise InputError(f"{path}: rows of {len(trees)} versions of llmc/: one folder has rows of one")
        found[path.parent] = max(int(row["unix_time"]) for row in rows), trees.pop()
    last = max(found.values(), default=(0, ""))[1]
    return [folder for folder, (_, tree) in found.items() if tree == last]


class Documents:
    """What documents and pictures should be: `wanted` by path; `kept` are the blocks that keep their text."""

    def __init__(self, root):
        self.root, self.newest = root, newest(root)
        self.published = read_csv(root / "dev" / "peers" / "published.csv")
        self.wanted, self.kept, self.seen = {}, [], []
        for name in DOCUMENTS:
            self.document = name
            text = (root / name).read_text(encoding="utf-8")
            self.wanted[name] = BLOCK.sub(self.block, text)
            if text.count("<!-- measured:") != len(BLOCK.findall(text)):
                raise InputError(f"{name}: a block without its end, or a first line that is none")
        if sorted(self.seen) != sorted(BLOCKS):
            raise InputError(f"blocks of the documents: {sorted(self.seen)}, of measured_blocks.py: {sorted(BLOCKS)}")

    def rendered(self, name, folders, text):
        """The block from the rows of these folders, and the rows that it has."""
        rows = Rows(folders, self.published, "../" * self.document.count("/"), text)
        text = BLOCKS[name](rows)
        if name == "pictures":
            self.wanted.update((path, draw(rows)) for path, (draw, _) in PICTURES.items())
        of = "".join(f" of {folder}" for folder in sorted({folder.name for folder in rows.used.values()}))
        return f"<!-- measured: {name}{of} -->{text}<!-- end -->", rows.used

    def block(self, match):
        name, of, text = match.groups()
        self.seen.append(name)
        if name not in BLOCKS:
            raise InputError(f"{self.document}: {name}: no block of measured_blocks.py")
        before, had = self.rendered(name, [self.root / "dev" / "results" / it for it in of.split(" of ")[1:]],
                                    text) if of else ("", ())
        try:
            block, has = self.rendered(name, self.newest, text)
            for row in had:
                if row not in has:   # a block may leave out what is not measured, but not lose what it had
                    raise Missing(" ".join(row))
            return block
        except Missing as missing:
            self.kept.append(f"{name}: {missing} is not measured")
            if of:
                return before
            if DATED.search(text):
                return match[0]
            raise InputError(f"{self.document}: {name}: {missing} is not measured, and the text does not say of which "
                             "commit it is") from None

    def differences(self):
        """Lines about the blocks and pictures that are not what they should be."""
        for path, wanted in self.wanted.items():
            found = (self.root / path).read_text(encoding="utf-8") if (self.root / path).exists() else ""
            pairs = zip(BLOCK.finditer(found), BLOCK.finditer(wanted))
            blocks = [mine[1] for mine, its in pairs if mine[0] != its[0]]
            if found != wanted:
                yield f"{path}: {', '.join(blocks) or 'the picture'} is not what the rows say: run dev/measured.py"

    def write(self):
        for path, text in self.wanted.items():
            (self.root / path).write_text(text, encoding="utf-8")


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    documents = Documents(ROOT)
    if sys.argv[1:]:
        found = list(documents.differences())
        print("\n".join(found))
        return 1 if found else 0
    documents.write()
    for line in documents.kept:
        print(f"kept {line}")
    print(f"{len(documents.seen) - len(documents.kept)} of {len(documents.seen)} blocks are of the newest rows: "
          f"{', '.join(folder.name for folder in documents.newest) or 'none'}")
    return 0


if __name__ == "__main__":
    run_main(main)
