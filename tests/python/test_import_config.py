"""scripts/import_config: golden reports (short and with --all), what single settings become, and that the trainer
accepts every JSON that it writes. UPDATE_GOLDEN=1 writes tests/golden/import anew. YAML cases need PyYAML."""
import json
import os
import unittest

from llmfp8.importer.engine import is_open
from llmfp8.importer.option_table import option_table
from llmfp8.importer.report import report
from llmfp8.importer.rows import CANNOT, MEANT, NONE, OTHER, TAKEN, UNKNOWN, read_rows
from llmfp8.importer.tables import ENVIRONMENT, LAUNCHER, SEVEN, SOURCES
from tests.support.import_case import (BUILD, LLAMAFACTORY, MEGATRON, NO_YAML, ROOT, ZERO1, ImportCase,
                                       import_file)
from tests.support.run_command import run_command

GOLDEN = ROOT / "tests" / "golden" / "import"

# name of the golden file: (inputs, further arguments, exit code)
CASES = {
    "deepspeed_wrong": (["wrong_zero1.json"], [], 1),
    "deepspeed_right": (["right_zero1.json"], [], 0),
    "sft_wrong": (["wrong_sft.yaml", "wrong_zero1.json"], ["--ranks", "8"], 1),
    "launch_wrong": (["wrong_launch.sh"], [], 0),
    "launch_right": (["right_launch.sh"], [], 0),
    "megatron_8b": (["megatron_8b.sh"], ["--set", "DATA_PREFIX=data/pile", "--set", "global_batch_size=128"], 1),
    "megatron_gpt2": (["megatron_gpt2.sh"], [], 1),
    "guide": (["guide.yaml"], [], 1),
    "accelerate": (["accelerate.yaml"], [], 0),
    "torchtitan": (["llama3_8b.toml"], [], 1),
}

# error: [(file, text with it, options of ours, text without it)]
SEVEN_CASES = {
    1: [("a.json", ZERO1 + '"fp8": {"enabled": true}}', {"fp8-recipe": "delayed"}, ZERO1 + '"steps_per_print": 1}'),
        ("a.json", ZERO1 + '"fp8": {"enabled": false}}', {"fp8-recipe": None}, ZERO1 + '"seed": 1}')],
    2: [("a.json", ZERO1 + '"data_types": {"grad_accum_dtype": "fp32"}}', {"grad-dtype": "fp32"},
         ZERO1 + '"data_types": {"grad_accum_dtype": "bf16"}}')],
    3: [("a.json", ZERO1 + '"communication_data_type": "fp32"}', {"grad-comm-dtype": "bf16"},
         ZERO1 + '"communication_data_type": "bf16"}')],
    4: [("a.sh", LLAMAFACTORY + "--fp8 true --fp8_backend auto", {"fp8-recipe": "delayed"},
         LLAMAFACTORY + "--fp8 true --fp8_backend te"),
        ("a.sh", LLAMAFACTORY + "--fp8 true", {"fp8-recipe": "delayed"},
         LLAMAFACTORY + "--fp8 true --fp8_backend torchao"),
        ("a.yaml", "mixed_precision: fp8\nfp8_config: {fp8_format: HYBRID}", {"fp8-recipe": "delayed"},
         "mixed_precision: fp8\nfp8_config: {backend: TE}")],
    5: [("a.sh", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" + MEGATRON, {"overlap": None},
         "export CUDA_DEVICE_MAX_CONNECTIONS=32\n" + MEGATRON)],
    6: [("a.sh", "export NVTE_FP8_ALLREDUCE=1\n" + MEGATRON, {"grad-comm-dtype": None}, MEGATRON)],
    7: [("a.sh", LLAMAFACTORY + "--deepspeed ds.json", {"train-iters": 10}, LLAMAFACTORY),
        ("a.yaml", "mixed_precision: bf16\ndeepspeed_config: {deepspeed_config_file: x.json}", {"dtype": "bf16"},
         "mixed_precision: bf16")],
}

