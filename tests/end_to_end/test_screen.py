"""The output of a run before its first step, --print-config and --version. Standard library only."""
import json
import os
import re
import subprocess
from pathlib import Path

from tests.support.run_command import run_command
from tests.support.train import BUILD, GPT2, LLAMA, TrainTest, records

LINES = 25   # before the first step


class ScreenTest(TrainTest):
    def start_of(self, text):
        """The lines before the first result."""
        lines = text.splitlines()
        return lines[:next(i for i, line in enumerate(lines) if re.match(r"(eval )?step ", line))]

    def test_a_run_starts_with_a_summary(self):
        common = ["--train-iters", "2", "--valid-data", self.path("valid.bin"), "--fp8-recipe", "delayed"]
        text = self.run_train(GPT2, *common, "--save", self.path("run")).stdout
        lines = self.start_of(text)
        self.assertLessEqual(len(lines), LINES, text)
        [header] = records(self.path("run", "log.jsonl"), "header")
        said = " ".join(" ".join(lines).split())
        for words in (f"{header['params']:,} parameters", "2 layers", header["device"]["name"], header["commit"],
                      "FP8 delayed: layers 0-1: qkv proj up down in FP8; head BF16",
                      "64 tokens per step = 4 sequences x 16",
                      "2 gradient accumulation steps of 2 on 1 rank", "5,001 tokens in 2 shards",
                      f"{8 / 312:.3g} epochs in this run", "validation 700 tokens in 1 shard", "GiB planned of ",
                      "not predicted", "; 2 steps", self.path("run") + " every 1000 steps and at the end",
                      "log " + self.path("run", "log.jsonl"), "--lr 0.01", "--fp8-recipe delayed"):
            self.assertIn(words, said)
        for unchanged in ("--weight-decay", "--clip-grad", "--model ", "--lr-warmup-iters"):
            self.assertNotIn(unchanged, said)
        self.assertEqual(header["config"]["weight-decay"], 0.1)
        self.assertNotIn("n/a", text)   # the CPU has no MFU
        step = next(line for line in text.splitlines() if line.startswith("step 2/2 "))
        self.assertNotIn("MFU", step)

    def test_many_notes_and_options_do_not_fill_the_screen(self):
        environment = {**os.environ, **{f"NVTE_{i}": "1" for i in range(30)}}
        options = ["--train-iters", "2", "--weight-decay", "0.2", "--adam-beta1", "0.8", "--adam-beta2", "0.9",
                   "--adam-eps", "1e-7", "--clip-grad", "2", "--exit-duration-in-mins", "9",
                   "--fp8-recipe", "delayed", "--bf16-linears", "0.qkv", "--sample-every", "1",
                   "--sample-tokens", "3", "--seed", "77"]
        log = self.path("log.jsonl")
        for more, place in ((["--log-file", log], "in " + log), ([], "--log-file FILE keeps them")):
            lines = self.start_of(self.run_train(GPT2, *options, *more, env=environment).stdout)
            lines = [line for line in lines if not line.startswith("sample ")]
            self.assertLessEqual(len(lines), LINES)
            left, said = re.fullmatch(r"note: (\d+) more notes: (.*)", lines[-1]).groups()
            self.assertEqual(said, place)
        shown = sum(line.startswith("note: ") for line in lines) - 1
        before = [r["text"] for r in records(log, "event") if r["step"] == 0 and r["kind"] == "note"]
        self.assertEqual(shown + int(left), len(before))
        self.assertEqual(sum("NVTE_" in text for text in before), 30)

    def test_print_config_is_a_configuration(self):
        options = ["--train-iters", "3", "--lr-decay-style", "wsd", "--fp8-recipe", "tensorwise", "--grad-dtype",
                   "bf16"]
        text = self.run_train(LLAMA, *options, "--print-config").stdout
        config = json.loads(text)
        self.assertEqual((config["lr-decay-style"], config["num-layers"], config["dry-run"]), ("wsd", 2, False))
        path = self.path("run.json")
        Path(path).write_text(text)
        call = [LLAMA, "--config", path]
        self.assertEqual(run_command([*call, "--print-config"]).stdout, text)
        subprocess.run([*call, "--log-file", self.path("a.jsonl")], check=True, timeout=60, stdout=subprocess.DEVNULL)
        self.run_train(LLAMA, *options, "--log-file", self.path("b.jsonl"))
        self.assertEqual(*[[r["loss"] for r in records(self.path(f"{name}.jsonl"), "step")] for name in "ab"])
        # --print-config with a plan, without data and without the ranks; errors are still reported.
        for words in (["--print-config"], ["plan", "--print-config", "--gpu", "H200"], ["bench", "--print-config"],
                      ["--ranks", "8", "--print-config"]):
            done = run_command([GPT2, *words], None)
            self.assertEqual((done.returncode, json.loads(done.stdout)["dry-run"]), (0, False), done.stderr)
        done = self.run_train(LLAMA, "--print-config", "--keep", "3", expect=2)
        self.assertIn("--keep has no effect", done.stderr)

    def test_samples_are_text_of_the_tokenizer(self):
        vocabulary = {"\u0120" + "w" * (i + 1): i for i in range(300)}
        Path(self.path("tokenizer.json")).write_text(json.dumps({
            "model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}}))
        options = ["--train-iters", "1", "--sample-every", "1", "--sample-tokens", "3", "--prompt", "2 0",
                   "--vocab-size", "300"]

        def samples(*more):
            log = self.fresh("log")
            text = self.run_train(GPT2, *options, *more, "--log-file", log).stdout
            for record in records(log, "sample"):
                self.assertIn(f"sample step {record['step']} | {record['text']}\n", text)
            return [record["text"] for record in records(log, "sample")], text

        ids, text = samples()
        self.assertTrue(ids and all(re.fullmatch(r"2 0( \d+){3}", line) for line in ids), ids)
        self.assertNotIn("samples: ", text)
        expected = ["".join(" " + "w" * (int(i) + 1) for i in line.split()) for line in ids]
        folder = self.path("run")
        # --tokenizer, with and without checkpoints, and the tokenizer of the checkpoint that a run starts from.
        words, text = samples("--tokenizer", self.path("tokenizer.json"))
        self.assertEqual(words, expected)
        self.assertIn(f"note: samples: text of {self.path('tokenizer.json')}\n", text)
        self.assertEqual(samples("--tokenizer", self.dir, "--save", folder)[0], expected)
        for start in (["--resume", os.path.join(folder, "step-00000001")], ["--save", folder, "--resume", "auto"]):
            words, text = samples(*start, "--train-iters", "2")
            self.assertTrue(words and all(line.startswith(" www w w") for line in words), words)
            self.assertIn(f"text of {folder}/step-00000001/tokenizer.json", text)
        # A tokenizer that the trainer cannot decode is copied into checkpoints; a missing one is an error.
        Path(self.path("tokenizer.json")).write_text("{}")
        words, text = samples("--tokenizer", self.path("tokenizer.json"))
        self.assertEqual(words, ids)
        self.assertIn("note: samples: token ids, tokenizer ", text)
        done = self.run_train(GPT2, *options, "--tokenizer", self.path("nowhere"), expect=2)
        self.assertIn("nowhere: no such file or directory", done.stderr)
        done = self.run_train(GPT2, "--train-iters", "1", "--tokenizer", self.dir, expect=2)
        self.assertIn("--tokenizer has no effect: no checkpoint is written without --save", done.stderr)

    def test_version(self):
        for words in (["--version"], ["plan", "--version"], ["--no-such-option", "--version"]):
            done = run_command([GPT2, *words], None)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertRegex(done.stdout, r"\Allm\.fp8 train_gpt2, commit \w+")
            device = "CUDA [0-9.]+" if os.path.basename(BUILD).startswith("cuda") else "CPU"
            self.assertRegex(done.stdout, rf"(?m)^compiler   \S.*\d\ndevice     {device}.*\n"
                             r"libraries  .*nlohmann/json \d")
