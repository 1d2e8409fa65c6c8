"""Measurements of scripts/compare: alternating runs of the CPU trainer, GPUs runs that fail, and the named tables."""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import unittest
from unittest import mock

from llmfp8.comparison import tables
from llmfp8.run_log import read_log
from tests.support.comparison import COMPARE, ROOT, CompareTest
from tests.support.train import BUILD, GPT2, TrainTest, make_tokens, with_faults, write_shard

HAVE_TRAINER = os.access(GPT2, os.X_OK) and not os.path.basename(BUILD).startswith("cuda")
TINY = [GPT2, "--model", "gpt2-tiny", "--num-query-groups", "4", *TrainTest.SHAPE]


@unittest.skipUnless(HAVE_TRAINER, "needs the executables of the CPU")
class Measuring(CompareTest):
    measures_time = True   # of tests/run.py

    def runs(self, *options, **more):
        words = {"bf16": TINY, "fp8": [*TINY, "--fp8-recipe", "delayed"], **more}
        named = [f"{name}={shlex.join(command)}" for name, command in words.items()]
        return [word for run in named for word in ("--run", run)] + [*options]

    def data(self):
        write_shard(self.folder / "train.bin", make_tokens(20000, 1))
        write_shard(self.folder / "valid.bin", make_tokens(700, 2))
        return ["--train-data", "train.bin", "--valid-data", "valid.bin", "--eval-iters", "4"]

    def script(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def test_rounds_take_turns_on_the_same_tokens(self):
        done = self.call(*self.runs("--rounds", "3", "--iters", "4", "--warmup", "2", "--out", "out", "--",
                                    *self.data()))
        logs = {(name, i): read_log(self.folder / "out" / f"{name}.{i}.jsonl")
                for i in (1, 2, 3) for name in ("bf16", "fp8")}
        begins = [log.headers[0]["unix_time"] for log in logs.values()]
        self.assertEqual(begins, sorted(begins))   # in the order written here: A B, A B, A B
        for (name, i), log in logs.items():
            self.assertEqual(sorted(log.steps), [1, 2, 3, 4, 5, 6])
            self.assertEqual([r["loss"] for r in log.step_list()], [r["loss"] for r in logs[name, 1].step_list()])
            self.assertEqual(log.headers[0]["config"]["train-data"], ["train.bin"])
        self.assertNotEqual(logs["bf16", 1].steps[6]["loss"], logs["fp8", 1].steps[6]["loss"])
        row = self.rows()["fp8"]
        times = [record["step_seconds"] for i in (1, 2, 3) for record in logs["fp8", i].step_list()[2:]]
        self.assertEqual((row["timed_steps"], row["rounds"]), ("12", "3"))
        self.assertEqual((float(row["s_per_it_min"]), float(row["s_per_it_max"])), (min(times), max(times)))
        self.assertEqual(float(row["loss_equal_tokens_gap"]),
                         float(row["loss_equal_tokens"]) / float(self.rows()["bf16"]["loss_equal_tokens"]) - 1)
        self.assertEqual(float(row["valid_loss_equal_tokens"]), logs["fp8", 1].evals[6]["loss_bf16"])
        self.assertEqual(float(row["valid_loss_as_trained"]), logs["fp8", 1].evals[6]["loss"])
        self.assertEqual(done.stderr.count("round 2/3 "), 2)
        said = self.call("out", "--warmup", "3").stdout   # once more, from the existing logs
        self.assertIn("The first 3 steps", said)
        self.assertIn("--out out: has out/bf16.1.jsonl of an earlier measurement",
                      self.call(*self.runs("--out", "out", "--", *self.data()), code=2).stderr)

    def test_long_runs_go_on_where_they_were_stopped(self):
        data = ["--out", "out", "--", *self.data()]
        faulty = shlex.join(with_faults(TINY, "term@backward=9"))
        ended = self.script("ended", f"#!/bin/sh\nexec {faulty} \"$@\"\n")
        self.call(*self.runs("--train-iters", "40", *data, stopped=[ended]))
        self.assertEqual(len(read_log(self.folder / "out/stopped.1.jsonl").steps), 9)
        self.script("ended", f"#!/bin/sh\nexec {shlex.join(TINY)} \"$@\"\n")
        done = self.call(*self.runs("--train-iters", "40", *data, stopped=[ended]))
        self.assertEqual(done.stderr.count("run "), 1)   # of the others nothing is left
        logs = {name: read_log(self.folder / f"out/{name}.1.jsonl") for name in ("bf16", "stopped", "fp8")}
        losses = {name: [record["loss"] for record in log.step_list()] for name, log in logs.items()}
        self.assertEqual(losses["stopped"], losses["bf16"])
        rows = self.rows()
        self.assertEqual([rows[name]["timed_steps"] for name in logs], ["37", "34", "37"])
        self.assertEqual(float(rows["fp8"]["valid_loss_equal_tokens"]), logs["fp8"].evals[40]["loss_bf16"])
        # A measurement is not continued with other options, or from the logs of rounds.
        said = self.call(*self.runs("--train-iters", "50", *data), code=2).stderr
        self.assertRegex(said, r"^error: --out out: its bf16 is a run of .*, 40 steps: use that, or choose .*\n$")
        (self.folder / "out" / "measured.json").unlink()
        said = self.call(*self.runs("--train-iters", "40", *data), code=2).stderr
        self.assertIn("its bf16 is a run of another measurement", said)

    def test_bad_options_are_found_before_anything_runs(self):
        said = self.call(*self.runs("--out", "out", "--", "--synthetic-data", bad=[*TINY, "--seq-lenght", "3"]), code=2)
        self.assertRegex(said.stderr, r"^error: bad: .*seq-lenght.*seq-length.*\(exit code 2 of .*\n$")
        self.assertFalse((self.folder / "out").exists())

    def test_a_run_that_fails_is_told_and_the_others_go_on(self):
        fails = self.script("fails", "#!/bin/sh\nfor w; do [ $w = --dry-run ] && exit; done\n"
                                     "echo 'error: out of luck' >&2\necho later\nexit 6\n")
        said = self.call(*self.runs("--rounds", "2", "--iters", "3", "--out", "out", "--", "--synthetic-data",
                                    bad=[fails]), code=1)
        self.assertIn("round 1/2 bad: FAILED: exit code 6: out of luck\n", said.stderr)
        self.assertNotIn("round 2/2 bad", said.stderr)
        self.assertIn("* bad: FAILED: exit code 6: out of luck\n", said.stdout)
        self.assertEqual(list(self.rows()), ["bf16", "fp8"])
        self.assertIn("* bad: FAILED", self.call("out", code=1).stdout)
        said = self.call("--run", f"bad={fails}", "--out", "none", code=2)
        self.assertIn("error: no run ended well; bad: exit code 6: out of luck", said.stderr)
        said = self.call("--run", f"bad={fails}", "--out", "fails/x", code=2)
        self.assertIn("error: --out fails/x/measured.json: Not a directory\n", said.stderr)

    def test_a_stop_reaches_the_run(self):
        pid = self.folder / "pid"
        waits = self.script("waits", "#!/bin/sh\nfor w; do [ $w = --dry-run ] && exit; done\n"
                                     f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 100\n")
        process = subprocess.Popen([sys.executable, COMPARE, "--run", f"a={waits}", "--out", "out"], cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = time.monotonic() + 30
        while not pid.exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[0]
        self.assertEqual((process.returncode, said), (130, "interrupted\n"))
        with self.assertRaises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


class NamedTables(CompareTest):
    @unittest.skipUnless(HAVE_TRAINER, "needs the executables of the CPU")
    def test_every_row_is_a_configuration_of_the_trainer(self):
        for name, table in tables.TABLES.items():
            with self.subTest(name):
                said = self.call("--table", name, "--out", "out", "--dry-run", "--", "--synthetic-data").stdout
                lines = dict(line.split(": ", 1) for line in said.splitlines())
                self.assertEqual(list(lines), list(table.rows))
                for row, command in lines.items():
                    self.assertTrue(command.startswith(f"RANKS={table.gpus} "))
                    self.assertTrue(command.endswith(
                        f" --synthetic-data --train-iters {sum(table.steps)} --log-file out/{row}.1.jsonl"))
        self.assertFalse((self.folder / "out").exists())

    def test_rows_follow_the_number_of_gpus(self):
        for ranks, small, words in (("1", True, ["--global-batch-size", "16"]),
                                    ("4", False, ["--global-batch-size", "64"]),
                                    ("", False, ["--global-batch-size", "128"])):
            with mock.patch.dict(os.environ, {"RANKS": ranks}):
                row = tables.commands("llama3-8b")["delayed"]
                self.assertEqual(row[1:], [*tables.ONE_GPU] * small + words)
        with mock.patch.dict(os.environ, {"RANKS": "2"}):
            row = tables.commands("context")["131072"]
            self.assertEqual(row[row.index("--context-parallel") + 1], "2")

    def test_the_readme_has_a_command_for_every_table(self):
        readme = (ROOT / "scripts" / "README.md").read_text()
        self.assertEqual(set(re.findall(r"scripts/compare --table (\S+)", readme)), set(tables.TABLES))

    def test_a_table_is_called_after_the_gpus_that_run_it(self):
        for ranks, words in ((None, ("8 GPUs", "1 GPU:")), ("4", ("4 GPUs", "4 GPUs:")), ("1", ("1 GPU:", "1 GPU:"))):
            with mock.patch.dict(os.environ, {"RANKS": ranks} if ranks else {}):
                if not ranks:
                    os.environ.pop("RANKS", None)
                self.assertIn(words[0], tables.title("llama3-8b"))
                self.assertIn(words[1], tables.title("llama3-small"))

    @unittest.skipUnless(HAVE_TRAINER, "needs the executables of the CPU")
    def test_a_named_table_is_measured(self):
        tiny = ["--num-layers", "1", "--hidden-size", "32", "--ffn-hidden-size", "32", "--num-attention-heads", "2",
                "--kv-channels", "16", "--vocab-size", "100", "--seq-length", "8", "--synthetic-data"]
        short = ["--rounds", "1", "--iters", "2", "--warmup", "1", "--out", "out"]
        # The option has no effect in BF16, so it is refused before anything runs.
        self.call("--table", "gpt2", *short, "--", *tiny, "--fp8-min-speedup", "0", code=2)
        self.call("--table", "gpt2", "--only", "bf16-32,bf16-64", *short, "--", *tiny)
        rows = self.rows()
        self.assertEqual(list(rows), ["bf16-32", "bf16-64"])
        self.assertEqual({row["baseline"] for row in rows.values()}, {"bf16-64"})
        self.assertNotEqual(rows["bf16-32"]["speed_ratio"], "")
        self.assertEqual(rows["bf16-32"]["differences"], "differs: micro-batch-size 32, bf16-64 has 64")
        measured = json.loads((self.folder / "out" / "measured.json").read_text())
        self.assertEqual([measured[key] for key in ("table", "warmup", "failures")], ["gpt2", 1, {}])