STAGE = '{"zero_optimization": {"stage": 1, %s}}'
FP8_CONFIG = "mixed_precision: fp8\nfp8_config:\n  backend: TE\n  override_linear_precision: "
LOAD = str(ROOT / "tests" / "fixtures" / "llama")
BRANCHES = "if [ -z $D ]; then\n  A=(--mock-data)\n%selse\n  A=(--data-path x)\nfi\n" + MEGATRON + "${A[@]}"

# (file, text, {option of ours: value}, [(text of a setting, action, words of its fact)])
READ = [
    # files
    ("a.json", ZERO1 + '"fp8": {"enabled": true, "loss_scale": 0}}', {"fp8-recipe": "delayed"},
     [("fp8.enabled = true", TAKEN, "fp8-recipe delayed"), ("fp8.loss_scale = 0", NONE, "FP16")]),
    ("a.json", ZERO1 + '"fp8": {"enabled": false, "loss_scale": 0}}', {"fp8-recipe": None},
     [("fp8.enabled = false", NONE, ""), ("fp8.loss_scale = 0", NONE, "")]),
    ("a.json", '{// guide\n"zero_optimization": {"stage": 1, },\n"tags": [1, 2,\n], /* the ,} stays */ "note": ",}",\n'
     '"gradient_clipping": 0.5,\n}', {"clip-grad": 0.5}, [("note = ,}", UNKNOWN, ""), ("tags = [1, 2]", UNKNOWN, "")]),
    ("a.json", STAGE % '"offload_optimizer": {"device": "cpu", "ratio": 0.75, "pin_memory": true}',
     {"offload": "moments,masters", "offload-fraction": 0.75}, []),
    ("a.json", STAGE % '"cpu_offload": true', {"offload": "moments,masters", "offload-fraction": None}, []),
    ("a.json", STAGE % '"offload_optimizer": {"device": "none"}', {"offload": None}, []),
    ("a.json", ZERO1 + '"sequence_parallel_size": 2, "gradient_accumulation_steps": 4}',
     {"context-parallel": 2, "global-batch-size": 4, "ranks": None}, []),
    ("a.json", ZERO1 + '"gradient_cliping": 1, "seed": 3}', {"seed": 3},
     [("gradient_cliping = 1", UNKNOWN, "did you mean gradient_clipping?")]),
    ("a.yaml", FP8_CONFIG + "[false, false, false]", {},
     [("fp8_config.override_linear_precision = [false, false, false]", OTHER, "none of fprop, dgrad and wgrad")]),
    ("a.yaml", FP8_CONFIG + "False,False,True", {},
     [("fp8_config.override_linear_precision = False,False,True", CANNOT, "(wgrad) in BF16")]),
    ("a.yaml", FP8_CONFIG + "[yes, true, true]", {},
     [("fp8_config.override_linear_precision = [true, true, true]", CANNOT, "Transformer Engine refuses")]),
    ("a.yaml", "use_fp8: yes\nlearning_rate: 5e-5\nseed: 1_000\n", {"lr": 5e-5, "seed": 1000}, []),
    ("a.yaml", "stage: sft\nfinetuning_type: full\nneat_packing: true\n", {"reset-attention-mask": True}, []),
    ("a.toml", '[model]\nflavor = "8B"\n[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 20\ndecay_ratio = 0.1\n'
     "lr_min = 0.5", {"lr-decay-style": "wsd", "lr-wsd-decay-iters": 10, "lr-warmup-iters": 20, "min-lr": 4e-4,
                      "lr": 8e-4, "fp8-recipe": None}, []),
    ("a.toml", '[model]\nname = "qwen3"\nflavor = "8B"', {"model": "qwen3-8B"},
     [("model.flavor = 8B", TAKEN, "model qwen3-8B")]),
    ("a.toml", '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\nexpert_parallel_degree = 4\n'
     "data_parallel_shard_degree = 4",
     {"model": "qwen3-30B-A3B", "expert-parallel": 4}, []),
    ("a.toml", '[model]\nname = "gpt_oss"\nflavor = "20b"', {"model": "gpt-oss-20B"}, []),
    ("a.toml", '[model]\nname = "llama3"\nflavor = "70B"', {"model": "llama3.1-70B"},
     [("model.flavor = 70B", TAKEN, "scale rope")]),
    ("a.toml", '[model]\nname = "deepseek_v3"\nflavor = "16B"', {"model": None},
     [("model.name = deepseek_v3", CANNOT, "no preset"), ("model.flavor = 16B", CANNOT, "no preset")]),
    ("a.toml", '[training]\nsteps = 100\n[lr_scheduler]\ndecay_ratio = 0.1\ndecay_type = "cosine"',
     {"lr-decay-style": "cosine", "lr-wsd-decay-iters": None},
     [("lr_scheduler.decay_ratio = 0.1", CANNOT, "is linear")]),
    ("a.toml", '[model]\nconverters = "float8"\n[float8]\nrecipe_name = "rowwise"', {"fp8-recipe": "tensorwise"}, []),
    ("a.toml", "[model]\nconverters = []\n[float8]\nenable_fsdp_float8_all_gather = true", {"fp8-recipe": None}, []),
    ("a.toml", "[float8]\nenable_float8_linear = true\n[training]\nseq_len = 16384",
     {"fp8-recipe": "tensorwise", "max-position-embeddings": 16384}, []),
    ("a.toml", 'training = {steps = 7, seq_len = 64}\njob.dump_folder = "o"\ncheckpoint.enable = true',
     {"train-iters": 7, "seq-length": 64, "save": "o/checkpoint", "resume": "auto"}, []),
    ("a.toml", "[training]\nsteps = 9\n[model]\nvocab_size = 7", {}, [("model.vocab_size = 7", UNKNOWN, "our tables")]),
    # options
    ("a.sh", MEGATRON + "--calculate-per-token-loss --use-mcore-models --tensorboard-log-interval 1 --fp8-interval 4",
     {}, [("--calculate-per-token-loss", OTHER, "counted tokens of the global"), ("--use-mcore-models", NONE, "Core"),
      ("--tensorboard-log-interval 1", OTHER, "export_log --follow"), ("--fp8-interval 4", OTHER, "acts here")]),
    ("a.sh", MEGATRON + "--optimizer-cpu-offload --optimizer-offload-fraction 0.75",
     {"offload": "moments,masters", "offload-fraction": 0.75}, []),
    ("a.sh", MEGATRON + "--moe-layer-freq 1 --expert-tensor-parallel-size 1 --moe-router-score-function softmax "
     "--moe-expert-capacity-factor 1.2 --moe-shared-expert-intermediate-size 64 --mtp-num-layers 1", {},
     [("--moe-layer-freq 1", TAKEN, "so here"), ("--expert-tensor-parallel-size 1", TAKEN, "so here"),
      ("--moe-router-score-function softmax", TAKEN, "so here"),
      ("--moe-expert-capacity-factor 1.2", CANNOT, "no row is dropped"),
      ("--moe-shared-expert-intermediate-size 64", CANNOT, "set moe-shared-experts"),
      ("--mtp-num-layers 1", CANNOT, "next token only")]),
    ("a.sh", LLAMAFACTORY + "--use_muon true --moe_aux_loss_coef 0.001", {"optimizer": "muon"},
     [("--moe_aux_loss_coef 0.001", OTHER, "moe-router-topk times")]),
    ("a.sh", MEGATRON + "--reset-attention-mask --reset-position-ids",
     {"reset-attention-mask": True, "reset-position-ids": True}, []),
    ("a.sh", MEGATRON, {"weight-decay": 0.01, "adam-beta2": 0.999, "lr-decay-style": "linear", "min-lr": 0,
                        "lr-warmup-iters": 0, "num-query-groups": 4, "model": "gpt2-124M", "dtype": "bf16"}, []),
    ("a.sh", MEGATRON.replace("--bf16", "--adam-beta2 0.9"), {"dtype": "fp32", "adam-beta2": 0.9}, []),
    ("a.sh", LLAMAFACTORY + f"--model_name_or_path {LOAD} --cutoff_len 32", {"load": LOAD}, []),
    ("a.sh", "torchrun --nproc_per_node 8 -m torchtitan.train --training.steps 9 "
     "--parallelism.tensor_parallel_degree=2", {"train-iters": 9, "ranks": 8},
     [("--parallelism.tensor_parallel_degree 2", CANNOT, "")]),
    # words of a launch script
    ("a.sh", "A=(--seed 7)\ntorchrun p.py ${A[@]} " + MEGATRON[24:], {"seed": 7}, []),
    ("a.sh", "A=(--seed)\nA+=(8)\ntorchrun p.py \"${A[@]}\" " + MEGATRON[24:], {"seed": 8}, []),
    ("a.sh", "A=\"--seed 9\"\nB=\"$A --clip-grad 2\"\ntorchrun p.py $B " + MEGATRON[24:],
     {"clip-grad": 2, "seed": 9}, []),
    ("a.sh", "D=a/b\n" + MEGATRON + "--save \"$D\"_c", {"save": "a/b_c"}, []),
    ("a.sh", MEGATRON + "--seed ${S:-${T:-5}}", {"seed": 5}, []), ("a.sh", MEGATRON + "--seed=6", {"seed": 6}, []),
    ("a.sh", MEGATRON + "\\\n  --save 'a b'/\"c d\"", {"save": "a b/c d"}, []),
    ("a.sh", MEGATRON + "--save x # --save y", {"save": "x"}, []),
    ("a.sh", "cat > f <<EOF\n--seed 1\nEOF\n" + MEGATRON + "--seed 2", {"seed": 2}, []),
    ("a.sh", MEGATRON + "--seed 3 > log 2>&1 &\nwait", {"seed": 3}, []),
    ("a.sh", MEGATRON + "--seed 1 --seed 2", {"seed": 2}, [("--seed 1", NONE, "given again")]),
    ("a.sh", MEGATRON + "--seed $SEED", {"seed": None}, [("--seed $SEED", UNKNOWN, "--set")]),
    ("a.sh", MEGATRON + "\\\n# no comment ends a command\n--seed 4", {"seed": 4},
     [("a line that begins with an option", MEANT, "line 1 ended before it")]),
    # conditions
    ("a.sh", "while true; do\nif [ -f x ]; then\n  break\nfi\n" + MEGATRON + "\ndone", {"num-layers": 2}, []),
    ("a.sh", "A=1\nif [[ $A == 1 ]] || [[ $A == 2 ]]; then\n  B=(--seed 4)\nfi\n" + MEGATRON + "${B[@]}", {"seed": 4},
     [("if [[ $A == 1 ]] || [[ $A == 2 ]]; then", UNKNOWN, "not evaluated")]),
    ("a.sh", BRANCHES % "", {"synthetic-data": None, "train-data": ["x.bin"]},
     [("if [ -z $D ]; then", UNKNOWN, "what begins in line 2 is left out")]),
    ("a.sh", BRANCHES % "elif x; then\n  A=(--data-path y)\n", {"train-data": ["y.bin"]},
     [("if [ -z $D ]; then", UNKNOWN, "what begins in line 2 or 5 is left out")]),
    ("a.sh", "case $1 in\n8b)\n  L=\"--seed 8\" ;;\n*) L=\"--seed 9\" ;;\nesac\n" + MEGATRON + "$L", {"seed": 8},
     [("case $1 in", UNKNOWN, "what begins in line 4 is left out")]),
]

