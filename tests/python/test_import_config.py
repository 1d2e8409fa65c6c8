"""scripts/import_config: golden reports (short and with --all), the seven configuration errors one by one, and that the
trainer accepts every JSON that it writes. UPDATE_GOLDEN=1 writes tests/golden/import anew. YAML cases need PyYAML."""
import json
import os
import unittest

from llmfp8.importer.engine import is_open
from llmfp8.importer.main import SOURCES
from llmfp8.importer.option_table import option_table
from llmfp8.importer.report import report
from llmfp8.importer.rows import NONE, TAKEN, read_rows
from llmfp8.importer.shared_rows import ENVIRONMENT, LAUNCHER, SEVEN
from tests.support.import_case import (FIXTURES, LLAMAFACTORY, LLMC, MEGATRON, NO_YAML, ROOT, ZERO1, ImportCase,
                                       import_file)

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
    "llmc": (["llmc_124M.sh"], [], 1),
    "nanogpt": (["nanogpt_gpt2.py"],
                ["--set", "dtype=bfloat16", "--set", "min_lr=6e-5", "--set", "lr_decay_iters=600000"], 1),
}

EVERY_LINE = ("sft_wrong", "megatron_8b", "launch_wrong")   # those whose report with --all is compared, too

# error: [(file, text with it, what the JSON must have, the text without it)]
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
         "export CUDA_DEVICE_MAX_CONNECTIONS=32\n" + MEGATRON),
        ("a.sh", MEGATRON + "--fp8-format hybrid", {"fp8-recipe": "delayed"},
         "export CUDA_DEVICE_MAX_CONNECTIONS=8\n" + MEGATRON + "--fp8-format hybrid")],
    6: [("a.sh", "export NVTE_FP8_ALLREDUCE=1\n" + MEGATRON, {"grad-comm-dtype": None}, MEGATRON),
        ("a.sh", MEGATRON + "--fp8-format e4m3", {"fp8-format": "e4m3"}, MEGATRON)],
    7: [("a.sh", LLAMAFACTORY + "--deepspeed ds.json", {"train-iters": 10}, LLAMAFACTORY),
        ("a.yaml", "mixed_precision: bf16\ndeepspeed_config: {deepspeed_config_file: x.json}", {"dtype": "bf16"},
         "mixed_precision: bf16")],
}

# (file, content, expected text of the one error line)
BAD = [
    ("a.json", '{"zero_optimization": {"stage": 1,\n}', ["a.json:2", "not JSON", "correct"]),
    ("a.json", '{"zero_optimization": {"stage": 1},\n', ["a.json:2", "not JSON"]),
    ("a.json", '[1]', ["a.json:1", "object"]),
    ("a.json", '{"seed": 1,\n "zero_optimization": {},\n "seed": 2}', ["a.json:3", '"seed"', "twice", "line 1"]),
    ("a.json", '{"zero_optimization": {"stage": 1},\n"gradient_clipping": "high"}', ["a.json:2", "high", "a number"]),
    ("a.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', ["a.json:1", "--load"]),
    ("a.json", '{"apples": 1}', ["a.json:1", "apples", "neither"]),
    ("a.json", "", ["a.json:1", "empty"]),
    ("a.json", b"\xff\xfe{}", ["a.json:1", "UTF-8"]),
    ("a.json", b"{\0}", ["a.json:1", "is not text"]),
    ("a.sh", MEGATRON.replace("--num-layers 2", "--num-layers two"), ["a.sh:1", "num-layers", "two", "whole number"]),
    ("a.sh", MEGATRON.replace("--lr 1e-3", "--lr"), ["a.sh:1", "lr", "a number"]),
    ("a.sh", "A=(\n--num-layers 2\n", ["a.sh:1", "A=(", "add the )"]),
    ("a.sh", "\n\necho 'never closed\n", ["a.sh:3", "never closed"]),
    ("a.sh", "ls -la\n", ["a.sh:1", "neither"]),
    ("a.sh", LLMC + "-t 1000 -d 1500", ["a.sh:1: -d 1500", "multiple of the sequence length 1000"]),
    ("a.json", ZERO1 + '"train_batch_size": 4, "gradient_accumulation_steps": 0}', ["a.json:1", "must be 1 or more"]),
    ("a.toml", "[training]\nsteps = = 3\n", ["a.toml:2", "not TOML", "correct"]),
    ("a.toml", "[training]\nseq_len = 8\nsteps = 'many'\n", ["a.toml:3", "training.steps", "many", "whole number"]),
    ("a.toml", "[tool.poetry]\nname = 'x'\n", ["a.toml:2", "neither", "tool.poetry.name"]),
    ("a.py", "batch_size = 4\nn_layer = 'two'\n", ["a.py:2", "n_layer", "two", "whole number"]),
    ("a.py", "x = 4\n", ["a.py:1", "neither"]),
]
BAD_YAML = [
    ("a.yaml", "use_fp8: true\nfp8_margin: [1\n", ["a.yaml:3", "not YAML", "correct"]),
    ("a.yaml", "use_fp8: true\nfp8_margin: low\n", ["a.yaml:2", "fp8_margin", "low"]),
    ("a.yaml", "- use_fp8\n", ["a.yaml:1", "mapping"]),
]


def table_options():
    """Our options and their allowed values, from the trainer's golden file."""
    lines = (ROOT / "tests" / "golden" / "cli_options.txt").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("--")]
    return {row[0][2:]: row[1] for row in rows}


