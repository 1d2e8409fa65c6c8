"""dev/measure.sh: rows of tables that a CPU trains, beside an nvidia-smi that names GPUs which are not there."""
import csv
import importlib.util
import os
import subprocess
import unittest
from pathlib import Path
from unittest import mock

from llmfp8.comparison import tables
from tests.support.folder import FolderTest, call_main
from tests.support.run_command import run_command
from tests.support.train import BUILD, GPT2, ROOT

SPEC = importlib.util.spec_from_file_location("measure", os.path.join(ROOT, "dev", "measure.py"))
measure = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(measure)
HAVE_TRAINER = os.access(GPT2, os.X_OK) and not os.path.basename(BUILD).startswith("cuda")
TINY = ["train_gpt2_124M_bf16.sh", "--model", "gpt2-tiny", "--num-query-groups", "4", "--seq-length", "16",
        "--micro-batch-size", "1", "--global-batch-size", "4"]
TABLES = {"tiny": tables.Table("tiny, {gpus}", {"bf16": TINY, "fp8": [*TINY, "--fp8-recipe", "delayed"],
                                                "none": [*TINY, "--seq-lenght", "3"]}, steps=(1, 2)),
          "last": tables.Table("last, {gpus}", {"bf16": TINY, "again": TINY}, steps=(1, 3))}
PUBLISHED = [("h200", 1, "last", ("bf16",)), ("h200", 1, "tiny", ("fp8",)), ("h200", 1, "tiny", None),
             ("h100", 1, "tiny", ("bf16",)), ("h200", 4, "tiny", ("bf16",))]


