"""TROUBLESHOOTING.md against the sources: every quoted line exists and has the exit code that the document says. If a
short run on a CPU can cause it, the program must print it."""
import glob
import os
import re
import shutil
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN
from tests.support.train import GPT2, LLAMA, ROOT, TrainTest, make_tokens, write_shard

EXIT_CODES = {"kExitBug": 1, "kExitBadInput": 2, "kExitFp8NotEffective": 3, "kExitDiverged": 4,
              "kExitNoCheckpoint": 5, "kExitPeerLost": 6, "kExitDisk": 7}
PLACEHOLDER = re.compile(r"<[a-z][^<>`]*>")
# The prefixes and suffixes with which messages are printed.
FRAME = re.compile(r"^(?:error|note|warning|fp8|stop): |; all ranks end$")
GAP = "\0"   # in templates: a value that is filled in


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


# ---- the quotes of the document


class Quote:
    """A line in the column "the log says", its exit code (None if it does not end the run) and its line number."""

    def __init__(self, text, exit_code, line):
        self.text, self.exit_code, self.line = text, exit_code, line
        self.body = FRAME.sub("", text)

    def fixed(self, text=None):
        return [part for part in PLACEHOLDER.split(self.body if text is None else text) if part.strip()]

    def pattern(self):
        return ".*".join(re.escape(part) for part in PLACEHOLDER.split(self.text))

    def __repr__(self):
        return f"line {self.line}: {self.text}"


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