class ImportTest(ImportCase):
    # ---- whole files ----

    def test_golden_reports_and_the_trainer_accepts_what_they_end_with(self):
        for name, (inputs, more, code) in CASES.items():
            if NO_YAML and any(i.endswith(".yaml") for i in inputs):
                continue
            with self.subTest(name):
                out = self.folder / "run.json"
                done = self.run_script(*inputs, *more)
                self.assertEqual((done.returncode, done.stderr), (code, ""))
                reports = {name: done.stdout}
                if name in EVERY_LINE:
                    reports[f"{name}_all"] = self.run_script(*inputs, *more, "--all").stdout
                for golden, text in reports.items():
                    if os.environ.get("UPDATE_GOLDEN"):
                        (GOLDEN / f"{golden}.txt").write_text(text)
                    self.assertEqual(text, (GOLDEN / f"{golden}.txt").read_text())
                first = done.stdout.split("\n\n")[1]
                self.assertTrue(first.startswith(("Different from what you asked:", "Nothing is different")), first)
                self.assertLessEqual(len(first.split("\n")), 15)
                # --out writes the same JSON as the end of the report.
                self.assertEqual(self.run_script(*inputs, *more, "--out", out).returncode, code)
                self.assertTrue(done.stdout.endswith("\n\n" + out.read_text()))
                self.assert_accepted(json.loads(out.read_text()), "gpt2" if "./train_gpt2 " in done.stdout else "llama")

    def test_what_cannot_be_done_comes_first_and_nothing_is_lost(self):
        many = "".join(f"--unknown-{i} x " for i in range(40))
        run = import_file(self.folder, "a.sh", MEGATRON + "--recompute-granularity selective --overlap-grad-reduce "
                          "--split 99,1,0 " + many)
        text = report(run, [("a.sh", "x", 1)], "run.json")
        first = text.split("\n\n")[1].split("\n")
        self.assertIn("--unknown-3 x and 36 like them: not understood", " ".join(" ".join(first).split()))
        self.assertIn("--split 99,1,0: not done here", "\n".join(first))
        shown = text.split("Look:")[0]
        self.assertNotIn("--overlap-grad-reduce", shown)
        keys = "".join(f"--unknown-{c} x \\\n--known-{c}-{c * 3} y \\\n" for c in "abcdefgh")
        text = report(import_file(self.folder, "a.sh", MEGATRON + "--fp4-recipe x --optimizer sgd --window-size 3 "
                      "--moe-router-topk 2 --rotary-percent 0.5 --exit-interval 3 --load x --fp16 --no-fp8-wgrad "
                      "--lr-decay-style exp --cpu-offloading --data-args-path y --lr-warmup-init 1 " + keys),
                      [("a.sh", "x", 1)], "run.json")
        first = text.split("\n\n")[1].split("\n")
        self.assertLessEqual(len(first), 15)
        self.assertRegex(first[-1], r"^  and \d+ more: --all shows them")
        everything = report(run, [("a.sh", "x", 1)], "run.json", everything=True)
        for finding in run.findings:
            self.assertIn(finding.text, everything)

    def test_every_line_with_a_setting_is_in_the_report(self):
        text = (FIXTURES / "megatron_8b.sh").read_text()
        run = import_file(self.folder, "a.sh", text, {"DATA_PREFIX": "x"})
        lines = {f.line for f in run.findings}
        for number, line in enumerate(text.split("\n"), 1):
            code = line.split(" # ")[0].strip()
            if "--" in code and not code.startswith("#"):
                self.assertIn(number, lines, line)

    # ---- the seven errors ----

    def test_each_of_the_seven_is_named_and_corrected_and_absent_from_its_correction(self):
        self.assertEqual(set(SEVEN_CASES), set(SEVEN))
        for error, cases in SEVEN_CASES.items():
            for name, wrong, expected, right in cases:
                if NO_YAML and name.endswith(".yaml"):
                    continue
                with self.subTest(error=error, text=wrong):
                    run = import_file(self.folder, name, wrong)
                    text = report(run, [(name, "x", 1)], "run.json", everything=True)
                    self.assertIn(error, {f.error for f in run.findings})
                    self.assertIn(f"\n  {error} {SEVEN[error][0]} ({name}", text)
                    for option, value in expected.items():
                        self.assertEqual(run.get(option), value)
                    self.assert_accepted(run.options(), run.family())
                    fixed = import_file(self.folder, name, right)
                    self.assertNotIn(error, {f.error for f in fixed.findings})
                    self.assert_accepted(fixed.options(), fixed.family())

    # ---- several places about one thing ----

    def run_files(self, files, *more):
        for name, text in files.items():
            (self.folder / name).write_text(text)
        return self.run_script(*[self.folder / name for name in files], *more)

    def test_files_that_contradict_each_other_are_named_and_leave_with_2(self):
        script = LLAMAFACTORY + "--max_grad_norm 1.0 --gradient_accumulation_steps 4 "
        for section, more, words in (
                ('"gradient_clipping": 0.5', "", ["--max_grad_norm 1.0", "gradient_clipping = 0.5", "make them equal"]),
                ('"gradient_accumulation_steps": 8', "", ["--gradient_accumulation_steps 4",
                                                          "gradient_accumulation_steps = 8"]),
                ('"train_batch_size": 66', "", ["train_batch_size = 66", "--gradient_accumulation_steps 4",
                                                "66 is not a multiple of 1 x 4"]),
                ('"train_batch_size": 64', "--ranks 8", ["64 is not 1 x 4 x 8 ranks", "or --ranks"])):
            with self.subTest(section):
                done = self.run_files({"a.sh": script, "b.json": ZERO1 + section + "}"}, *more.split())
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
                for word in ["a.sh:1", "b.json:1", "contradict each other"] + words:
                    self.assertIn(word, done.stderr)
        done = self.run_files({"a.sh": script, "b.json": ZERO1 + '"gradient_clipping": 1, "train_batch_size": 32}'},
                              "--ranks", "8", "--out", "-")
        self.assertEqual(json.loads(done.stdout)["global-batch-size"], 32, done.stderr)

    def test_ranks_that_share_sequences_count_once(self):
        parts = ZERO1 + '"sequence_parallel_size": 2, "gradient_accumulation_steps": 4'
        done = self.run_files({"a.json": parts + "}"}, "--ranks", "8", "--out", "-")
        options = json.loads(done.stdout)
        self.assertEqual((options["context-parallel"], options["global-batch-size"]), (2, 16), done.stderr)
        done = self.run_files({"a.json": parts + ', "train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}'},
                              "--ranks", "8")
        self.assertIn("32 is not 1 x 4 x 8 ranks / context-parallel 2", done.stderr)

    def test_parts_of_a_batch_in_one_file_must_fit_too(self):
        done = self.run_files({"a.json": ZERO1 + '"train_batch_size": 10, "gradient_accumulation_steps": 4}'})
        self.assertEqual(done.returncode, 2)
        self.assertIn("a.json:1: train_batch_size = 10 and a.json:1: gradient_accumulation_steps = 4 contradict",
                      done.stderr)

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

    def test_a_section_for_fp8_is_carried_or_refused_but_not_both(self):
        run = import_file(self.folder, "a.json", ZERO1 + '"fp8": {"enabled": true, "loss_scale": 0}}')
        self.assertEqual([(f.text, f.action) for f in run.findings if f.text.startswith("fp8.")],
                         [("fp8.enabled = true", TAKEN), ("fp8.loss_scale = 0", NONE)])
        self.assertEqual(run.get("fp8-recipe"), "delayed")
        run = import_file(self.folder, "a.json", ZERO1 + '"fp8": {"enabled": false, "loss_scale": 0}}')
        self.assertEqual({f.action for f in run.findings if f.text.startswith("fp8.")}, {NONE})
        self.assertIsNone(run.get("fp8-recipe"))

    def test_explanations_are_true_of_the_option_that_they_explain(self):
        for more, action, words in (("--calculate-per-token-loss", "done differently", "counted tokens of the global"),
                                    ("--use-mcore-models", "no effect anywhere", "Megatron Core"),
                                    ("--tensorboard-log-interval 1", "done differently", "export_log --follow"),
                                    ("--fp8-interval 4", "done differently", "fp8-interval acts here")):
            found = import_file(self.folder, "a.sh", MEGATRON + more).findings[-3:]
            found = next(f for f in found if f.text == more)
            self.assertEqual(found.action, action)
            self.assertIn(words, found.fact)
        for value, action, words in (("[false, false, false]", "done differently", "none of fprop, dgrad and wgrad"),
                                     ("[false, false, true]", "not done here", "(wgrad) in BF16"),
                                     ("False,False,True", "not done here", "(wgrad) in BF16"),
                                     ("[true, true, true]", "not done here", "Transformer Engine refuses")):
            if not NO_YAML:
                run = import_file(self.folder, "a.yaml", "mixed_precision: fp8\nfp8_config:\n  backend: TE\n  "
                                  f"override_linear_precision: {value}\n")
                self.assertEqual(run.findings[-1].action, action)
                self.assertIn(words, run.findings[-1].fact)

    def test_what_guides_print_and_deepspeed_reads_is_taken(self):
        run = import_file(self.folder, "a.json", '{// guide\n"zero_optimization": {"stage": 1, },\n'
                          '"tags": [1, 2,\n], /* the ,} of a text stays */ "note": ",}",\n"gradient_clipping": 0.5,\n}')
        self.assertEqual(run.get("clip-grad"), 0.5)
        self.assertEqual([f.line for f in run.findings if f.text == "gradient_clipping = 0.5"], [5])
        self.assertTrue(any(f.text == "note = ,}" for f in run.findings))

    # ---- options without effect, defaults ----

    def test_optimizer_state_in_host_memory_is_taken(self):
        stage = '{"zero_optimization": {"stage": 1, %s}}'
        state = ["--optimizer-cpu-offload --optimizer-offload-fraction 0.75",
                 '"offload_optimizer": {"device": "cpu", "ratio": 0.75, "pin_memory": true}', '"cpu_offload": true']
        for name, text in (("a.sh", MEGATRON + state[0]), ("a.json", stage % state[1]), ("b.json", stage % state[2])):
            run = import_file(self.folder, name, text)
            self.assertEqual(run.get("offload"), "moments,masters", name)
            self.assertEqual(run.get("offload-fraction"), None if name == "b.json" else 0.75)
            self.assert_accepted(run.options(), run.family())
        run = import_file(self.folder, "c.json", stage % '"offload_optimizer": {"device": "none"}')
        self.assertIsNone(run.get("offload"))

    def test_what_has_no_effect_is_said_and_not_written(self):
        for more, option, word in (
                ("--fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 9", "fp8-amax-history-len", "only"),
                ("--fp8-format hybrid --fp8-recipe blockwise --fp8-margin 1", "fp8-margin", "only delayed"),
                ("--fp8-format hybrid --fp8-amax-history-len 8", "fp8-amax-history-len", "most_recent"),
                ("--fp8-recipe tensorwise", "fp8-recipe", "without --fp8-format"),
                ("--eval-iters 5", "eval-iters", "--valid-data"), ("--save-interval 5", "save-interval", "--save"),
                ("--rotary-base 5", "rotary-base", "learned"), ("--num-query-groups 2", "num-query-groups", "--group")):
            with self.subTest(more):
                run = import_file(self.folder, "a.sh", MEGATRON + more)
                last = run.findings[[f.text.split()[0][2:] for f in run.findings].index(option)]
                self.assertEqual(last.action, "no effect anywhere")
                self.assertIn(word, last.fact)
                self.assertNotIn(str(run.get(option)), more.split())
                self.assert_accepted(run.options(), run.family())

    def test_defaults_of_the_other_trainer_are_written_where_ours_differ(self):
        run = import_file(self.folder, "a.sh", MEGATRON)
        wanted = {"weight-decay": 0.01, "adam-beta2": 0.999, "lr-decay-style": "linear", "min-lr": 0,
                  "lr-warmup-iters": 0, "num-query-groups": 4, "model": "gpt2-124M", "dtype": "bf16"}
        self.assertEqual({option: run.get(option) for option in wanted}, wanted)
        self.assertIn("adam-beta2 0.999", report(run, [("a.sh", "x", 1)], "run.json", everything=True))
        run = import_file(self.folder, "a.sh", MEGATRON.replace("--bf16", "--adam-beta2 0.9"))
        self.assertEqual((run.get("dtype"), run.get("adam-beta2")), ("fp32", 0.9))

    def test_weights_of_a_directory_are_loaded(self):
        model = ROOT / "tests" / "fixtures" / "llama"
        run = import_file(self.folder, "a.sh", LLAMAFACTORY + f"--model_name_or_path {model} --cutoff_len 32")
        self.assertEqual(run.get("load"), str(model))
        self.assert_accepted(run.options(), "llama")

    # ---- launch scripts ----

    def test_words_of_a_launch_script(self):
        for text, option, value in (
                ("A=(--seed 7)\ntorchrun p.py ${A[@]} " + MEGATRON[24:], "seed", 7),
                ("A=(--seed)\nA+=(8)\ntorchrun p.py \"${A[@]}\" " + MEGATRON[24:], "seed", 8),
                ("A=\"--seed 9\"\nB=\"$A --clip-grad 2\"\ntorchrun p.py $B " + MEGATRON[24:], "clip-grad", 2),
                ("D=a/b\n" + MEGATRON + "--save \"$D\"_c", "save", "a/b_c"),
                (MEGATRON + "--seed ${S:-${T:-5}}", "seed", 5), (MEGATRON + "--seed=6", "seed", 6),
                (MEGATRON + "\\\n  --save 'a b'/\"c d\"", "save", "a b/c d"),
                (MEGATRON + "--save x # --save y", "save", "x"),
                ("cat > f <<EOF\n--seed 1\nEOF\n" + MEGATRON + "--seed 2", "seed", 2),
                (MEGATRON + "--seed 3 > log 2>&1 &\nwait", "seed", 3),
                (MEGATRON + "--seed 1 --seed 2", "seed", 2)):
            with self.subTest(text):
                self.assertEqual(import_file(self.folder, "a.sh", text).get(option), value)

    def test_variables_from_elsewhere_are_asked_for(self):
        run = import_file(self.folder, "a.sh", MEGATRON + "--seed $SEED")
        self.assertIn("--set", run.findings[-1].fact)
        self.assertTrue(is_open(run))
        run = import_file(self.folder, "a.sh", "SEED=3\n" + MEGATRON + "--seed $SEED", {"SEED": "4"})
        self.assertEqual(run.get("seed"), 4)
        for given, code in (({}, True), ({"seed": "8"}, False)):   # what is computed has no value here
            run = import_file(self.folder, "a.sh", "N=4\n" + MEGATRON + "--seed $((N * 2))", given)
            self.assertEqual((is_open(run), run.get("seed")), (code, None if code else 8))

    def test_conditions_are_told_once_and_their_variables_count_as_used(self):
        run = import_file(self.folder, "a.sh", "A=1\nif [[ $A == 1 ]] || [[ $A == 2 ]]; then\n  B=(--seed 4)\nfi\n"
                          + MEGATRON + "${B[@]}")
        self.assertEqual([f.action for f in run.findings if f.line in (1, 2)], ["not understood"])
        self.assertEqual(run.get("seed"), 4)

    # ---- bad input ----

    def test_errors_are_one_line_with_the_place_and_leave_with_2(self):
        for name, text, words in BAD + ([] if NO_YAML else BAD_YAML):
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

    def test_unknown_keys_are_listed_and_leave_with_1(self):
        path = self.folder / "a.json"
        path.write_text(ZERO1 + '"gradient_cliping": 1, "seed": 3}')
        done = self.run_script(path, "--out", "-")
        self.assertEqual((done.returncode, json.loads(done.stdout)), (1, {"zero": 1, "seed": 3}))
        self.assertIn("not understood: not in our tables: did you mean gradient_clipping?", done.stderr)

    def test_documents_that_do_not_see_each_other_stay_so(self):
        script, yaml = self.folder / "train.sh", self.folder / "sft.yaml"
        script.write_text("torchrun pretrain_gpt.py --num-layers 2 --reset-attention-mask --reset-position-ids\n")
        yaml.write_text("model_name_or_path: m\nstage: sft\nfinetuning_type: full\nneat_packing: true\n")
        for path in [script] if NO_YAML else [script, yaml]:
            done = self.run_script(path, "--out", "-")
            self.assertIs(json.loads(done.stdout)["reset-attention-mask"], True, done.stderr)
            self.assertEqual(json.loads(done.stdout).get("reset-position-ids", False), path == script, done.stderr)

    # ---- the tables ----

    def test_tables_name_options_that_exist_and_values_that_they_take(self):
        expects = table_options()

        def check(option, value):
            self.assertIn(option, expects)
            if value is not None and expects[option].startswith("one of "):
                self.assertIn(str(value), expects[option][len("one of "):].split(", "))
        for source in SOURCES:
            for row in source.rows:
                if row.option:
                    check(row.option, row.value)
                for option, value in {**row.sets, **row.weak}.items():
                    check(option, value)
            for default in source.defaults:
                check(default.option, default.value)
        for family in ("gpt2", "llama"):
            table = option_table(family)
            for row in table.values():
                for condition in row.get("no_effect_unless", []):
                    self.assertLessEqual(set(condition["options"].split()), set(table))

    def test_rows_say_why_and_all_seven_errors_are_in_them(self):
        rows = [row for source in SOURCES for row in source.rows] + ENVIRONMENT + LAUNCHER
        for row in rows:
            if row.action != TAKEN:
                self.assertGreater(len(row.fact), 8, row)
        self.assertEqual({row.error for row in rows} - {0}, set(SEVEN))

    def test_no_row_is_hidden_by_an_earlier_one(self):
        for table in [*(source.table for source in SOURCES), "shared", "launchers"]:
            closed = {}
            for row in read_rows(table):
                for key in row.keys.split():
                    self.assertNotIn(key, closed, f"{table}: {key}")
                    if not row.when and "*" not in key:
                        closed[key] = row