# (more options, option that has no effect, word of the reason)
NO_EFFECT = [
    ("--fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 9", "fp8-amax-history-len", "only"),
    ("--fp8-format hybrid --fp8-recipe blockwise --fp8-margin 1", "fp8-margin", "only delayed"),
    ("--fp8-format hybrid --fp8-amax-history-len 8", "fp8-amax-history-len", "most_recent"),
    ("--fp8-recipe tensorwise", "fp8-recipe", "without --fp8-format"), ("--rotary-base 5", "rotary-base", "learned"),
    ("--eval-iters 5", "eval-iters", "--valid-data"), ("--save-interval 5", "save-interval", "--save"),
    ("--num-query-groups 2", "num-query-groups", "--group"),
]

SCRIPT = LLAMAFACTORY + "--max_grad_norm 1.0 --gradient_accumulation_steps 4 "
# (files, more arguments, expected text of the one error line)
CONTRADICTIONS = [
    ({"a.sh": SCRIPT, "b.json": ZERO1 + '"gradient_clipping": 0.5}'}, [],
     ["a.sh:1", "--max_grad_norm 1.0", "b.json:1", "gradient_clipping = 0.5", "make them equal"]),
    ({"a.sh": SCRIPT, "b.json": ZERO1 + '"gradient_accumulation_steps": 8}'}, [],
     ["--gradient_accumulation_steps 4", "gradient_accumulation_steps = 8"]),
    ({"a.sh": SCRIPT, "b.json": ZERO1 + '"train_batch_size": 66}'}, [],
     ["train_batch_size = 66", "--gradient_accumulation_steps 4", "66 is not 1 x 4 x a number of ranks"]),
    ({"a.sh": SCRIPT, "b.json": ZERO1 + '"train_batch_size": 64}'}, ["--ranks", "8"],
     ["64 is not 1 x 4 x 8 ranks", "or --ranks"]),
    ({"a.json": ZERO1 + '"train_batch_size": 10, "gradient_accumulation_steps": 4}'}, [],
     ["a.json:1: train_batch_size = 10 and a.json:1: gradient_accumulation_steps = 4"]),
    ({"a.json": ZERO1 + '"sequence_parallel_size": 2, "gradient_accumulation_steps": 4, "train_batch_size": 32, '
      '"train_micro_batch_size_per_gpu": 1}'}, ["--ranks", "8"], ["32 is not 1 x 4 x 8 ranks / context-parallel 2"]),
]

