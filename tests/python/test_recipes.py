"""The recipes: the plan of each must agree with its comment and with the table, and without data
each must print how to make it."""
import json
import os
import re
import shlex
import subprocess
import sys
import unittest
from pathlib import Path

from tests.support.folder import FolderTest
from tests.support.ranks import HAVE_RANKS
from tests.support.run_command import run_command
from tests.support.train import BUILD, ROOT, records

SCRIPTS = os.path.join(ROOT, "scripts", "recipes")
LLAMA8B = {"ranks": 8, "model": "llama3-8B", "seq-length": 8192, "micro-batch-size": 1, "global-batch-size": 128,
           "fp8-recipe": "none", "recompute": "none"}
SMALL = {"ranks": 1, "model": "llama3-small", "seq-length": 2048, "global-batch-size": 64, "fp8-recipe": "none"}
GPT2 = {"ranks": 1, "model": "gpt2-124M", "seq-length": 1024, "global-batch-size": 512, "fp8-recipe": "none",
        "normalization": "LayerNorm"}
MODERN = {**GPT2, "normalization": "RMSNorm", "position-embedding-type": "rope", "num-query-groups": 4,
          "qk-layernorm": True}
TUNE = {"ranks": 8, "seq-length": 4096, "micro-batch-size": 4, "global-batch-size": 256, "recompute": "block",
        "fp8-recipe": "none", "rope-scaling-factor": 8}
LLAMA70B = {"ranks": 4, "model": "llama3.1-70B", "seq-length": 8192, "micro-batch-size": 1, "global-batch-size": 16,
            "zero": 3, "offload": ["masters", "activations"], "offload-fraction": 0.95,
            "recompute": "block-keep-attention", "grad-dtype": "bf16", "grad-shard-dtype": "bf16",
            "moment-dtype": "bf16"}
QWEN3_MOE = {"ranks": 4, "model": "qwen3-30B-A3B", "seq-length": 4096, "micro-batch-size": 2, "global-batch-size": 32,
             "expert-parallel": 4, "recompute": "block", "grad-dtype": "bf16", "moment-dtype": "bf16"}
DELAYED = {"fp8-recipe": "delayed"}
RECIPES = {
    "train_llama3_8b_h200_bf16": LLAMA8B,
    "train_llama3_8b_h200_fp8": {**LLAMA8B, **DELAYED, "fp8-amax-history-len": 1024, "fp8-format": "hybrid"},
    "train_llama3_8b_h200_fp8_cs": {**LLAMA8B, "fp8-recipe": "tensorwise", "first-last-layers-bf16": False},
    "train_llama3_8b_h200_fp8_cs_1F1L": {**LLAMA8B, "fp8-recipe": "tensorwise", "first-last-layers-bf16": True,
                                         "num-layers-at-start-in-bf16": 1, "num-layers-at-end-in-bf16": 1},
    "train_llama3_8b_h200_fp8_blockwise": {**LLAMA8B, "fp8-recipe": "blockwise"},
    "train_llama3_8b_h200_int8_forward": {**LLAMA8B, "fp8-recipe": "int8-forward"},
    "train_llama31_70b_h200x4_fp8": {**LLAMA70B, **DELAYED},
    "train_qwen3_30b_a3b_h200x4_fp8": {**QWEN3_MOE, "fp8-recipe": "blockwise"},
    "train_llama_1gpu_bf16_slimpajama": SMALL,
    "train_llama_1gpu_fp8_slimpajama": {**SMALL, **DELAYED},
    "train_gpt2_124M_bf16": GPT2,
    "train_gpt2_124M_fp8": {**GPT2, **DELAYED},
    "train_gpt2_modern_bf16": MODERN,
    "train_gpt2_modern_fp8": {**MODERN, **DELAYED},
    "finetune_llama31_8b_bf16": TUNE,
    "finetune_llama31_8b_fp8": {**TUNE, **DELAYED},
}
# Options with which a run of any recipe takes a second.
TINY = ["--num-layers", "3", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4",
        "--train-iters", "2"]


def number(text):
    return float(text.replace(",", ""))


def read(path):
    return Path(path).read_text()