class TroubleshootingTest(TrainTest):
    @classmethod
    def setUpClass(cls):
        cls.quotes, cls.templates, cls.pieces = quotes(), templates(), {}
        for path, template, _ in cls.templates:
            if path.endswith((".cpp", ".cu")):
                cls.pieces.setdefault(path, set()).update(template.split(GAP))

    def setUp(self):
        super().setUp()

    # ---- quotes against sources

    def places(self, parts):
        """(file, exit code) of the statements that contain all parts in this order."""
        return [(path, code) for path, template, code in self.templates if matched(parts, template)]

    def in_one_file(self, parts):
        """A message that several statements build: all its parts are in one file."""
        return any(all(tiled(part, pieces) for part in parts) for pieces in self.pieces.values())

    def exists(self, quote):
        for text in (quote.body, quote.text):
            parts = quote.fixed(text)
            if parts and (self.places(parts) or self.in_one_file(parts)):
                return True
        return False

    def test_every_quoted_line_is_in_the_sources(self):
        self.assertGreater(len(self.quotes), 45)
        provoked = {self.quoted(key).text for key in self.keys()}
        for quote in self.quotes:
            with self.subTest(quote=quote):
                self.assertTrue(max(map(len, quote.fixed())) >= 4, "nothing fixed in it")
                # A message that several files build must be caused by one of the cases below.
                self.assertTrue(self.exists(quote) or quote.text in provoked)

    def test_a_changed_word_is_found(self):
        for quote in self.quotes:
            part = max(quote.fixed(), key=len)
            word = max(re.findall(r"[\w-]+", part), key=len)
            for other in (word[1:] + word[0] + "q", ""):
                changed = quote.body.replace(part, part.replace(word, other, 1), 1)
                inside = all(re.search(r"\w", side) for side in part.split(word, 1))
                if other or inside:   # a quote may begin and end anywhere
                    with self.subTest(quote=quote, other=other):
                        self.assertFalse(self.exists(Quote(changed, None, quote.line)))

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

    def test_options_and_links_exist(self):
        text = read("TROUBLESHOOTING.md")
        known = {*re.findall(r"(?m)^--([\w-]+)", read("tests/golden/cli_options.txt")),
                 *re.findall(r'\{"([\w-]+)", "', read("llmc/config/config_table_ranks.cpp")),   # Megatron's names
                 *re.findall(r'"--([\w-]+)"', read("scripts/llmfp8/comparison/main.py")
                              + read("scripts/llmfp8/importer/main.py")),
                 "help", "help-all", "config", "role", "valid-fraction", "follow",
                 "gpus", "shm-size", "signal", "mpi", "gpus-per-node", "ntasks-per-node",   # of Docker and Slurm
                 "option", "fp8-"}   # any
        self.assertLessEqual(set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)), known)
        headings = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
                    for h in re.findall(r"(?m)^#+ (.*)$", text)}
        for anchor in re.findall(r"\]\(#([^)]*)\)", text):
            self.assertIn(anchor, headings)
        self.assertIn("(TROUBLESHOOTING.md)", read("README.md"))

    # ---- quotes against the program

    def quoted(self, key):
        found = [quote for quote in self.quotes if key in quote.text]
        self.assertTrue(found, f"no quoted line has: {key}")
        return found[0]

    def keys(self):
        return [key for key, *_ in self.cases()] + [key for key, _ in self.notes()] + [
            "skipped checkpoint", "was made by another run", "training data changed", "option changed", "is damaged",
            "no usable checkpoint under", "no usable checkpoint at", "No space left", "not finite: update skipped",
            "(--stop-on-divergence", "the first value that is not finite", "FP8 was requested"]

    def file(self, name, content):
        with open(self.path(name), "wb") as f:
            f.write(content)
        return self.path(name)

    def cases(self):
        """(words of the quoted line, options[, environment]) of runs that end at once."""
        short = ["--train-iters", "1"]
        fp8 = [*short, "--fp8-recipe", "delayed"]
        few, high, tiny = (self.path(name) for name in ("few.bin", "high.bin", "tiny.bin"))
        write_shard(few, make_tokens(40, 4))
        write_shard(high, [1] * 500 + [61] + [2] * 500)
        write_shard(tiny, make_tokens(12, 4))
        with open(few, "rb") as f:
            whole = f.read()
        os.makedirs(self.path("empty"), exist_ok=True)
        os.makedirs(self.path("taken", "step-00000007"), exist_ok=True)
        data = self.path("train_0.bin")
        fixture = os.path.join(ROOT, "tests", "fixtures", "gpt2")
        return [
            ("unknown option <option> (<trainer>)", [*short, "-o", "out"]),
            ("<option> has no effect: <reason>", [*short, "--rotary-base", "10"]),
            ("unexpected word", [*short, " "]),
            ("wrong magic <number>", [*short, "--valid-data", self.file("raw.bin", whole[1024:])]),
            ("wrong magic: this is", [*short, "--valid-data", self.file("a.parquet", b"PAR1" * 300)]),
            ("truncated: the header (byte 8)", [*short, "--valid-data", self.file("cut.bin", whole[:-2])]),
            ("is not below the vocabulary size", [*short, "--valid-data", high, "--eval-iters", "1"]),
            ("one evaluation (", [*short, "--valid-data", few, "--eval-iters", "9"]),
            ("does not name the token", [*short, "--reset-attention-mask"]),
            ("no linear is left", [*fp8, "--fp8-min-speedup", "10"]),
            ("multiples of 16", [*fp8, "--hidden-size", "40"]),
            ("FP8 attention supports head dims of 64 and 128", [*short, "--fp8-attention"]),
            ("holds checkpoints of an earlier run", [*short, "--save", self.path("taken")]),
            ("no such file or directory", [*short, "--save", self.path("run"), "--tokenizer", self.path("nowhere")]),
        ]

    def notes(self):
        """(words of the quoted line, options) of runs that go on."""
        short = ["--train-iters", "1"]
        return [
            ("FP8 matmuls ran in the first step", [*short, "--fp8-recipe", "tensorwise"]),
            ("VALIDATION ON TRAINING DATA", [*short, "--valid-data", self.path("train_0.bin"), "--eval-iters", "2"]),
            ("checkpoints bring a modeling_llmfp8.py",
             [*short, "--normalization", "RMSNorm", "--save", self.path("own")]),
        ]

    def run_case(self, options, expect, environment=None, binary=GPT2, faults=None):
        done = subprocess.run(self.command(binary, *options, faults=faults), capture_output=True, text=True,
                              timeout=120, env={**os.environ, **(environment or {})})
        self.assertEqual(done.returncode, expect, done.stdout[-2000:] + done.stderr)
        return done

    def check_error(self, key, options, environment=None):
        quote = self.quoted(key)
        done = self.run_case(options, quote.exit_code, environment)
        self.assertRegex(done.stderr, rf"\A{quote.pattern()}\n\Z")
        return done

    def check_line(self, key, text):
        pattern = self.quoted(key).pattern()
        self.assertTrue(any(re.search(pattern, line) for line in text.split("\n")), f"no line like {pattern}: {text}")

    def test_errors_are_printed_as_quoted(self):
        for key, options, *environment in self.cases():
            with self.subTest(key=key):
                self.check_error(key, options, *environment)

    def test_notes_are_printed_as_quoted(self):
        cut = ["--train-iters", "2", "--valid-data", self.path("valid.bin"), "--save", self.path("cut")]
        self.check_line("its evaluation was cut short",
                        self.run_case(cut, 0, faults="term@evaluation=2").stdout)
        for key, options in self.notes():
            with self.subTest(key=key):
                self.check_line(key, self.run_case(options, 0).stdout)
        environment = {"NVTE_FUSED_ATTN": "1"}
        out = self.run_case(["--train-iters", "1"], 0, environment).stdout
        self.check_line("FP8 is set by --fp8-* options", out)
        self.check_line("stop: ", self.run_case(["--train-iters", "9", "--save", self.path("t"),
                                                 "--exit-duration-in-mins", "1e-9"], 0).stdout)

    def test_resumes_say_what_is_quoted(self):
        save = self.path("run")
        common = ["--save", save, "--save-interval", "2", "--resume", "auto"]
        self.run_case(["--train-iters", "4", *common], 0)
        self.check_error("was made by another run", ["--train-iters", "6", *common, "--seed", "6"])
        self.check_error("no usable checkpoint at", ["--train-iters", "6", "--resume", save])
        self.check_line("option changed", self.run_case(["--train-iters", "4", "--lr", "2e-2", *common], 0).stdout)
        self.damage(save, 4)
        self.check_line("skipped checkpoint", self.run_case(["--train-iters", "2", *common], 0).stdout)
        self.damage(save, 2)
        self.check_error("no usable checkpoint under", ["--train-iters", "6", *common])

    def damage(self, save, step, name="optimizer/m.safetensors"):
        with open(os.path.join(save, f"step-{step:08d}", name), "r+b") as f:
            f.seek(-1, os.SEEK_END)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_END)
            f.write(bytes([byte ^ 4]))

    def test_other_data_is_said_as_quoted(self):
        common = ["--save", self.path("run"), "--resume", "auto"]
        self.run_case(["--train-iters", "1", *common], 0)
        write_shard(self.path("train_0.bin"), make_tokens(3000, 9))
        self.check_error("training data changed", ["--train-iters", "2", *common])

    def test_drills_say_what_is_quoted(self):
        self.check_error_within("No space left", ["--train-iters", "2", "--save", self.path("run")], "enospc@save=1")
        faults = ",".join(f"nan@step={step}" for step in range(2, 13))
        done = self.run_case(["--train-iters", "19"], 4, faults=faults)
        self.check_line("not finite: update skipped", done.stdout)
        self.check_error_within("(--stop-on-divergence", ["--train-iters", "9", "--lr", "5", "--clip-grad", "0",
                                                          "--stop-on-divergence", "2"])

    def check_error_within(self, key, options, faults=None):
        quote = self.quoted(key)
        done = self.run_case(options, quote.exit_code, faults=faults)
        self.assertRegex(done.stderr, rf"(?m)^{quote.pattern()}$")
        return done

    def test_fp8_that_is_not_effective(self):
        quote = self.quoted("FP8 was requested")
        done = self.run_case(["--train-iters", "1", "--fp8-recipe", "tensorwise"], quote.exit_code, binary=LLAMA,
                             faults="bf16@1.down")
        self.assertRegex(done.stderr, rf"\A{quote.pattern()}\n\Z")

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_lost_and_stalled_ranks_are_told_as_quoted(self):
        wrapper = [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:], "-np", "2"]
        for fault, key in (("kill", "is gone, last seen"), ("stop", "been suspended by"),
                           ("stall", "without progress for")):
            with self.subTest(fault=fault):
                run = self.command(GPT2, "--train-iters", "1000000", "--comm-timeout", "2",
                                   faults=fault + ":rank=1@backward=3")
                done = subprocess.run([*wrapper, *run], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
                self.assertEqual(done.returncode, self.quoted(key).exit_code, done.stderr)
                # mpirun may lose the last lines of a rank; the wrapper repeats them, without prefix.
                self.assertRegex(done.stderr, Quote(self.quoted(key).body, None, 0).pattern())


if __name__ == "__main__":
    unittest.main()
