"""Runs the walkthrough of docs/first_runs.md, "Your own text in ten minutes", as written, in a folder with some text,
and compares the outputs that it shows with the printed ones. Numbers may differ, words may not."""
import glob
import os
import re
import shutil
import tempfile
import unittest

from tests.support.run_command import run_command
from tests.end_to_end.test_pasted_commands import BLOCK, pasted
from tests.support.train import BUILD, GPT2, LLAMA, ROOT

NUMBER = re.compile(r"\b[0-9a-f]{12}(?:-dirty)?\b|\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?k?")


def section(title):
    with open(os.path.join(ROOT, "docs", "first_runs.md"), encoding="utf-8") as file:
        return re.search(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", file.read())[1]


def shown(text):
    """The lines of the outputs of a section, without the dots that stand for omitted lines."""
    lines = [line for kind, body in BLOCK.findall(text) if kind == "text" for line in body.splitlines()]
    return [line for line in lines if line != "..."]


def words(line):
    """A line with 0 in place of each number, whatever its width."""
    return " ".join(NUMBER.sub("0", line).split())


def missing(expected, printed):
    """The first line of `expected` that `printed` does not have, in this order, or None."""
    lines = iter(words(line) for line in printed)
    return next((line for line in expected if words(line) not in lines), None)


class Lines(unittest.TestCase):
    def test_the_sections_have_commands_and_outputs(self):
        for title, commands, lines in (("Your own text in ten minutes", 4, 10), ("Your first 8-GPU run", 5, 5)):
            self.assertGreaterEqual(len(pasted(section(title))), commands)
            self.assertGreaterEqual(len(shown(section(title))), lines)


@unittest.skipUnless(os.access(LLAMA, os.X_OK) and not os.path.basename(BUILD).startswith("cuda"),
                     "needs the executables of the CPU")
class Walkthrough(unittest.TestCase):
    def setUp(self):
        self.home = tempfile.mkdtemp(prefix="llmc-walkthrough-")
        self.addCleanup(shutil.rmtree, self.home, ignore_errors=True)
        for name in ("Makefile", "scripts", "data", "llmc", "dev", "tests"):
            os.symlink(os.path.join(ROOT, name), os.path.join(self.home, name))
        for executable in (GPT2, LLAMA):
            os.symlink(executable, os.path.join(self.home, os.path.basename(executable)))
        os.makedirs(os.path.join(self.home, "text"))
        for folder in ("train", "model"):
            for path in sorted(glob.glob(os.path.join(ROOT, "llmc", folder, "**", "*.*"), recursive=True)):
                shutil.copy(path, os.path.join(self.home, "text", os.path.basename(path) + ".txt"))

    def run_it(self, command):
        environment = {**os.environ, "LLMC_BUILD": BUILD, "OMP_NUM_THREADS": "1"}
        for name in ("DATA", "RANKS", "MODEL", "TOKENIZER", "MAKEFLAGS", "MAKELEVEL"):
            environment.pop(name, None)
        return run_command(["bash", "-c", command], timeout=600, cwd=self.home, env=environment,
                           errors="replace").stdout.splitlines()

    def test_your_own_text(self):
        text = section("Your own text in ten minutes")
        block = next(body for kind, body in BLOCK.findall(text) if kind == "sh")
        commands = pasted(f"```sh\n{block}```\n")
        if not os.environ.get("LLMC_FULL"):   # a quarter of the steps, and as many lines
            commands = [re.sub(r"(--(?:train-iters|\w+-interval)) (\d+)", lambda m: f"{m[1]} {int(m[2]) // 4}", command)
                        for command in commands]
        self.assertEqual(commands[0], "make train_llama")   # make has built the tested executable
        printed = [line for command in commands[1:] for line in self.run_it(command)]
        self.assertIsNone(missing(shown(text), printed),
                          "docs/first_runs.md shows it; printed was\n" + "\n".join(printed))
        self.assertTrue(any(line.startswith("ROMEO:") for line in printed))
        losses = [float(x) for x in re.findall(r"eval step \d+ \| loss ([\d.]+)", "\n".join(printed))]
        self.assertLess(losses[-1], 0.6 * losses[0], "it does not learn")

    def test_the_plan_of_8_gpus(self):
        text = section("Your first 8-GPU run")
        command, = [c for c in pasted(text) if c.endswith("--dry-run")]
        printed = self.run_it(command)
        # No number of a plan depends on the machine.
        lines = iter(printed)
        for line in shown(text):
            self.assertIn(line, lines, "\n".join(printed))
