"""The options and files that the documents name exist, and the README links every document of docs/."""
import glob
import json
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "TROUBLESHOOTING.md", "scripts/README.md", "data/README.md",
             *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
# Options of other programs: docker, pip, apt-get, lm_eval, sbatch, scancel, tensorboard, git; any ("--option").
FOREIGN = {"mca", "rm", "gpus", "build-arg", "always", "abbrev", "dirty", "no-install-recommends", "model",
           "model-args", "tasks", "batch-size", "nodes", "full", "logdir", "option"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def options_of_the_trainer():
    own = set(re.findall(r"(?m)^--([\w-]+)", read("tests/golden/cli_options.txt")))
    # The list above has the options of runs; these are options of subcommands, and Megatron-LM's names.
    parsed = "".join(path.read_text() for folder in ("config", "commands") for path in
                     (ROOT / "llmc" / folder).rglob("*.cpp"))
    return own | set(re.findall(r'"--([a-z][a-z0-9-]+)', parsed)) \
        | set(re.findall(r'(?m)^ +\{"([a-z0-9-]+)"', read("llmc/config/config_names.cpp")))


def options_of_scripts():
    files = [*(ROOT / "scripts").rglob("*"), *(ROOT / "data").glob("*.py"), *(ROOT / "dev").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files
                   if path.is_file() and path.suffix in (".py", ".sh", ".sbatch", ""))
    return set(re.findall(r'["\s]--([a-z][\w-]+)', text))


def options_of_other_trainers():
    found = set()
    for path in (ROOT / "llmc/config/foreign").glob("*.inl"):
        rows = json.loads(re.search(r'(?s)R"json\((.*)\)json"', path.read_text())[1])
        for row in rows:
            keys = row.get("keys") or " ".join(row["take"])
            found.update(key.lstrip("-") for key in (keys if isinstance(keys, str) else "".join(keys)).split())
    return found


def unknown_options(text, known):
    names = re.findall(r"(?<![\w-])--([a-z][\w.*-]*[\w*])", text)
    return sorted({name for name in names if not name.endswith("*") and name.replace("_", "-") not in known})


def missing_files(text):
    """Files in backticks that do not exist; a word in capitals or * stands for any name."""
    named = re.findall(r"`((?:llmc|scripts|data|dev|tests|docs)/[\w./*-]+)`", text)
    return sorted({name for name in named if name != "dev/data/hellaswag.py"   # llm.c's
                   and not glob.glob(str(ROOT / re.sub(r"\b[A-Z]{3,}\b", "*", name).rstrip("/")))})


class Documents(unittest.TestCase):
    def setUp(self):
        self.known = (options_of_the_trainer() | options_of_scripts() | FOREIGN
                      | {name.replace("_", "-") for name in options_of_other_trainers()})

    def test_options_exist(self):
        self.assertGreater(len(self.known), 300)
        for name in DOCUMENTS:
            with self.subTest(name):
                self.assertEqual(unknown_options(read(name), self.known), [])

    def test_files_exist(self):
        for name in DOCUMENTS:
            with self.subTest(name):
                self.assertEqual(missing_files(read(name)), [])

    def test_the_readme_links_every_document(self):
        readme = read("README.md")
        for name in [*DOCUMENTS[1:], "dev/LOG.md", "LICENSE"]:
            self.assertTrue(f"]({name})" in readme, f"README.md has no link to {name}")

    def test_the_readme_is_short(self):
        lines = read("README.md").split("\n")
        self.assertLessEqual(len(lines), 120)
        wide = [line for line in lines if len(line) > 120 and not line.startswith(("|", "!["))]
        self.assertEqual(wide, [])

    def test_numbers_link_to_dated_results(self):
        """Each line of the summary of docs/measured.md, and each part of it, has its source."""
        table = re.search(r"(?ms)^## Summary\n(.*?)^## ", read("docs/measured.md"))[1]
        rows = [line for line in table.splitlines() if line.startswith("| [")]
        self.assertGreater(len(rows), 5)
        for row in rows:
            self.assertRegex(row, r"^\| \[[^]]+\]\(\.\./dev/results/\d{4}-\d\d-\d\d-[\w./-]+\) \|")
        for part in re.split(r"(?m)^## ", read("docs/measured.md"))[1:]:
            self.assertRegex(part, r"\]\(\.\./dev/(results/\d{4}-\d\d-\d\d-|peers/published\.csv)")