# (file, content, expected text of the one error line)
BAD = [
    ("a.json", '{"zero_optimization": {"stage": 1,\n}', ["a.json:2", "not JSON", "correct"]),
    ("a.json", '[1]', ["a.json:1", "object"]),
    ("a.json", '{"seed": 1,\n "zero_optimization": {},\n "seed": 2}', ["a.json:3", '"seed"', "twice"]),
    ("a.json", '{"zero_optimization": {"stage": 1},\n"gradient_clipping": "high"}', ["a.json:2", "high", "a number"]),
    ("a.json", ZERO1 + '"optimizer": {"params": {"betas": ["x", 1]}}}', ["a.json:1", "betas x", "a number"]),
    ("a.json", '{"apples": 1}', ["a.json:1", "apples", "neither"]),
    ("a.json", "", ["a.json:1", "empty"]), ("a.json", b"\xff\xfe{}", ["a.json:1", "UTF-8"]),
    ("a.json", b"\n{\0}", ["a.json:2", "no text"]),
    ("a.sh", MEGATRON.replace("--num-layers 2", "--num-layers two"), ["a.sh:1", "num-layers", "two", "whole number"]),
    ("a.sh", MEGATRON.replace("--lr 1e-3", "--lr"), ["a.sh:1", "lr", "a number"]),
    ("a.sh", "A=(\n--num-layers 2\n", ["a.sh:1", "A=(", "close it"]),
    ("a.sh", "\n\necho 'never closed\n", ["a.sh:3", "never closed"]), ("a.sh", "ls -la\n", ["a.sh:1", "neither"]),
    ("a.json", ZERO1 + '"train_batch_size": 4, "gradient_accumulation_steps": 0}', ["a.json:1", "must be 1 or more"]),
    ("a.toml", "[training]\nsteps = = 3\n", ["a.toml:2", "not TOML", "correct"]),
    ("a.toml", "[training]\nseq_len = 8\n# steps = 3\nsteps = 'many'\n", ["a.toml:4", "training.steps", "many"]),
    ("a.toml", "[tool.poetry]\nname = 'x'\n", ["a.toml:2", "neither", "tool.poetry.name"]),
    ("a.yaml", "use_fp8: true\nfp8_margin: [1\n", ["a.yaml:3", "not YAML", "correct"]),
    ("a.yaml", "use_fp8: true\nfp8_margin: low\n", ["a.yaml:2", "fp8_margin", "low"]),
    ("a.yaml", "- use_fp8\n", ["a.yaml:1", "mapping"]),
]


