"""`train_llama bench` and dev/bench/bench.sh on the CPU. Standard library only."""
import json
import os
import subprocess
import unittest

from tests.support.folder import FolderTest
from tests.support.ranks import HAVE_RANKS, MPIRUN
from tests.support.train import GPT2, LLAMA, ROOT

SHAPE = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "4",
         "--kv-channels", "8", "--vocab-size", "61", "--max-position-embeddings", "16", "--seq-length", "16",
         "--micro-batch-size", "2", "--global-batch-size", "4"]


def matmul_name(m):
    return f"matmul {m['pass']} {m['M']} x {m['N']} x {m['K']} {m['in']}"


class BenchTest(FolderTest):
    def run_words(self, *words, expect=0):
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)
        self.assertEqual(done.returncode, expect, done.stdout[-3000:] + done.stderr)
        return done

    def bench(self, *words, launcher=()):
        path = self.folder / "bench.json"
        done = self.run_words(*launcher, words[0], "bench", "--json", path, "--steps", "2", "--warm-up", "1",
                              *words[1:])
        return done.stdout, json.loads(path.read_text())

    def model(self, binary, *extra):
        groups = ["--num-query-groups", "2" if binary == LLAMA else "4"]
        return [binary, "--model", "llama-tiny" if binary == LLAMA else "gpt2-tiny", *SHAPE, *groups, *extra]

    def check(self, text, bench):
        parts = sum(part["ms"] for part in bench["totals"].values())
        self.assertAlmostEqual(parts, bench["step_ms"], places=6)
        here = [row for row in bench["rows"] if not row["overlapped"]]
        for kind in ("matmul", "attention", "memory-bound"):
            rows = [row for row in here if row["class"] == kind]
            self.assertGreater(len(rows), 0)
            for unit in ("ms", "floor_ms"):
                self.assertAlmostEqual(sum(row[unit] for row in rows), bench["totals"][kind][unit], places=6)
        differences = [row["difference_ms"] for row in bench["rows"]]
        self.assertEqual(differences, [row["ms"] - row["floor_ms"] for row in bench["rows"]])
        self.assertEqual(differences, sorted(differences, reverse=True))
        self.assertEqual((len(bench["steps_ms"]), len(bench["timed_steps_ms"])), (2, 2))
        for row in bench["rows"]:
            self.assertIn(row["name"], text)
        micro_batches = 2 / bench["ranks"]
        self.assertTrue(0 < micro_batches * bench["micro_batch_ms"] < max(bench["steps_ms"]), bench)

    def test_matmuls_are_those_of_the_plan_for_both_families_and_every_recipe(self):
        for binary, options in ((GPT2, []), (LLAMA, []), (GPT2, ["--fp8-recipe", "delayed"]),
                                (LLAMA, ["--fp8-recipe", "tensorwise", "--num-layers", "3",
                                         "--first-last-layers-bf16"]),
                                (LLAMA, ["--fp8-recipe", "blockwise", "--fp8-lm-head"])):
            with self.subTest(binary=os.path.basename(binary), options=options):
                words = self.model(binary, *options)
                text, bench = self.bench(*words)
                self.check(text, bench)
                plan = json.loads(self.run_words(words[0], "plan", "--json", *words[1:]).stdout)
                want, have = {}, {}
                for m in plan["matmuls"]:
                    want[matmul_name(m)] = want.get(matmul_name(m), 0) + m["count"]
                for row in bench["rows"]:
                    if row["class"] == "matmul":
                        name = " ".join(row["name"].split()[:8])
                        have[name] = have.get(name, 0) + row["calls"]
                self.assertEqual(have, want)
                self.assertEqual(bench["totals"]["exposed communication"]["ms"], 0)

    def test_rates_have_every_linear_and_the_operations_of_the_step(self):
        words = self.model(LLAMA, "--fp8-recipe", "blockwise")
        self.bench(*words)
        done = self.run_words("dev/bench/rates_of_bench.py", "H100 PCIe", self.folder / "bench.json")
        lines = [line.split() for line in done.stdout.splitlines() if line[0] != "#"]
        plan = json.loads(self.run_words(words[0], "plan", "--json", *words[1:]).stdout)
        forward = {tuple(str(m[key]) for key in "MNK"): m["in"] for m in plan["matmuls"] if m["pass"] == "forward"}
        linears = {tuple(line[1:4]): line[4:] for line in lines if line[0] == "linear"}
        self.assertEqual(set(linears), set(forward))
        for shape, times in linears.items():   # BF16, FP8 fast and precise, FP8 blocks
            self.assertEqual([float(time) > 0 for time in times],
                             [forward[shape] == "bf16", False, False, forward[shape] == "e4m3"] * 3)
        self.assertEqual({line[0] for line in lines},
                         {"gpu", "copy", "host-link", "overhead", "linear", "op", "attention"})
        operations = {line[1] for line in lines if line[0] == "op"}
        self.assertTrue({"rmsnorm_forward", "swiglu_backward", "adamw", "classifier"} <= operations, operations)

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_two_ranks(self):
        text, bench = self.bench(*self.model(LLAMA, "--fp8-recipe", "delayed"), launcher=[*MPIRUN, "-np", "2"])
        self.check(text, bench)
        self.assertEqual(bench["ranks"], 2)
        self.assertIn("check-comm", "".join(bench["notes"]))
        self.assertTrue(any(row["overlapped"] for row in bench["rows"]))   # FP8 weights, on the other stream

    def test_options_without_effect_are_refused(self):
        for option in ["--save", "out"], ["--profile", "1:2"], ["--train-data", "x"]:
            done = self.run_words(GPT2, "bench", *option, expect=2)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(option[0], done.stderr)
        self.assertIn("bench [--json FILE]", self.run_words(LLAMA, "bench", "--help").stdout)

    def test_script_writes_a_summary_and_names_what_it_left_out(self):
        words = ["dev/bench/bench.sh", self.folder / "out"]
        environment = {**os.environ, "BUILD": os.path.dirname(GPT2), "KERNELS": "", "MODELS": "tiny",
                       "RECIPES": "bf16 blockwise", "TINY_OPTIONS": " ".join(SHAPE) + " --num-query-groups 4"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        summary = (self.folder / "out" / "summary.md").read_text()
        for part in ("tiny | BF16", "tiny | blockwise", "matmul", "gaps"):
            self.assertIn(part, summary)
