"""TROUBLESHOOTING.md against the sources: every quoted line exists and has the exit code that the document says."""
import errno
import glob
import os
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

EXIT_CODES = {"kExitBug": 1, "kExitBadInput": 2, "kExitFp8NotEffective": 3, "kExitDiverged": 4,
              "kExitNoCheckpoint": 5, "kExitPeerLost": 6, "kExitDisk": 7}
PLACEHOLDER = re.compile(r"<[a-z][^<>`]*>|" + os.strerror(errno.ENOSPC))   # and what the C library says
# The prefixes and suffixes with which messages are printed.
FRAME = re.compile(r"^(?:error|note|warning|fp8|stop): |; all ranks end$")
GAP = "\0"   # in templates: a value that is filled in


def read(path):
    return (ROOT / path).read_text()


# ---- the quotes of the document


class Quote:
    """A line in the column "the log says", its exit code (None if it does not end the run) and its line number."""

    def __init__(self, text, exit_code, line):
        self.text, self.exit_code, self.line = text, exit_code, line
        self.body = FRAME.sub("", text)

    def fixed(self, text=None):
        return [part for part in PLACEHOLDER.split(self.body if text is None else text) if part.strip()]


def rows():
    """(line, cells) of the document's tables of symptoms."""
    for number, line in enumerate(read("TROUBLESHOOTING.md").split("\n"), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] != "you see" and not set(cells[0]) == {"-"}:
            yield number, [cell.replace(r"\|", "|") for cell in cells]


def quotes():
    found = []
    for line, (_, says, _, _) in rows():
        for match in re.finditer(r"`([^`]+)`(?: \((\d+)\))?", says):
            found.append(Quote(match[1], match[2] and int(match[2]), line))
    return found


# ---- the messages of the sources


def c_statements(text):
    """For each statement with a literal: its literals, with gaps for values, and the exit code or None."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"((?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\\n])+\'|[;{}]|[^"\'/;{}]+|/', re.S)
    literals, code, adjacent = [], "", False
    for match in token.finditer(text):
        part = match.group()
        if match[1] is not None:
            value = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1])
            if adjacent:
                literals[-1] += value
            else:
                literals.append(value)
            adjacent = True
        elif part[0] == ";":
            if literals:
                yield GAP.join(literals), exit_code_of(code)
            literals, code, adjacent = [], "", False
        else:
            code += part
            adjacent = adjacent and (not part.strip() or part.startswith(("//", "/*")))
    if literals:
        yield GAP.join(literals), exit_code_of(code)


def exit_code_of(code):
    named = {value for name, value in EXIT_CODES.items() if name in code}
    if re.search(r"\bREQUIRE\(", code):
        named.add(2)
    if re.search(r"(?<!\w)CHECK\(", code):
        named.add(1)
    return named.pop() if len(named) == 1 else None


def templates():
    """(file, template, exit code) of every message that a program of this repository may print."""
    printf = re.compile(r"%%|%[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[diouxXeEfFgGcsp]")
    found = []
    for pattern in ("*.cpp", "*.h", "*.inl", "*.cu", "*.cuh"):
        for path in sorted(glob.glob(os.path.join(ROOT, "llmc", "*", "**", pattern), recursive=True)):
            for template, code in c_statements(read(path)):
                template = printf.sub(lambda m: "%" if m[0] == "%%" else GAP, template)
                found.append((path, template, code))
    scripts = [p for pattern in ("data/*.py", "scripts/*.py", "scripts/llmfp8/*.py", "scripts/llmfp8/*/*.py",
                                 "scripts/*.sh", "scripts/*/*.sh", "dev/ci/detect.mk")
               for p in sorted(glob.glob(os.path.join(ROOT, pattern)))]
    for path in scripts:
        text = re.sub(r'"\s*\n\s*f?"', "", read(path))   # Python's adjacent literals
        filled_in = r"\{[^{}\n]*\}" if path.endswith(".py") else r"\$\{?\w+\}?|\$\([^()]*\)|\\\n\s*"
        text = re.sub(filled_in, GAP, text)
        found.append((path, text, None))
    return found


def matched(parts, template):
    """Whether the template contains the parts in this order."""
    at = 0
    for part in parts:
        at = template.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def tiled(part, pieces):
    """Whether the part is a concatenation of pieces, of which the first and the last may be incomplete."""
    all_pieces = GAP + GAP.join(pieces) + GAP
    if part in all_pieces:
        return True
    reached = {i for i in range(1, len(part)) if part[:i] + GAP in all_pieces}
    for i in range(1, len(part)):
        if i in reached:
            reached.update(j for j in range(i + 1, len(part) + 1) if GAP + part[i:j] + GAP in all_pieces)
    return any(i == len(part) or GAP + part[i:] in all_pieces for i in reached)


class TroubleshootingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.quotes, cls.templates = quotes(), templates()
        cls.pieces = {piece for path, template, _ in cls.templates if path.endswith((".cpp", ".cu"))
                      for piece in template.split(GAP)}

    # ---- quotes against sources

    def places(self, parts):
        """(file, exit code) of the statements that contain all parts in this order."""
        return [(path, code) for path, template, code in self.templates if matched(parts, template)]

    def exists(self, quote):
        for text in (quote.body, quote.text):
            parts = quote.fixed(text)
            # Several statements may build a message.
            if parts and (self.places(parts) or all(tiled(part, self.pieces) for part in parts)):
                return True
        return False

    def test_every_quoted_line_is_in_the_sources(self):
        self.assertGreater(len(self.quotes), 45)
        for quote in self.quotes:
            with self.subTest(quote=quote):
                self.assertTrue(max(map(len, quote.fixed())) >= 4, "nothing fixed in it")
                self.assertTrue(self.exists(quote))

    def test_exit_codes_are_those_of_the_sources(self):
        checked = 0
        for quote in self.quotes:
            codes = {code for _, code in self.places(quote.fixed())} - {None}
            if codes and quote.text.startswith("error: "):
                with self.subTest(quote=quote):
                    self.assertIn(quote.exit_code, codes)
                checked += 1
        self.assertGreater(checked, 12)
        for quote in self.quotes:
            with self.subTest(quote=quote):
                self.assertEqual(quote.text.startswith("error: "), quote.exit_code is not None
                                 and not quote.text.startswith(("launch_mpi.sh", "<recipe>", "missing", "DEVICE")))
