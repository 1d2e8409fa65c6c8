"""Runs of the real executables: FP8, golden losses, data, signals, bad input. Standard library only."""
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support.run_command import run_command
from tests.support.train import (BUILD, GPT2, LLAMA, ROOT, SIXTY_FOUR, TrainTest, make_tokens, records,
                                 write_hellaswag, write_shard)


class Train(TrainTest):
    FP8 = {"delayed": ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "3"],
           "delayed-interval": ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "4", "--fp8-interval", "2",
                                "--fp8-margin", "1", "--fp8-format", "e4m3"],
           "tensorwise": ["--fp8-recipe", "tensorwise", "--fp8-lm-head"],
           "tensorwise-1F1L": ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16",
                               "--num-layers-at-end-in-bf16", "0"],
           "blockwise": ["--fp8-recipe", "blockwise"],
           "int8-forward": ["--fp8-recipe", "int8-forward", *SIXTY_FOUR]}

    FP8_ATTENTION = ["--kv-channels", "64", "--fp8-attention"]

    def test_fp8_attention(self):
        done = self.run_train(LLAMA, "--train-iters", "2", *self.FP8_ATTENTION)
        self.assertIn("attention: QK^T of the forward in INT8, PV in E4M3; dV, dP, dQ and dK in BF16; ", done.stdout)

    def test_fp8_that_did_not_run_ends_with_3(self):
        options = ["--train-iters", "2", "--fp8-recipe", "tensorwise"]
        out = self.run_train(LLAMA, *options).stdout
        self.assertRegex(out, r"FP8 matmuls ran in the first step \(.*\), as planned\n")
        done = self.run_train(LLAMA, "--train-iters", "1", *self.FP8["int8-forward"])
        self.assertIn("), as planned; those of the forward pass among them are in INT8\n", done.stdout)
        self.assertRegex(out, r"first step done after [\d.]+ s: launch .*, data .*, weights .*, step [\d.]+\n")
        done = self.run_train(LLAMA, *options, faults="bf16@1.down", expect=3)
        self.assertIn("ran 42 FP8 matmuls, the plan has 48", done.stderr)

    def test_fp8_matmuls_are_those_the_profiler_saw(self):
        """Nsight Compute lists the kernels of the second step; those with FP8 operands in their names must be as many
        as planned."""
        if not os.path.basename(BUILD).startswith("cuda") or not shutil.which("ncu"):
            self.skipTest("needs a CUDA build and ncu")
        for recipe, planned in (("none", 0), ("delayed", 48), ("tensorwise", 48), ("blockwise", 48)):
            with self.subTest(recipe):
                run = self.command(LLAMA, "--train-iters", "2", "--profile", "2:2", "--fp8-recipe", recipe)
                done = run_command(["ncu", "--csv", "--profile-from-start", "off", "--metrics",
                                    "gpu__time_duration.sum", *run], None)
                if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
                    self.skipTest("this user may not read the GPU's counters")
                self.assertEqual(done.returncode, 0, done.stderr + done.stdout[-2000:])
                table = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
                names = [row["Kernel Name"] for row in table]
                # In names of cuBLASLt's kernels q is E4M3 and r is E5M2.
                fp8 = [name for name in names if re.search(r"nvjet\w*_[qr][qr]|gemm\w*e[45]m[23]", name)]
                self.assertEqual(len(fp8), planned, sorted(set(names)))

    def test_a_changed_fp8_recipe_is_a_logged_migration(self):
        save = ["--save", self.path("run"), "--save-interval", "2", "--log-file", self.path("log.jsonl")]
        self.run_train(LLAMA, "--train-iters", "2", *save)
        for steps, recipe, said in ((4, "delayed", "changed from none to delayed"),
                                    (6, "tensorwise", "changed from delayed to tensorwise"),
                                    (8, "delayed", "changed from tensorwise to delayed")):
            done = self.run_train(LLAMA, "--train-iters", str(steps), *save, "--resume", "auto", "--fp8-recipe", recipe)
            self.assertIn(said, done.stdout)
            self.assertEqual(records(self.path("log.jsonl"), "step")[-1]["step"], steps)
        # Leaving out the option does not continue the run in BF16.
        done = self.run_train(LLAMA, "--train-iters", "10", *save, "--resume", "auto", expect=2)
        self.assertIn("--fp8-recipe delayed", done.stderr)
        done = self.run_train(LLAMA, "--train-iters", "10", *save, "--resume", "auto", "--fp8-recipe", "none")
        self.assertIn("changed from delayed to none", done.stdout)

    def test_fp8_state_of_other_histories_or_linears_is_started_anew_and_told(self):
        save = ["--save", self.path("run"), "--save-interval", "2", "--log-file", self.path("log.jsonl"), "--resume",
                "auto", "--fp8-recipe", "delayed"]
        length = ["--fp8-amax-history-len", "3"]
        anew = "scales start again, calibrated by the first micro-batch"
        for steps, options, told in ((2, [], None), (4, length, anew), (6, [*length, "--bf16-linears", "1.up"], anew),
                                     (8, length, anew), (10, [*length, "--fp8-format", "e4m3"], anew),
                                     (12, [*length, "--fp8-format", "e4m3", "--fp8-margin", "1"], None)):
            with self.subTest(options):
                done = self.run_train(LLAMA, "--train-iters", str(steps), *save, *options)
                self.assertEqual(anew in done.stdout, told is not None, done.stdout)
                # With delayed scaling there is one more, the calibration step.
                primes = steps == 2 or told is not None
                self.assertIn(f"in the first step ({2 + primes} micro-batches)", done.stdout)
        self.assertIn("--fp8-margin", done.stdout)
        self.assertEqual([r["step"] for r in records(self.path("log.jsonl"), "step")], list(range(1, 13)))

    def test_evaluations_of_a_run(self):
        evaluation = ["--valid-data", self.path("valid.bin"), "--eval-iters", "2", "--eval-interval", "1"]
        write_hellaswag(self.path("hellaswag.bin"), 5, 16)
        first = {}
        for recipe, more in (("delayed", ["--hellaswag-data", self.path("hellaswag.bin")]), ("tensorwise", [])):
            log = self.path(recipe + ".jsonl")
            self.run_train(LLAMA, "--train-iters", "2", "--fp8-recipe", recipe, *evaluation, *more, "--log-file", log)
            first[recipe] = records(log, "eval")[0]["loss"]
        scores = records(self.path("delayed.jsonl"), "hellaswag")
        self.assertEqual([(r["step"], r["examples"]) for r in scores], [(step, 5) for step in range(3)])
        # Before the first step there is no history: delayed scaling evaluates as current scaling does.
        self.assertEqual(first["delayed"], first["tensorwise"])

    def test_the_logged_command_can_be_pasted(self):
        log = self.path("it's a log.jsonl")
        done = self.run_train(GPT2, "--train-iters", "1", "--log-file", log)
        command = records(log, "header")[0]["command"]
        self.assertEqual(command, shlex.join(done.args))
        self.assertIn(f"--train-data '{self.path('train_*.bin')}' --train-iters", command)

    def test_a_skipped_step_does_not_prime_fp8(self):
        log = self.path("log.jsonl")
        done = self.run_train(LLAMA, "--train-iters", "3", "--fp8-recipe", "delayed", "--save", self.path("fp8"),
                              "--log-file", log, faults="nan@step=1")
        self.assertEqual([r["skipped"] for r in records(log, "step")], [True, False, False])
        self.assertRegex(done.stdout, r"step 1: the first value that is not finite is in micro-batch 0, \d\.\w+\.\w+")
        self.assertIn("the next step calibrates again", done.stdout)
        state = json.loads(Path(self.path("fp8", "step-00000003", "state.json")).read_text())["fp8"]
        infinity = 0x7f800000
        self.assertTrue(all(bits < infinity for t in state["tensors"].values() for bits in t["history_bits"]))
        self.assertEqual({t["updates"] for t in state["tensors"].values()}, {3})   # the calibration step and two steps

    def test_golden_losses(self):
        """The losses of fixed runs must equal committed ones to the bit. A refactoring must not change them; a numeric
        change must show both curves. LLMC_UPDATE_GOLDEN=1 rewrites the file."""
        if os.path.basename(BUILD).startswith("cuda"):
            self.skipTest("golden losses are those of the CPU device")
        runs = {
            "gpt2-bf16": (GPT2, []),
            "gpt2-fp32": (GPT2, ["--dtype", "fp32"]),
            "llama-bf16": (LLAMA, []),
            "llama-bf16-states": (LLAMA, ["--grad-dtype", "bf16", "--moment-dtype", "bf16"]),
            "llama-muon": (LLAMA, ["--optimizer", "muon"]),
            "gpt2-muon-fp32": (GPT2, ["--optimizer", "muon", "--muon-scale", "spectral", "--dtype", "fp32"]),
            "llama-fp8-moments": (LLAMA, ["--moment-dtype", "fp8"]),
            "llama-experts": (LLAMA, ["--num-experts", "4"]),
            "llama-qk-norm-fp32": (LLAMA, ["--qk-layernorm", "--dtype", "fp32"]),
        }
        runs.update({f"{family}-{name}": (binary, options) for name, options in self.FP8.items()
                     for family, binary in (("gpt2", GPT2), ("llama", LLAMA))})
        runs["gpt2-fp8-attention"] = (GPT2, self.FP8_ATTENTION)
        runs["llama-delayed-fp8-attention"] = (LLAMA, [*self.FP8["delayed"], *self.FP8_ATTENTION])
        losses = {}
        for name, (binary, options) in runs.items():
            log = self.path(name + ".jsonl")
            self.run_train(binary, "--train-iters", "12", "--log-file", log, *options)
            losses[name] = [r["loss"] for r in records(log, "step")]
        golden = os.path.join(ROOT, "tests", "golden", "losses.json")
        if os.environ.get("LLMC_UPDATE_GOLDEN"):
            lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in losses.items())
            Path(golden).write_text("{" + lines + "}\n")
        self.assertEqual(losses, json.loads(Path(golden).read_text()))
        self.assertNotEqual(losses["gpt2-bf16"], losses["gpt2-fp32"])

    def test_a_disk_without_room_is_refused_before_the_first_step(self):
        many = ["--train-iters", str(10 ** 9), "--save-interval", "1", "--save", self.path("new", "run")]
        done = self.run_train(GPT2, *many, "--keep", str(10 ** 9), expect=7)
        self.assertRegex(done.stderr, r"no space for 1000000001 checkpoints of --save \S*new/run under \S+: \d+ bytes "
                                      r"needed, \d+ free; free some, choose another --save or a smaller --keep")
        self.assertNotIn("step 1 ", done.stdout)
        self.assertFalse(os.path.exists(self.path("new")))
        few = ["--train-iters", "3", "--save-interval", "1", "--save", self.path("run")]
        # The disk needs room for the checkpoints that the run writes, which are fewer than --keep.
        self.run_train(GPT2, *few, "--keep", str(10 ** 9))
        self.assertEqual(len(self.checkpoints("run")), 3)

    def test_load_starts_from_the_weights_only(self):
        self.run_train(LLAMA, "--train-iters", "30", "--save", self.path("run"), "--log-file", self.path("a.jsonl"))
        self.run_train(LLAMA, "--train-iters", "1", "--load", self.path("run", "step-00000030"),
                       "--log-file", self.path("b.jsonl"))
        first = records(self.path("a.jsonl"), "step")[0]["loss"]
        loaded = records(self.path("b.jsonl"), "step")[0]["loss"]
        self.assertLess(loaded, first - 0.5)
        # The log says what data and weights these were, by their content: not by the names of files.
        shutil.copytree(self.path("run", "step-00000030"), self.path("copy"))
        shutil.move(self.path("train_0.bin"), self.path("train_00.bin"))
        self.run_train(LLAMA, "--train-iters", "1", "--load", self.path("copy"), "--log-file", self.path("c.jsonl"))
        write_shard(self.path("train_1.bin"), make_tokens(2001, 9))
        self.run_train(LLAMA, "--train-iters", "1", "--load", self.path("run", "step-00000030"),
                       "--log-file", self.path("d.jsonl"))
        a, b, c, d = (records(self.path(f"{name}.jsonl"), "header")[0]["identity"] for name in "abcd")
        self.assertEqual(b, {**a, "load": c["load"]})
        self.assertEqual(c, b)
        self.assertNotEqual(d["train-data"], b["train-data"])
        self.assertEqual(d["load"], b["load"])

    def test_attention_stays_within_documents(self):
        for name in ("train_0", "train_1", "valid"):
            Path(self.path(name + ".meta.json")).write_text('{"tokenizer": {"separator": 0}}')
        options = ["--train-iters", "1", "--valid-data", self.path("valid.bin"), "--eval-iters", "3", "--save",
                   self.path("run")]
        losses = []
        for mask in ("false", "true"):
            log = self.path(mask + ".jsonl")
            shutil.rmtree(self.path("run"), ignore_errors=True)
            self.run_train(LLAMA, *options, "--reset-attention-mask=" + mask, "--log-file", log)
            losses.append([records(log, kind)[0]["loss"] for kind in ("step", "eval")])   # before the first update
        for off, on in zip(*losses):
            self.assertNotEqual(on, off)
            self.assertAlmostEqual(on, off, delta=0.1)
        done = self.run_train(LLAMA, *options, "--train-iters", "2", "--resume", "auto", "--reset-attention-mask=false",
                              expect=2)
        self.assertIn("reset-attention-mask", done.stderr)
        os.unlink(self.path("valid.meta.json"))
        done = self.run_train(GPT2, *options, "--reset-attention-mask", expect=2)
        self.assertIn("valid.bin' does not name the token that separates documents", done.stderr)


class Signals(TrainTest):
    measures_time = True   # of tests/run.py

    def test_a_sample_that_a_stop_interrupts_is_made_again(self):
        options = ["--train-iters", "9", "--save", self.path("run"), "--sample-every", "4", "--sample-tokens", "5"]
        faulty = self.command(GPT2, *options, faults="term@sample=2")
        subprocess.run(faulty, check=True, capture_output=True, timeout=60)
        log = self.path("run", "log.jsonl")
        self.assertEqual([r["step"] for r in records(log, "sample")], [0])
        self.run_train(GPT2, *options, "--resume", "auto")
        self.assertEqual([r["step"] for r in records(log, "sample")], [0, 4, 8])

    def test_a_second_signal_a_second_later_ends_the_run_at_once(self):
        command = [GPT2, "--model", "gpt2-tiny", "--synthetic-data", "--seq-length", "64", "--micro-batch-size", "2",
                   "--global-batch-size", "20000", "--train-iters", "9", "--save", self.path("run")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in process.stdout:
            if "attention: row by row" in line:   # the first step has begun, and takes minutes
                break
        for _ in range(2):
            time.sleep(1.2)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("error: a second signal more than 1 s after the first ends the run at once", err)
        self.assertEqual(self.checkpoints("run"), [])
