"""`train_llama bench` and dev/bench/bench.sh on the CPU. Standard library only."""
import importlib.util
import json
import os
import re
import unittest

from tests.support.folder import FolderTest
from tests.support.ranks import HAVE_RANKS, MPIRUN
from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, ROOT

SHAPE = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "4",
         "--kv-channels", "8", "--vocab-size", "61", "--max-position-embeddings", "16", "--seq-length", "16",
         "--micro-batch-size", "2", "--global-batch-size", "4"]


def matmul_name(m):
    return f"matmul {m['pass']} {m['M']} x {m['N']} x {m['K']} {m['in']}"


class BenchTest(FolderTest):
    def run_words(self, *words, expect=0):
        return run_command(words, expect, cwd=ROOT)

    def bench(self, *words, launcher=()):
        bench = json.loads(self.run_words(*launcher, words[0], "bench", "--json", *words[1:]).stdout)
        self.check(bench)
        return bench

    def model(self, binary, *extra):
        groups = ["--num-query-groups", "2" if binary == LLAMA else "4"]
        return [binary, "--model", "llama-tiny" if binary == LLAMA else "gpt2-tiny", *SHAPE, *groups, *extra]

    def check(self, bench):
        steps = {row["name"]: row for row in bench["rows"] if row["part"] == "step"}
        step = steps.pop("step")
        for unit in ("ms", "floor_ms"):
            self.assertAlmostEqual(sum(row[unit] for row in steps.values()), step[unit], places=6)
        for part in ("matmul", "attention", "memory-bound"):
            rows = [row for row in bench["rows"] if row["part"] == part]
            self.assertGreater(len(rows), 0)
            for unit in ("ms", "floor_ms"):
                self.assertAlmostEqual(sum(row[unit] for row in rows), steps[part][unit], places=6)
        lost = [row["ms"] - row["floor_ms"] for row in bench["rows"] if row["part"] not in ("ceiling", "step")]
        self.assertEqual(lost, sorted(lost, reverse=True))
        self.assertEqual(len(bench["steps_ms"]), 8)
        self.assertIn("device copy", [row["name"] for row in bench["rows"] if row["part"] == "ceiling"])

    def test_matmuls_are_those_of_the_plan_for_both_families_and_every_recipe(self):
        for binary, options in ((GPT2, []), (LLAMA, []), (GPT2, ["--fp8-recipe", "delayed"]),
                                (LLAMA, ["--fp8-recipe", "tensorwise", "--num-layers", "3",
                                         "--first-last-layers-bf16"]),
                                (LLAMA, ["--fp8-recipe", "blockwise", "--fp8-lm-head"])):
            with self.subTest(binary=os.path.basename(binary), options=options):
                words = self.model(binary, *options)
                bench = self.bench(*words)
                plan = json.loads(self.run_words(words[0], "plan", "--json", *words[1:]).stdout)
                want, have = {}, {}
                for m in plan["matmuls"]:
                    want[matmul_name(m)] = want.get(matmul_name(m), 0) + m["count"]
                for row in bench["rows"]:
                    if row["part"] == "matmul":
                        name = " ".join(row["name"].split()[:8])
                        have[name] = have.get(name, 0) + row["calls"]
                self.assertEqual(have, want)
                exposed, = [row["ms"] for row in bench["rows"] if row["name"] == "exposed communication"]
                self.assertEqual(exposed, 0)

    def test_rates_have_the_operations_of_the_step_and_compile(self):
        bench = self.bench(*self.model(LLAMA, "--fp8-recipe", "blockwise"))
        for row in bench["rows"]:   # as long as on a GPU
            row["ms"] = max(0.1 * row["calls"], 0.1)
        path = self.folder / "bench.json"
        path.write_text(json.dumps(bench))
        rates = self.run_words("dev/bench/rates_of_bench.py", "H100 PCIe", path).stdout
        gemms = re.findall(r"\{\{\{(.*?)\}, \{(.*?)\}, \{(.*?)\}\}\}", rates)
        # BF16 and FP8 blocks have rates, FP8 with one scale has none.
        self.assertEqual([[float(numbers.split(", ")[1]) > 0 for numbers in mode] for mode in gemms],
                         [[True] * 3, [False] * 3, [False] * 3, [True] * 3])
        operations = set(re.findall(r'\{"(\w+)"', rates))
        self.assertTrue({"rmsnorm_forward", "swiglu_backward", "adamw", "classifier"} <= operations, operations)
        source = self.folder / "rates.cpp"
        source.write_text('#include "llmc/perf/rates.h"\nconst std::vector<Rates> all = {\n' + rates + "};\n")
        self.run_words("g++", "-std=c++20", "-I.", "-fsyntax-only", source)

    def test_fit_of_matmuls(self):
        spec = importlib.util.spec_from_file_location("rates", os.path.join(ROOT, "dev/bench/rates_of_bench.py"))
        rates = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rates)
        shapes = [(8192, 6144, 4096), (8192, 4096, 14336), (2048, 768, 768), (16384, 128256, 2048), (1024, 3072, 768)]
        for numbers in (8, 700, 0.5), (0, 1400, 0.1), (12, 350, 0):
            fixed, tflops, output = numbers
            times = {(m, n, k): fixed + 2e-6 * m * n * k / tflops + 1e-6 * m * n * output for m, n, k in shapes}
            for found, number in zip(rates.fit(times), numbers):
                self.assertAlmostEqual(found, number, places=6)

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_two_ranks(self):
        bench = self.bench(*self.model(LLAMA, "--fp8-recipe", "delayed"), launcher=[*MPIRUN, "-np", "2"])
        self.assertEqual(bench["ranks"], 2)
        self.assertIn("check-comm", "".join(bench["notes"]))
        self.assertTrue(any(row["part"] == "overlapped" for row in bench["rows"]))   # FP8 weights, on the other stream

    def test_text(self):
        text = self.run_words(GPT2, "bench", *self.model(GPT2)[1:]).stdout
        for pattern in (r"\Abench of .*--hidden-size 32", r"\nceiling +device copy ", r"\nmatmul +matmul dgrad 32 x ",
                        r"\nstep +gaps ", r"\nstep +step ", r" s/it \(", r"\nnote: SYNTHETIC DATA"):
            self.assertRegex(text, pattern)

    def test_script_writes_a_summary_and_names_what_it_left_out(self):
        words = ["dev/bench/bench.sh", self.folder / "out"]
        environment = {**os.environ, "BUILD": os.path.dirname(GPT2), "KERNELS": "", "MODELS": "tiny",
                       "RECIPES": "bf16 blockwise", "TINY_OPTIONS": " ".join(SHAPE) + " --num-query-groups 4"}
        run_command(words, cwd=ROOT, env=environment)
        summary = (self.folder / "out" / "summary.md").read_text()
        for part in ("| tiny-bf16 |", "| tiny-blockwise |", "attention_backward", "gaps", "* ceiling: device copy"):
            self.assertIn(part, summary)