class MeasureTest(FolderTest):
    def setUp(self):
        super().setUp()
        for name, value in (("PUBLISHED", PUBLISHED), ("RESULTS", self.folder / "results"),
                            ("LOGS", self.folder / "logs")):
            self.enterContext(mock.patch.object(measure, name, value))
        self.enterContext(mock.patch.dict(tables.TABLES, TABLES))
        self.gpus(["NVIDIA H200, 580.1"])

    def gpus(self, lines):
        self.file("bin/nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        (self.folder / "bin" / "nvidia-smi").chmod(0o755)

    def call(self, *arguments, code=0, **environment):
        variables = {name: value for name, value in os.environ.items() if name not in ("DATA", "RANKS")}
        variables.update(OMP_NUM_THREADS="1", LLMC_BUILD=str(BUILD), NCCL_NVLS_ENABLE="0",
                         PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}", **environment)
        with mock.patch.dict(os.environ, variables, clear=True):
            done = call_main(measure.main, "measure.sh", *arguments, cwd=self.folder)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def rows(self, folder):
        with open(folder / "rows.csv", newline="") as file:
            return {(row["table"], row["row"]): row for row in csv.DictReader(file)}


@unittest.skipUnless(HAVE_TRAINER, "needs the executables of the CPU")
class Measuring(MeasureTest):
    def test_rows_are_measured_written_and_continued(self):
        said = self.call("1", code=1).stdout
        folder, = (self.folder / "results").iterdir()
        self.assertRegex(folder.name, r"^\d{4}-\d\d-\d\d-h200-x1$")
        rows = self.rows(folder)
        self.assertEqual(list(rows), [("last", "bf16"), ("tiny", "fp8"), ("tiny", "bf16"), ("tiny", "none")])
        row = rows["last", "bf16"]
        self.assertEqual((row["warmup_steps"], row["timed_steps"], row["tokens_per_step"], row["seq_length"]),
                         ("1", "3", "64", "16"))
        self.assertTrue(float(row["s_per_it_min"]) <= float(row["s_per_it_median"]) <= float(row["s_per_it_max"]))
        self.assertAlmostEqual(float(row["tokens_per_s_per_gpu"]) * float(row["s_per_it_median"]), 64, delta=20)
        self.assertEqual((row["gpu"], row["gpus"], row["driver"], row["environment"], row["failed"]),
                         ("NVIDIA H200", "1", "580.1", "NCCL_NVLS_ENABLE=0", ""))
        self.assertEqual(row["llmc_tree"], measure.tree_of(Path(ROOT) / "llmc").hex())
        self.assertGreater(float(row["predicted_s_per_it"]), 0)
        self.assertIn("RANKS=1 scripts/recipes/train_gpt2_124M_bf16.sh --model gpt2-tiny", row["command"])
        self.assertNotEqual(row["first_step_s"], "")
        self.assertEqual(row["gpu_power_w_median"], "")   # which a CPU's log does not have
        self.assertIn("--seq-lenght", rows["tiny", "none"]["failed"])
        self.assertIn("tiny none: FAILED: ", said)
        self.assertIn("1 of 4 rows are missing", said)
        text = (folder / "README.md").read_text()
        for part in ("# 1 x NVIDIA H200, ", "## tiny, 1 GPU", "* none: failed: ", row["command"], "NCCL_NVLS_ENABLE=0"):
            self.assertIn(part, text)
        # Only the failed row is tried again, in the same folder.
        before = rows["tiny", "fp8"]
        with mock.patch.dict(TABLES["tiny"].rows, {"none": TINY}):
            self.call("1")
        again = self.rows(folder)
        self.assertEqual((again["tiny", "fp8"], again["tiny", "none"]["failed"]), (before, ""))
        self.assertIn("4 of 4 rows are there", self.call().stdout)
        # Rows of other sources are not mixed with them.
        with mock.patch.object(measure, "tree_of", lambda _: b"\1\2"):
            self.call("1", code=1)
            said = self.call("1", str(folder), code=2).stderr
        self.assertEqual(len(list((self.folder / "results").iterdir())), 2)
        self.assertIn("name another folder", said)

    def test_the_same_command_runs_once(self):
        with mock.patch.object(measure, "PUBLISHED", [("h200", 1, "last", None)]):
            self.call("1", "here")
        rows = self.rows(self.folder / "here")
        self.assertEqual({**rows["last", "again"], "row": "bf16"}, rows["last", "bf16"])
        self.assertEqual(len(list((self.folder / "logs").glob("*.jsonl"))), 1)

    def test_a_row_that_would_take_too_long_is_not_started(self):
        said = self.call("1", "here", code=1, MINUTES="0").stdout
        self.assertIn("last bf16: would take ", said)
        self.assertEqual(list(self.rows(self.folder / "here")), [("tiny", "none")])   # refused, which takes no time
        with mock.patch.object(measure, "plan_of", lambda words: (400.0 if "--fp8-recipe" in words else 0.1, 0)):
            self.call("1", "here", code=1)
        self.assertNotIn(("tiny", "fp8"), self.rows(self.folder / "here"))

    def test_a_row_that_hangs_is_ended(self):
        with mock.patch.object(measure, "KILL_S", 1):
            said = measure.run_to_end(["sh", "-c", "trap '' TERM; echo error: waits; sleep 60; true"],
                                      self.folder / "text", 1)
        self.assertEqual(said, "not done after 1 s: waits")


class Machines(MeasureTest):
    def test_only_what_is_published_for_the_machine_is_measured(self):
        def rows(gpu, gpus):
            return measure.published(measure.Machine(gpu, gpus, "", "", ""))
        self.assertEqual(rows("NVIDIA H200", 1),
                         [("last", "bf16"), ("tiny", "fp8"), ("tiny", "bf16"), ("tiny", "none")])
        self.assertEqual(rows("NVIDIA H100 80GB HBM3", 1), [("tiny", "bf16")])
        self.assertEqual(rows("NVIDIA H200", 4), [("tiny", "bf16")])
        for gpu, gpus in (("NVIDIA H200", 2), ("NVIDIA H200 NVL", 1), ("NVIDIA H100 PCIe", 1)):
            with self.assertRaisesRegex(measure.InputError, f"^no row is published for {gpus} {gpu}"):
                rows(gpu, gpus)

    def test_executables_of_an_unknown_commit_need_its_name(self):
        self.file("build/train_llama", "#!/bin/sh\necho 'train_llama, commit unknown'\n")
        (self.folder / "build" / "train_llama").chmod(0o755)
        build = str(self.folder / "build")
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "LLMC_BUILD": build}):
            with self.assertRaisesRegex(measure.InputError, "set LLMC_COMMIT"):
                measure.this_machine(1)
            with mock.patch.dict(os.environ, {"LLMC_COMMIT": "abc"}):
                self.assertEqual(measure.this_machine(1).gpu, "NVIDIA H200")
        with self.assertRaisesRegex(measure.InputError, "nvidia-smi"), mock.patch.dict(os.environ, {"PATH": build}):
            measure.this_machine(1)

    @unittest.skipUnless(HAVE_TRAINER, "needs the executables of the CPU")
    def test_other_machines_are_refused(self):
        self.assertIn("4 equal GPUs are needed", self.call("4", code=2).stderr)
        self.gpus(["NVIDIA H200, 580.1", "NVIDIA H100, 580.1"])
        self.assertIn("equal GPUs are needed", self.call(code=2).stderr)
        self.assertIn("dev/measure.sh", self.call("four", code=2).stderr)

    def test_the_tree_is_that_of_git(self):
        for name, text in (("a/b", "x"), ("a.c", "y"), ("a/deep/er", ""), ("ab/c", "z")):
            self.file(f"t/{name}", text)
        (self.folder / "t" / "a" / "b").chmod(0o755)
        (self.folder / "t" / "link").symlink_to("a.c")
        (self.folder / "t" / "empty").mkdir()
        for words in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *words], cwd=self.folder / "t", check=True, capture_output=True)
        git = run_command(["git", "write-tree"], cwd=self.folder / "t")
        subprocess.run(["rm", "-r", self.folder / "t" / ".git"], check=True)
        self.assertEqual(measure.tree_of(self.folder / "t").hex(), git.stdout.strip())