def readable(name):
    return not (NO_YAML and str(name).endswith(".yaml"))


class ImportTest(ImportCase):
    def test_golden_reports_and_the_trainer_accepts_what_they_end_with(self):
        for name, (inputs, more, code) in CASES.items():
            if not all(map(readable, inputs)):
                continue
            with self.subTest(name):
                out = self.folder / "run.json"
                done = self.run_script(*inputs, *more)
                self.assertEqual((done.returncode, done.stderr), (code, ""))
                said, options = done.stdout.split("\n\n{")   # here in one line
                reports = {name: f"{said}\n\n{json.dumps(json.loads('{' + options))}\n"}
                if name == "launch_wrong":   # what is not in the short report
                    every = self.run_script(*inputs, *more, "--all").stdout.splitlines(True)
                    reports[f"{name}_all"] = "".join(line for line in every if line not in done.stdout)
                for golden, text in reports.items():
                    if os.environ.get("UPDATE_GOLDEN"):
                        (GOLDEN / f"{golden}.txt").write_text(text)
                    self.assertEqual(text, (GOLDEN / f"{golden}.txt").read_text())
                # --out writes the same JSON as the end of the report.
                self.assertEqual(self.run_script(*inputs, *more, "--out", out).returncode, code)
                self.assertTrue(done.stdout.endswith("\n\n" + out.read_text()))
                self.assertEqual(out.read_text(), json.dumps(json.loads(out.read_text()), indent=2) + "\n")
                self.assert_accepted(json.loads(out.read_text()), "gpt2" if "./train_gpt2 " in done.stdout else "llama")

    def test_a_plan_of_ranks_that_share_something_needs_their_number(self):
        for text, missing in (("context_parallel_degree = 2", True), ("expert_parallel_degree = 4", True),
                              ("context_parallel_degree = 1", False),
                              ("context_parallel_degree = 2\ndata_parallel_shard_degree = 2", False)):
            text = '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\n' + text
            run = import_file(self.folder, "a.toml", text)
            self.assertEqual(any("--ranks N" in note for note in run.notes), missing, text)

    def test_what_single_settings_become(self):
        for name, text, options, settings in READ:
            if not readable(name):
                continue
            with self.subTest(text):
                run = import_file(self.folder, name, text)
                self.assertEqual({option: run.get(option) for option in options}, options)
                found = {f.text: (f.action, f.fact) for f in run.findings}
                for setting, action, words in settings:
                    self.assertEqual(found[setting][0], action)
                    self.assertIn(words, found[setting][1])
                other = {f.text for f in run.findings if f.action in (CANNOT, UNKNOWN)} - {s for s, *_ in settings}
                self.assertEqual(other, set())
                options = {"train-iters": 5, **run.options()}
                for option in ("train-data", "epochs", "context-parallel"):   # there are no such files, nor ranks
                    options.pop(option, None)
                if "load" not in options:
                    options.setdefault("model", "llama3-8B")
                self.assert_accepted(options, run.family() or "llama")

    def test_variables_from_elsewhere(self):
        for text, given, seed in (("SEED=3\n" + MEGATRON + "--seed $SEED", {"SEED": "4"}, 4),
                                  ("N=4\n" + MEGATRON + "--seed $((N * 2))", {}, None),
                                  ("N=4\n" + MEGATRON + "--seed $((N * 2))", {"seed": "8"}, 8)):
            run = import_file(self.folder, "a.sh", text, given)
            self.assertEqual((run.get("seed"), is_open(run)), (seed, seed is None), text)

    # ---- the first screen ----

    def test_what_an_import_decides_is_on_its_first_screen(self):
        out, plan = self.folder / "run.json", ["--gpu", "H200", "--dry-run"]
        done = self.run_script("llama3_8b.toml", "--out", out)   # it does not fit on one rank
        planned = run_command([BUILD / "train_llama", "--config", out, *plan], None)
        self.assertRegex(planned.stdout, r"ranks +8\b", planned.stderr)
        self.assertNotIn("does not fit", planned.stdout)
        for name, words in (("a.sh", LLAMAFACTORY + "--fp8 true \\  # by hand\n--tf32 true --do_train"),
                            ("a.yaml", "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n")):
            if readable(name):
                (self.folder / name).write_text(words)
                done = self.run_script(self.folder / name, "--out", out)
                for text in (["read as it was meant: this backslash is not the last", "2 --tf32 true", "2 --do_train",
                              "lr-decay-style linear"] if name == "a.sh" else
                             ["distributed_type = MULTI_GPU", "--model NAME or --load DIR: there is no model"]):
                    self.assertIn(text, " ".join(done.stdout.split()))
                self.assertLess(done.stdout.count("\n"), 24)

    def test_what_cannot_be_done_comes_first_and_nothing_is_lost(self):
        many = "".join(f"--unknown-{i} x " for i in range(40))
        run = import_file(self.folder, "a.sh", MEGATRON + "--tensorboard-dir y --split 99,1,0 " + many)
        first = report(run, ["a.sh"], "run.json").split("\n\n")[1]
        self.assertIn("--unknown-3 x and 36 like them: not understood", " ".join(first.split()))
        self.assertIn("--split 99,1,0: not done here", first)
        self.assertNotIn("--tensorboard-dir", first)
        everything = report(run, ["a.sh"], "run.json", everything=True)
        for finding in run.findings:
            self.assertIn(finding.text, everything)
        keys = "".join(f"--unknown-{c} x \\\n--known-{c}-{c * 3} y \\\n" for c in "abcdefgh")
        run = import_file(self.folder, "a.sh", MEGATRON + "--fp4-recipe x --optimizer sgd --window-size 3 "
                          "--moe-layer-freq 2 --rotary-percent 0.5 --load x --fp16 --no-fp8-wgrad "
                          "--lr-decay-style exp --cpu-offloading --data-args-path y --lr-warmup-init 1 " + keys)
        first = report(run, ["a.sh"], "run.json").split("\n\n")[1].split("\n")
        self.assertLessEqual(len(first), 15)
        self.assertRegex(first[-1], r"^  and \d+ more: --all shows them")

    # ---- several settings about one thing ----

    def test_each_of_the_seven_errors_is_found_and_absent_from_its_correction(self):
        self.assertEqual(set(SEVEN_CASES), set(SEVEN))
        for error, cases in SEVEN_CASES.items():
            for name, wrong, expected, right in cases:
                if not readable(name):
                    continue
                with self.subTest(error=error, text=wrong):
                    run = import_file(self.folder, name, wrong)
                    self.assertIn(error, {f.error for f in run.findings})
                    self.assertIn(f"error {error} ({SEVEN[error]})", report(run, [name], "run.json", everything=True))
                    self.assertEqual({option: run.get(option) for option in expected}, expected)
                    fixed = import_file(self.folder, name, right)
                    self.assertNotIn(error, {f.error for f in fixed.findings})
                    for accepted in (run, fixed):
                        self.assert_accepted(accepted.options(), accepted.family())

    def run_files(self, files, *more):
        for name, text in files.items():
            (self.folder / name).write_text(text)
        return self.run_script(*[self.folder / name for name in files], *more)

    def test_settings_that_contradict_each_other_are_named_and_leave_with_2(self):
        for files, more, words in CONTRADICTIONS:
            with self.subTest(files):
                done = self.run_files(files, *more)
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
                for word in ["contradict each other"] + words:
                    self.assertIn(word, done.stderr)
        done = self.run_files({"a.sh": SCRIPT, "b.json": ZERO1 + '"gradient_clipping": 1, "train_batch_size": 32}'},
                              "--ranks", "8", "--out", "-")
        self.assertEqual(json.loads(done.stdout)["global-batch-size"], 32, done.stderr)

    @unittest.skipIf(NO_YAML, "needs PyYAML")
    def test_the_backend_decides_the_recipe_in_any_order_of_the_lines(self):
        for lines, recipe in ((["mixed_precision: fp8", "fp8_config: {backend: AO}"], "tensorwise"),
                              (["mixed_precision: fp8", "fp8_config: {backend: TE}"], "delayed"),
                              (["mixed_precision: bf16", "fp8_config: {backend: AO}"], None),
                              (["finetuning_type: full", "fp8: true", "fp8_backend: torchao"], "tensorwise"),
                              (["finetuning_type: full", "fp8: false", "fp8_backend: torchao"], None),
                              (["use_fp8: true", "fp8_recipe: blockwise"], "blockwise"),
                              (["use_fp8: false", "fp8_recipe: blockwise"], None)):
            for text in ("\n".join(lines), "\n".join(reversed(lines))):
                with self.subTest(text):
                    run = import_file(self.folder, "a.yaml", text)
                    self.assertEqual(run.get("fp8-recipe"), recipe)
                    self.assertNotIn(7, {f.error for f in run.findings})
                    if recipe:   # no line says that another recipe is written
                        self.assertEqual([f.fact for f in run.findings if "fp8-recipe" in f.fact
                                          and f"fp8-recipe {recipe}" not in f.fact], [])

    def test_what_has_no_effect_is_said_and_not_written(self):
        for more, option, word in NO_EFFECT:
            with self.subTest(more):
                run = import_file(self.folder, "a.sh", MEGATRON + more)
                last = run.findings[[f.text.split()[0][2:] for f in run.findings].index(option)]
                self.assertEqual(last.action, NONE)
                self.assertIn(word, last.fact)
                self.assertNotIn(str(run.get(option)), more.split())
                self.assert_accepted(run.options(), run.family())

    # ---- bad input ----

    def test_errors_are_one_line_with_the_place_and_leave_with_2(self):
        for name, text, words in filter(lambda bad: readable(bad[0]), BAD):
            with self.subTest(text=text[:60]):
                path = self.folder / name
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
                done = self.run_script(path)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
        for arguments in (["--set", "1x", "right_zero1.json"], ["--ranks", "-1", "right_zero1.json"],
                          ["right_zero1.json", "right_zero1.json"], ["right_zero1.json", "--out", "no/such/folder"]):
            done = self.run_script(*arguments)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)

    # ---- the tables ----

    def test_tables_name_options_that_exist_and_values_that_they_take(self):
        table = option_table("llama")
        for source in SOURCES:
            written = [item for row in source.rows for item in (*row.sets.items(), *row.weak.items())]
            written += [(name.partition(" ")[0], value) for name, value in source.defaults.items()]
            written += [(row.option, row.value) for row in source.rows if row.option]
            for option, value in written:
                self.assertIn(option, table, source.name)
                if value is not None and "words" in table[option]:
                    self.assertIn(str(value), table[option]["words"])

    def test_rows_say_why_and_none_is_hidden_by_an_earlier_one(self):
        rows = [row for source in SOURCES for row in source.rows] + ENVIRONMENT + LAUNCHER
        for row in rows:
            if row.action != TAKEN:
                self.assertGreater(len(row.fact), 8, row)
        self.assertEqual({row.error for row in rows} - {0}, set(SEVEN))
        for table in ("deepspeed", "megatron", "llamafactory", "accelerate", "guide", "torchtitan", "shared",
                      "launchers"):
            closed = set()
            for row in read_rows(table):
                self.assertFalse(closed & set(row.keys.split()), f"{table}: {row.keys}")
                closed |= set() if row.when else {key for key in row.keys.split() if "*" not in key}
