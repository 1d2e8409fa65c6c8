"""scripts/import_config on malformed inputs, or inputs made to take much time or memory: one line, never a
traceback."""
import contextlib
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import unittest

from tests.support.folder import FolderTest
from tests.support.import_case import FIXTURES, NO_YAML, ROOT

from llmfp8.importer.main import main
from llmfp8.support import InputError

SCRIPT = [sys.executable, str(ROOT / "scripts" / "import_config")]
N = 250_000   # about as many characters as a file may have
TOKENS = [word.encode("utf-8", "surrogateescape") for word in (
    "{ } [ ] ( ) \" ' \\ $ ${ $(( ` << &a *a <<:*a = += +=( # -- --lr export if fi $@ ${A[@]} ${A:- A=( \"\"\" lambda "
    "1j ... *x= None !!int !!float !!binary 2024-99-99 --- ? : - NaN 1e999 -Infinity null true 0x 1_000 12:30:45 "
    "99999999999999999999 -1 0 [] {} \"\" auto 07:32:00 \udcff \u00e9 \\ud800 \u2028 \x0c \x85").split(" ")
    ] + [b"\n", b"\t", b"\r", b": ", b"- ", b"\0", b"1" * 5000, b" "]


def doubling(first, line, last=""):
    """Names a0, a1, ..., each made of two of the name before."""
    return first + "".join(line.replace("NEW", f"a{i}").replace("OLD", f"a{i - 1}") for i in range(1, 40)) + last


