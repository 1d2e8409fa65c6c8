"""dev/losses/real_weights.py with a tiny random model, on text that this test writes. No test needs the package with
the real weights."""
import subprocess
import sys
import unittest

from tests.support.data_scripts import lines
from tests.support.folder import FolderTest, has
from tests.support.run_command import run_command
from tests.support.train import LLAMA, ROOT, SHAPE, make_tokens, records, write_shard

sys.path.insert(0, f"{ROOT}/dev/losses")
SIZE = {"seq-length": 16, "micro-batch-size": 2, "global-batch-size": 4, "train-iters": 3, "lr": 0.01,
        "valid-tokens": 100, "train-tokens": 3000}


class RealWeights(FolderTest):
    def setUp(self):
        super().setUp()
        write_shard(self.folder / "start.bin", make_tokens(300, 1))
        subprocess.run([LLAMA, "--model", "llama-tiny", *SHAPE, "--num-query-groups", "2", "--vocab-size", "257",
                        "--train-data", self.folder / "start.bin", "--train-iters", "1",
                        "--save", self.folder / "start"], check=True, capture_output=True)
        for i in range(12):
            self.file(f"text/{'hidden' if i else '.hidden'}/{i}.py", "".join(lines(12, i)))
        self.file("text/copy.h", "".join(lines(12, 3)))
        self.file("text/image.txt", b"\0" * 1000)

    def run_tool(self, *words, expect=0, **size):
        size = {**SIZE, **{name.replace("_", "-"): value for name, value in size.items()}}
        done = run_command([sys.executable, f"{ROOT}/dev/losses/real_weights.py", "--model",
                            self.folder / "start" / "step-00000001", "--roots", self.folder / "text", "--work",
                            self.folder / "work", "--out", self.folder / "out",
                            *(word for name in size for word in (f"--{name}", str(size[name]))), *words], expect)
        return done.stderr if expect == 2 else done.stdout

    def log(self, name, kind):
        path, = self.folder.glob(f"work/*/{name}.jsonl")
        return records(path, kind)

    def test_table_of_sets(self):
        sets = ["--only", "delayed", "--set", "all-e4m3=--fp8-recipe tensorwise --fp8-format e4m3"]
        out = self.run_tool(*sets)
        rows = {tuple(cells[:2]): cells[3:7] for cells in ([cell.strip() for cell in line.strip("|").split("|")]
                                                           for line in out.splitlines() if line.startswith("| "))}
        base = self.log("bf16.1", "eval")
        for name in ("delayed", "all-e4m3"):
            loss, exported = (self.log(f"{name}.1", "eval")[-1][field] for field in ("loss", "loss_bf16"))
            self.assertNotEqual(loss, base[-1]["loss"])
            self.assertEqual(rows[name, "1"], [cell for value in (loss, exported) for cell in (
                f"{value:.4f}", f"{100 * (value / base[-1]['loss'] - 1):+.2f} %")])
        self.assertEqual(rows["bf16", "1"], [f"{base[-1]['loss']:.4f}", "+0.00 %", "", ""])
        self.assertIn(("bf16", "2"), rows)
        self.assertNotIn(("delayed", "2"), rows)
        self.assertIn("BF16 between seeds", out)
        # All begin alike, and the seed changes only what is trained on.
        self.assertEqual(base[0]["loss"], self.log("bf16.2", "eval")[0]["loss"])
        self.assertNotEqual(base[-1]["loss"], self.log("bf16.2", "eval")[-1]["loss"])
        self.assertEqual(self.log("all-e4m3.1", "header")[0]["config"]["fp8-format"], "e4m3")
        readme = (self.folder / "out" / "README.md").read_text()
        self.assertIn("\nall-e4m3: --fp8-recipe tensorwise --fp8-format e4m3\n", readme)
        self.assertIn("| delayed | 1 |", readme)
        self.assertIn("valid_bf16,", (self.folder / "out" / "losses.csv").read_text())
        # What has finished is not repeated; another set is added.
        more = self.run_tool(*sets, "--set", "tensorwise=--fp8-recipe tensorwise")
        self.assertEqual([line.split(": ")[1] for line in more.splitlines() if line.startswith("GPU")],
                         ["tensorwise.1"])
        self.assertLess({line for line in out.splitlines() if line.startswith("| ")}, set(more.splitlines()))

    def test_text_is_of_separate_files(self):
        import machine_text
        facts = [machine_text.prepare(self.folder / name, "bytes", 1000, 3000, [self.folder / "text"], seed)
                 for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        self.assertEqual(facts[0]["valid"], facts[1]["valid"])
        self.assertEqual(facts[0]["train"], facts[1]["train"])
        self.assertNotEqual(facts[0]["valid"], facts[2]["valid"])
        documents = {part: (self.folder / facts[0]["folder"] / part / "documents.jsonl").read_text().splitlines()
                     for part in ("valid", "train")}
        self.assertFalse(set(documents["valid"]) & set(documents["train"]))
        files = sum(facts[0][part]["files"] for part in documents)
        self.assertEqual(files, len({*documents["valid"], *documents["train"]}))
        everything = machine_text.prepare(self.folder / "d", "bytes", 1000, 10 ** 6, [self.folder / "text"])
        self.assertEqual(everything["valid"]["files"] + everything["train"]["files"], 11)   # no copy, no hidden one

    def test_bad_input(self):
        for words, said in ((["--only", "delayed,nope"], "error: --only nope: no such set; there are bf16, delayed"),
                            (["--set", "name"], "error: --set name: not NAME=OPTIONS"),
                            (["--set", "a.b=--fp8-lm-head"], "error: --set a.b=--fp8-lm-head: not NAME=OPTIONS"),
                            (["--minutes", "0"], "error: no run has finished")):
            self.assertTrue(self.run_tool(*words, expect=2).startswith(said), words)
        self.assertIn("validation needs 1000001: name more", self.run_tool(expect=2, valid_tokens=1_000_000))
        out = self.run_tool("--only", "delayed", "--set", "bad=--lr nought", expect=1)
        self.assertIn("GPU 0: bad.1: exit 2, --lr nought:", out)
        self.assertIn("\nfailed: bad.1; see their .txt in ", out)
        self.assertIn("| delayed | 1 |", out)

    @unittest.skipUnless(has("numpy"), "needs numpy")
    def test_rows_of_q_and_k(self):
        import gguf_model
        import numpy
        heads, half, width = 3, 4, 5
        weight = numpy.arange(heads * 2 * half * width).reshape(-1, width)
        # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute
        stored = weight.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(weight.shape)
        self.assertFalse(numpy.array_equal(stored, weight))
        self.assertTrue(numpy.array_equal(gguf_model.in_halves(stored, heads), weight))