class RecipesTest(FolderTest):
    def recipe(self, name, *options, expect=0, **environment):
        """Runs a script in an empty folder, with one rank and no launcher unless RANKS is set."""
        plain = {k: v for k, v in os.environ.items() if k not in ("DATA", "MODEL", "TOKENIZER", "RANKS")}
        return run_command([os.path.join(SCRIPTS, name + ".sh"), *options], expect, cwd=self.folder,
                           env={**plain, "LLMC_BUILD": BUILD, "OMP_NUM_THREADS": "1", **environment})

    def comment(self, name):
        lines = read(os.path.join(SCRIPTS, name + ".sh")).splitlines()
        self.assertEqual(lines[0], "#!/bin/bash")
        self.assertLessEqual(len(lines), 10, "a recipe is what it adds to its model")
        return " ".join(line[2:] for line in lines[1:] if line.startswith("# "))

    def test_every_recipe_is_tested_and_listed(self):
        scripts = {n[:-3] for n in os.listdir(SCRIPTS) if re.match(r"(train|finetune)_.*\.sh$", n)}
        self.assertEqual(scripts, set(RECIPES))
        listed = re.findall(r"^\| \[(\w+)\]\(recipes/\1\.sh\) ", read(os.path.join(ROOT, "scripts", "README.md")), re.M)
        self.assertEqual(sorted(listed), sorted(RECIPES))
        for name in RECIPES:
            self.assertTrue(os.access(os.path.join(SCRIPTS, name + ".sh"), os.X_OK), name)

    def test_dry_runs_are_what_comments_and_the_table_say(self):
        table = read(os.path.join(ROOT, "scripts", "README.md"))
        for name, facts in RECIPES.items():
            with self.subTest(name):
                plan = self.recipe(name, "--dry-run", MPIRUN="/nowhere").stdout
                config = json.loads(self.recipe(name, "--dry-run", "--print-config", MPIRUN="/nowhere").stdout)
                self.assertEqual({option: config.get(option) for option in facts}, facts)
                found = re.search(r"\nranks +(\d+), (\d+) micro-batches of (\d+) x (\d+) tokens", plan)
                ranks, micro_batches, sequences, length = map(int, found.groups())
                self.assertEqual((ranks, ranks * micro_batches * sequences, length),
                                 (facts["ranks"], facts["global-batch-size"], facts["seq-length"]))
                tokens, steps, whole = re.search(r"\ntokens +(\d+) per step, (\d+) steps, (\S+) in all", plan).groups()
                self.assertEqual(int(tokens), facts["global-batch-size"] * facts["seq-length"])
                self.assertEqual("FP8 against BF16, predicted" in plan, facts["fp8-recipe"] != "none")
                # The comment.
                text = self.comment(name)
                said = re.search(r"([\d,]+) steps of (\d+) x (\d+) tokens", text).groups()
                self.assertEqual([number(s) for s in said],
                                 [int(steps), facts["global-batch-size"], facts["seq-length"]])
                total, unit = re.search(r"= ([\d.]+) ([BM]) tokens", text).groups()
                total = float(total) * {"B": 1e9, "M": 1e6}[unit]
                self.assertLess(abs(total - float(whole)), 0.005 * total)
                self.assertIn("one H200" if ranks == 1 else f"{ranks} ", text)
                # The table: GPUs, tokens, steps, seconds (in italics those that plan predicts) and hours.
                cells = re.search(r"^\| \[%s\]\(.*" % name, table, re.M).group().strip(" |").split(" | ")[2:]
                self.assertEqual([number(c) for c in cells[:3]], [ranks, int(tokens), int(steps)])
                seconds = float(cells[3].strip("*"))
                self.assertLess(abs(int(steps) * seconds / 3600 - float(cells[4])), 0.051)
                predicted = float(re.search(r"\npredicted +([\d.]+) s/it", plan).group(1))
                if cells[3].startswith("*"):
                    self.assertLess(abs(predicted - seconds), 0.51 * 10 ** -len(cells[3].strip("*").split(".")[1]))

    def test_the_readme_counts_them(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            self.assertIn(f"has {len(RECIPES)} published training configurations", file.read())

    def test_options_of_the_user_win(self):
        mine = ["--dry-run", "--train-iters", "7", "--global-batch-size=128"]
        self.assertIn("tokens            131072 per step, 7 steps", self.recipe("train_gpt2_modern_fp8", *mine).stdout)
        config = json.loads(self.recipe("train_gpt2_modern_fp8", *mine, "--print-config").stdout)
        self.assertEqual(config["lr-warmup-iters"], 0)
        plan = self.recipe("train_llama3_8b_h200_bf16", "--dry-run", RANKS="4").stdout
        self.assertIn("ranks             4, 32 micro-batches", plan)
        self.assertIn("--fp8-recipe", self.recipe("train_gpt2_124M_fp8", "--help").stdout)
        done = self.recipe("train_gpt2_124M_fp8", "--dry-run", "--no-such-option", expect=2)
        self.assertIn("no-such-option", done.stderr)

    def test_without_data_the_command_that_makes_it_is_printed_and_works(self):
        for name in RECIPES:
            model = {"MODEL": os.path.join(ROOT, "tests", "fixtures", "llama")} if "finetune" in name else {}
            done = self.recipe(name, expect=2, **model)
            self.assertEqual(done.stdout, "")
            command = re.search(r"^  (\S+prepare_text\.py .*)$", done.stderr, re.M).group(1)
            folder = "shards/openwebtext" if "gpt2" in name else "shards/slimpajama"
            self.assertIn(f" --out {folder} ", command)
        done = self.recipe("finetune_llama31_8b_fp8", expect=2, MODEL="nowhere")
        self.assertRegex(done.stderr, r"no Hugging Face model in nowhere; .*\n  hf download meta-llama/\S+ --local-dir")

        # The same command with a local file instead of the dataset, which needs a network.
        self.file("text", "".join(f"{i * i} is the square of {i}.\n" for i in range(40000)))
        command = self.recipe("train_gpt2_124M_fp8", expect=2).stderr.splitlines()[1].split()
        self.assertEqual(command[-1], "openwebtext")
        command[command.index("gpt2")], command[-1] = "bytes", "text"
        tiny = [*TINY, "--model", "gpt2-tiny"]
        subprocess.run([sys.executable, *command, "--quiet", "--document-bytes", "256"], cwd=self.folder,
                       check=True, timeout=120)
        done = self.recipe("train_gpt2_124M_fp8", *tiny, "--fp8-min-speedup", "0", "--eval-iters", "2")
        self.assertRegex(done.stdout, r"\neval step 2 \| loss ")
        self.assertNotRegex(done.stdout, "SYNTHETIC|synthetic data")
        header = records(self.folder / "logs" / "train_gpt2_124M_fp8.jsonl", "header")[0]
        self.assertIs(header["synthetic_data"], False)
        # Without validation shards there is no validation.
        for shard in self.folder.glob("shards/openwebtext/valid_*"):
            shard.unlink()
        self.assertNotIn("eval step", self.recipe("train_gpt2_124M_bf16", *tiny).stdout)
        # DATA, and shards named on the command line.
        (self.folder / "shards" / "openwebtext").rename(self.folder / "mine")
        self.recipe("train_gpt2_124M_bf16", expect=2)
        for options, environment in (([], {"DATA": "mine"}), (["--train-data", "mine/train_*.bin"], {})):
            self.recipe("train_gpt2_124M_bf16", *tiny, *options, **environment)

    def test_synthetic_data_runs_each_recipe_for_timing(self):
        for name in RECIPES:
            with self.subTest(name):
                tiny = ["gpt2-tiny", "--num-query-groups", "4"] if "gpt2" in name else ["llama-tiny"]
                if "a3b" in name:
                    tiny = ["moe-tiny"]
                if RECIPES[name]["fp8-recipe"] != "none":
                    tiny += ["--fp8-min-speedup", "0"]
                if "finetune" in name or "31_70b" in name:
                    tiny += ["--rope-scaling-factor", "0"]
                if "31_70b" in name:   # activations of the last layers are never offloaded
                    tiny += ["--num-layers", "4"]
                if "int8" in name:   # in-features in multiples of 64
                    tiny += ["--ffn-hidden-size", "384"]
                done = self.recipe(name, *TINY, "--synthetic-data", "--model", *tiny, RANKS="1")
                self.assertRegex(done.stdout, r"\nstep 2/2 .* \| synthetic data\n")
                header = records(self.folder / "logs" / f"{name}.jsonl", "header")[0]
                self.assertEqual((header["synthetic_data"], header["world"]), (True, 1))

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_ranks_are_started_by_the_launcher(self):
        mpi = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.recipe("train_llama3_8b_h200_fp8", *TINY, "--synthetic-data", "--model", "llama-tiny", "--save", "out",
                 RANKS="2", **mpi)
        self.assertEqual(records(self.folder / "out" / "log.jsonl", "header")[0]["world"], 2)
        self.assertFalse((self.folder / "logs").exists())

    def test_fine_tuning_takes_the_weights_and_shape_of_the_model(self):
        model = os.path.join(ROOT, "tests", "fixtures", "llama")
        tiny = TINY[2:]   # the model sets the number of layers
        config = self.recipe("finetune_llama31_8b_bf16", "--print-config", "--synthetic-data", *tiny, MODEL=model,
                          RANKS="1")
        self.assertEqual(json.loads(config.stdout)["load"], model)
        done = self.recipe("finetune_llama31_8b_bf16", "--synthetic-data", *tiny, MODEL=model, RANKS="1")
        self.assertIn("\nstep 2/2 ", done.stdout)
        self.assertNotIn("initial weights", done.stderr)

    def test_missing_executables_are_said(self):
        done = self.recipe("train_gpt2_124M_bf16", "--dry-run", expect=2, LLMC_BUILD="/nowhere")
        self.assertIn("run make", done.stderr)

    def test_command_lines_survive_odd_folders(self):
        folder = str(self.folder / "with space")
        done = self.recipe("train_gpt2_124M_bf16", expect=2, DATA=folder)
        command = shlex.split(done.stderr.splitlines()[1])
        self.assertEqual(command[command.index("--out") + 1], folder)