LONG, UNKNOWN = "a line of more than 8192", "neither a DeepSpeed"
# (ending, content, expected text of the one line)
COSTLY = [
    ("yaml", doubling("a0: &a0 [x, x]\n", "NEW: &NEW [*OLD, *OLD, *OLD]\n"), "0.yaml:2: not YAML: an alias (*name)"),
    ("yaml", "a: &a [*a]\nb: &b {c: *b}\n", "an alias (*name) is not followed"),
    ("yaml", "a: " + "[" * 400 + "]" * 400, "nested too deeply"), ("yaml", "a: " + "[" * 5000, "nested"),
    ("yaml", "a: 2024-99-99\nb: !!int x\nc: " + "1" * 5000, UNKNOWN), ("yaml", "? [a]\n: b\n", UNKNOWN),
    ("yaml", "a: !!python/object/apply:os.system ['exit 1']\n", UNKNOWN),
    ("yaml", 'a: "b\x02\x1b[2J', 'a: "b\\x02\\x1b[2J; correct'),
    ("yaml", "".join(f"k{i}: 1\n" for i in range(3000)), "more than 1000 settings"),
    ("json", '{"a":\n' * 30000 + "1" + "}\n" * 30000, "nested too deeply"), ("json", "/*\n" * (N // 3), "not JSON"),
    ("json", '"\\\n' * (N // 3), "not JSON"), ("json", '{"a": ' + '"\\"\n' * (N // 4), "not JSON"),
    ("json", '{"a": ' + "1" * 5000 + "}", "not JSON"), ("json", '{"a": 1}' + " " * N * 2, "more than 262144 bytes"),
    ("json", "{" + ",\n".join(f'"{i}": 1' for i in range(15000)) + "}", "more than 1000 settings"),
    ("json", '{"a": ' + "1" * N + "}", LONG),
    ("toml", "a = [" + "[\n" * (N // 2), "nested too deeply"), ("toml", ".".join("a" * (N // 2)) + " = 1", LONG),
    ("toml", ".".join("a" * 4000) + " = 1", "nested too deeply"), ("toml", "a = " + "1" * 5000, "not TOML"),
    ("sh", "A=x\n" + "A=$A$A\n" * 64, "a variable becomes more than"),
    ("sh", "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 64, "a variable becomes more than"),
    ("sh", "A=x\n" + "A+=x\n" * 40000, UNKNOWN),
    ("sh", "torchrun --lr " + "${A:-\n" * 20000 + "1" + "}\n" * 20000, "lr true: must be a number"),
    ("sh", "${\n" * (N // 3), UNKNOWN), ("sh", "$\n" * (N // 2), UNKNOWN), ("sh", "A=(\n" * (N // 4), "close it"),
    ("sh", "if a; then b --zz; fi\n" * 11000, UNKNOWN), ("sh", "torchrun " + "--a \\\n" * (N // 6), "1000 settings"),
]


def mutated(chance, data, others):
    """Makes one to thirty edits of the bytes."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 3, 8, 30])):
        at, kind = chance.randrange(len(data) + 1), chance.randrange(6)
        if kind == 0:
            data[at:at + chance.choice([1, 5, 50])] = b""
        elif kind == 1:
            data[at:at] = chance.choice(TOKENS) * chance.choice([1, 1, 2, 50])
        elif kind == 2:
            piece = chance.choice(others)
            begin = chance.randrange(len(piece))
            data[at:at] = piece[begin:begin + chance.choice([10, 60, 300])]
        elif kind == 3:
            data[at:at + 1] = bytes([chance.randrange(256)])
        elif kind == 4:   # another value of a key
            found = re.compile(rb"(?<=[=:])[ \t]*[^\n,]*").search(bytes(data), at)
            if found:
                data[found.start():found.end()] = b" " + chance.choice(TOKENS)
        else:
            found = re.compile(rb"\d+").search(bytes(data), at)
            if found:
                data[found.start():found.end()] = chance.choice([b"0", b"-1", b"1e400", b"nan", b'""', b"[1, [2]]"])
    return bytes(data)


def check_mutations(test, variable, accept):
    """Calls accept(number, random numbers) for 400 numbers from LLMC_SEED on, or for as many as the environment
    variable says. Each call must succeed or raise an InputError of one line, and there must be enough of both."""
    kinds = {"accepted": 0, "refused": 0}
    first = int(os.environ.get("LLMC_SEED", "0"))
    for number in range(first, first + int(os.environ.get(variable, "400"))):
        with test.subTest(number=number):
            try:
                accept(number, random.Random(number))
                kinds["accepted"] += 1
            except InputError as error:
                test.assertNotIn("\n", str(error))
                kinds["refused"] += 1
    test.assertGreater(min(kinds.values()), 50, kinds)


class HostileImports(FolderTest):
    def one_line(self, path, says):
        memory, most_seconds = 1 << 30, 10   # of the processor: a machine may be busy
        done = subprocess.run([*SCRIPT, path], cwd=self.folder, capture_output=True, text=True, check=False,
                              timeout=600, stdin=subprocess.DEVNULL, preexec_fn=lambda: (
                                  resource.setrlimit(resource.RLIMIT_AS, (memory, memory)),
                                  resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds))))
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr[-500:])
        self.assertRegex(done.stderr, r"\Aerror: [^\n]*\n\Z")
        self.assertIn(says, done.stderr)
        self.assertLess(len(done.stderr), 2100)

    def test_files_of_other_kinds(self):
        os.mkfifo(self.folder / "pipe.json")
        os.mkdir(self.folder / "folder.yaml")
        for path, says in (("pipe.json", "is a pipe"), ("folder.yaml", "is a folder"), ("/dev/zero", "is a device"),
                           ("none.json", "No such file"), ("x" * 5000, "File name too long")):
            with self.subTest(path[:20]):
                self.one_line(path, says)

    def costly(self, *endings):
        for number, (ending, text, says) in enumerate(COSTLY):
            if ending in endings:
                with self.subTest(ending=ending, text=text[:40]):
                    path = self.folder / f"{number}.{ending}"
                    path.write_text(text, encoding="utf-8")
                    self.one_line(str(path), says)

    @unittest.skipIf(NO_YAML, "needs PyYAML")
    def test_costly_yaml(self):
        self.costly("yaml")

    def test_costly_json_and_toml(self):
        self.costly("json", "toml")

    def test_costly_scripts(self):
        self.costly("sh")

    def test_mutations_of_every_format(self):
        """LLMC_IMPORTS sets the number of inputs, and LLMC_SEED the first number."""
        seeds = [p for p in sorted(FIXTURES.iterdir()) if not (NO_YAML and p.suffix == ".yaml")]
        texts = [p.read_bytes() for p in seeds]
        out = self.folder / "run.json"

        def accept(number, chance):
            seed = chance.randrange(len(seeds))
            path = self.folder / ("in" + (seeds[seed].suffix if chance.random() < 0.8
                                          else chance.choice([".json", ".toml", ".sh", ""])))
            path.write_bytes(mutated(chance, texts[seed], texts))
            with contextlib.redirect_stdout(io.StringIO()):
                main([str(path), "--out", str(out), *["--all"][:number % 2]])
            json.loads(out.read_text(encoding="utf-8"), parse_constant=self.fail)

        check_mutations(self, "LLMC_IMPORTS", accept)
