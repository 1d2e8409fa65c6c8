"""scripts/compare on logs that this test writes: golden tables, runs that must not be compared, bad input.

UPDATE_GOLDEN=1 writes tests/golden/compare anew. Measurements: test_compare_measure.py."""
import re
import statistics

from llmfp8.comparison import differences
from llmfp8.comparison.differences import NEUTRAL, precision_text
from tests.support.comparison import (BF16, CompareTest, DELAYED, FP8, FP8_AGAIN, H200, ROOT, TOKENS, a_log,
                                      losses_of, step_record)



def squeezed(text):
    """Without the spaces that align a table."""
    return re.sub("  +", " ", text)


class Tables(CompareTest):
    def test_golden(self):
        done = self.call(*self.recorded(), "--out", "out")
        text = (self.folder / "out" / "compare.md").read_text()
        self.assertEqual(done.stdout, f"{text}\nout/compare.md\n")
        self.golden("recorded.md", text)
        self.assertLess(max(line.count("|") for line in text.splitlines()), 11)   # a table of 14 columns fits no screen
        self.golden("recorded.csv", (self.folder / "out" / "compare.csv").read_text())

    def test_golden_with_differences_allowed(self):
        self.call(*self.recorded(), "--out", "out", "--allow", "gpu,micro-batch-size", "--baseline", "delayed",
                  "--loss-steps", "1")
        self.golden("allowed.md", (self.folder / "out" / "compare.md").read_text(), besides="recorded.md")

    def test_golden_of_synthetic_data(self):
        for name, log in (("bf16", BF16), ("delayed", FP8)):
            self.write(f"{name}.jsonl", [{**log[0], "synthetic_data": True}, *log[1:]])
        self.call("bf16.jsonl", "delayed.jsonl", "--out", "out")
        text = (self.folder / "out" / "compare.md").read_text()
        self.golden("synthetic.md", text, besides="recorded.md")
        self.assertEqual(text.count("SYNTHETIC DATA (bf16, delayed)"), 1)
        for row in self.rows().values():
            self.assertEqual(row["synthetic_data"], "1")
            for column in ("loss_equal_tokens", "valid_loss_equal_tokens", "loss_equal_time", "equal_time_tokens"):
                self.assertEqual(row[column], "", column)
            for column in ("loss_reason", "valid_reason", "equal_time_reason"):
                self.assertEqual(row[column], "synthetic data: no loss")

    def test_numbers_by_hand(self):
        self.call(*self.recorded(), "--out", "out")
        rows = self.rows()
        bf16 = [1.219, 1.218, 1.226, 1.22, 1.221, 1.223, 1.221, 1.23, 1.224, 1.222]   # 3 per start do not count
        fp8 = [0.943, 0.941, 0.946, 0.944, 0.942, 0.944, 0.942, 0.947, 0.945, 0.943]

        def close(name, column, value):
            self.assertAlmostEqual(float(rows[name][column]) / value, 1, 12, f"{name} {column}")
        close("bf16", "s_per_it_median", statistics.median(bf16))
        close("bf16", "s_per_it_min", 1.218)
        close("bf16", "s_per_it_max", 1.23)
        close("delayed", "s_per_it_median", statistics.median(fp8))
        rate = {name: statistics.median(TOKENS / s for s in seconds)
                for name, seconds in (("bf16", bf16), ("delayed", fp8))}
        for name in rate:
            close(name, "tokens_per_s_per_gpu", rate[name])
            close(name, "samples_per_s", rate[name] / 2048)
            close(name, "tflops_per_gpu", rate[name] * 5067767808.0 / 1e12)
            close(name, "mfu_bf16_peak", rate[name] * 5067767808.0 / 989.4e12)
            close(name, "mfu_fp8_peak", rate[name] * 5067767808.0 / 1978.9e12)
            close(name, "memory_gib", 32.5)
        close("h100", "tokens_per_s_per_gpu", TOKENS / 1.65)
        each = [1.22 / 0.943, 1.223 / 0.944]   # medians of rounds
        close("delayed", "speed_ratio", sum(each) / 2)
        close("delayed", "speed_ratio_min", min(each))
        close("delayed", "speed_ratio_max", max(each))
        # Equal tokens: BIG's 5 steps; means of the 5 steps (of at most 10) until then.
        equal = {"bf16": statistics.fmean(losses_of(5)), "delayed": statistics.fmean(losses_of(5, 0.001))}
        for name, loss in equal.items():
            self.assertEqual(rows[name]["equal_tokens"], str(5 * TOKENS))
            close(name, "loss_equal_tokens", loss)
        close("delayed", "loss_equal_tokens_gap", equal["delayed"] / equal["bf16"] - 1)
        # BIG and h100 have no validation, the others one in step 4.
        self.assertEqual([rows[n]["valid_tokens"] for n in rows], [str(4 * TOKENS)] * 2 + [""] * 2)
        close("delayed", "valid_loss_gap", 5.6 / 5.5 - 1)
        # Equal time: BIG's 11.79 s; BF16 did 5 steps in 10.987 s, FP8 6 in 11.78 s, h100 4 in 11.0 s.
        close("bf16", "equal_time_s", 7.0 + 1.2 + 1.2 + 1.19 + 1.2)
        self.assertEqual([rows[n]["equal_time_tokens"] for n in rows], [str(k * TOKENS) for k in (5, 6, 5, 4)])
        close("delayed", "loss_equal_time", statistics.fmean(losses_of(6, 0.001)))

    def test_what_the_driver_reports_of_the_gpus(self):
        for name, log in (("bf16", BF16), ("delayed", FP8)):
            log = [dict(record) for record in log]
            for record in log:
                if record["type"] == "step" and name == "bf16" and record["step"] != 6:   # short steps have none
                    record.update(gpu_utilization=90.0 + record["step"], power_w=600.0 + record["step"] ** 2,
                                  energy_j=1000.0 * record["step"], joules_per_token=9.0, sm_clock_mhz=1755.0,
                                  gpu_temperature_c=60.0 + record["step"],
                                  throttled_by="none" if record["step"] == 4 else "power cap")
            self.write(f"{name}.jsonl", log)
        said = squeezed(self.call("bf16.jsonl", "delayed.jsonl", "--out", "out").stdout)
        self.assertIn("| configuration | GPU utilisation % | power W a GPU | SM clock MHz | highest C | "
                      "clocks held back by (share of steps) | J/token |", said)
        bf16, delayed = self.rows()["bf16"], self.rows()["delayed"]
        # Steps 4, 5, 7 and 8 of five timed ones.
        self.assertEqual((bf16["gpu_utilization_median"], bf16["gpu_power_w_median"]), ("96.0", "637.0"))
        self.assertAlmostEqual(float(bf16["joules_per_token"]) / ((4 + 5 + 7 + 8) * 1000 / (5 * TOKENS)), 1, 12)
        self.assertIn("| 96 | 637 | 1755 | 68 | power cap 75% | 0.03662 |", said)
        self.assertIn("| n/a | n/a | n/a | n/a | n/a | n/a |", said)
        self.assertEqual((delayed["gpu_utilization_median"], delayed["joules_per_token"]), ("", ""))

    def test_lives_of_a_resumed_run_have_warm_up_each(self):
        second = a_log([9.0] * 3, [5.0] * 3)
        for i, record in enumerate(r for r in second if r["type"] == "step"):
            record.update(step_record(9 + i, [5.0, 1.21, 1.22][i], 5.0))
        self.write("a.jsonl", [*BF16, {**second[0], "step": 8}, *second[2:]])
        self.call("a.jsonl", "--out", "out", "--warmup", "1")
        row = self.rows()["a"]
        self.assertEqual((row["rounds"], row["timed_steps"], row["s_per_it_max"]), ("2", str(7 + 2), "1.3"))

    def test_a_folder_of_a_measurement(self):
        arguments = self.recorded()
        self.call(*arguments, "--out", "named")
        self.call(".", "--baseline", "bf16")
        self.assertEqual(self.rows("."), self.rows("named"))
        self.write("measured.json", '{"table": "gpt2", "warmup": 2, "failures": {"fp8-128": "exit code 6: x"}, '
                                    '"commands": {}, "train_iters": null}')
        said = squeezed(self.call(".", code=1).stdout)   # some run failed
        self.assertIn("# GPT-2 124M, T 1024, 1 GPU: time per step", said)
        self.assertIn("* fp8-128: FAILED: exit code 6: x\n", said)
        self.assertEqual(self.rows(".")["bf16"]["warmup_steps"], "2")
        self.assertNotEqual(self.rows(".")["big"]["speed_ratio"], "")   # micro-batches may differ in this table


class Perturbed(CompareTest):
    """A changed number of a log appears in every column where it should, and in no other."""

    def change(self, name, changed, columns):
        arguments = self.recorded()
        self.call(*arguments, "--out", "before")
        changed()
        self.call(*arguments, "--out", "after")
        before, after = self.rows("before")[name], self.rows("after")[name]
        self.assertEqual({column for column in before if before[column] != after[column]}, columns)

    def edit(self, name, log, kind, step, **values):
        def changed():
            self.write(name, [{**r, **values} if r["type"] == kind and r["step"] == step else r for r in log])
        return changed

    def test_each(self):
        speed = {"tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_bf16_peak", "mfu_fp8_peak",
                 "mfu_fp32_peak", "speed_ratio"}
        longest = {"s_per_it_max"}
        loss = {"loss_equal_tokens", "loss_equal_tokens_gap", "loss_equal_time", "loss_equal_time_gap"}
        slow = dict(tokens_per_second=TOKENS / 1.0, samples_per_second=TOKENS / 1.0 / 2048)
        cases = [
            (self.edit("delayed.2.jsonl", FP8_AGAIN, "step", 6, step_seconds=0.95), longest),
            (self.edit("delayed.2.jsonl", FP8_AGAIN, "step", 3, step_seconds=2.0), set()),   # warm-up of another round
            (self.edit("delayed.1.jsonl", FP8, "step", 4, **slow), speed | {"speed_ratio_min"}),
            (self.edit("delayed.1.jsonl", FP8, "step", 5, loss=9.0), loss),
            (self.edit("delayed.1.jsonl", FP8, "step", 6, loss=9.0), {"loss_equal_time", "loss_equal_time_gap"}),
            (self.edit("delayed.1.jsonl", FP8, "step", 7, loss=9.0), set()),   # beyond equal tokens and equal time
            (self.edit("delayed.1.jsonl", FP8, "step", 2, memory_gib=40.0), {"memory_gib"}),
            (self.edit("delayed.1.jsonl", FP8, "step", 1, step_seconds=7.9),
             {"equal_time_tokens", "loss_equal_time", "loss_equal_time_gap", "training_seconds"}),
        ]
        for changed, columns in cases:
            with self.subTest(columns=columns):
                self.change("delayed", changed, columns)

    def test_validation(self):
        for name, log in (("a", BF16), ("b", FP8)):
            self.write(f"{name}.jsonl", log)
        self.call("a.jsonl", "b.jsonl", "--out", "out")
        row = self.rows()["b"]
        self.assertEqual((row["valid_tokens"], row["valid_loss_equal_tokens"]), (str(8 * TOKENS), "3.5"))
        self.assertAlmostEqual(float(row["valid_loss_gap"]), 3.5 / 3.4 - 1, 12)
        self.edit("b.jsonl", FP8, "eval", 8, counted_tokens=8192)()   # another part of the text
        said = squeezed(self.call("a.jsonl", "b.jsonl", "--out", "out").stdout)
        self.assertIn("| 3.5000 | validated on 8,192 tokens, not 4,096 |", said)
        self.assertEqual(self.rows()["b"]["valid_loss_gap"], "")
        # The loss of the exported weights, if all FP8 runs have it.
        self.edit("b.jsonl", FP8, "eval", 8, loss_bf16=3.45)()
        said = squeezed(self.call("a.jsonl", "b.jsonl", "--out", "out").stdout)
        self.assertIn("| validation loss in BF16 at 1,048,576 tokens | against a | as trained | against a |", said)
        self.assertIn("| 3.4500 | +1.47 % | 3.5000 | +2.94 % |", said)
        self.assertAlmostEqual(float(self.rows()["b"]["valid_loss_gap"]), 3.45 / 3.4 - 1, 12)
        self.write("c.jsonl", FP8)
        self.assertNotIn("in BF16", self.call("a.jsonl", "b.jsonl", "c.jsonl", "--out", "out").stdout)
        self.assertEqual(self.rows()["b"]["valid_loss_equal_tokens"], "3.5")
        # Without a validation at equal tokens there is none.
        self.write("b.jsonl", a_log([1.0] * 8, losses_of(8), DELAYED, evals={5: 3.5}))
        self.call("a.jsonl", "b.jsonl", "--out", "out")
        self.assertEqual(self.rows()["a"]["valid_reason"], "at no equal tokens")


class Comparability(CompareTest):
    """Differences between two runs, and their effect on the tables."""

    def verdict(self, config=None, other=None, **header):
        """(ratio in the table, lines below it) for a run compared with BF16."""
        self.write("base.jsonl", BF16)
        self.write("other.jsonl", other or a_log([7.0] + [1.0] * 7, losses_of(8), config, evals={8: 3.4}, **header))
        said = squeezed(self.call("base.jsonl", "other.jsonl", "--out", "out").stdout)
        return self.rows()["other"]["speed_ratio"], said

    def test_precision_is_what_comparisons_are_about(self):
        for config in (DELAYED, {"grad-dtype": "bf16"}, {"dtype": "fp32"}, {"fp8-recipe": "tensorwise",
                       "first-last-layers-bf16": True}, {"fp8-something-new": True}, {"bf16-linears": ["0.*"]}):
            ratio, said = self.verdict(config)
            self.assertNotEqual(ratio, "", config)
            self.assertNotIn("\n[1]", said)

    def test_other_configurations_get_no_ratio(self):
        """Every option of a log prevents a ratio unless it is known to be irrelevant, also options of later
        versions."""
        for key, value in H200["config"].items():
            other = {**(value if isinstance(value, dict) else {})} or (["x"] if isinstance(value, list) else
                     not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else "x")
            if key in NEUTRAL or precision_text({**H200["config"], key: other}) != precision_text(H200["config"]) \
                    or key in ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"):
                continue
            with self.subTest(key):
                ratio, said = self.verdict({key: other})
                self.assertEqual(ratio, "")
                self.assertIn(f"[1] not compared: {key} ", said)
                self.assertIn(f"(--allow {key} compares anyway)", said)
                self.assertEqual(said.count("not compared [1]"), 4)   # speed, and the three losses

    def test_other_gpus_and_data_get_no_ratio(self):
        for header, text in (({"device": {"name": "NVIDIA H100"}}, "gpu NVIDIA H100, base has NVIDIA H200"),
                             ({"world": 2}, "gpus 2, base has 1"),
                             ({"synthetic_data": True}, "synthetic-data true, base has false")):
            ratio, said = self.verdict(**header)
            self.assertEqual(ratio, "")
            self.assertIn(f"[1] not compared: {text} (--allow ", said)

    def test_files_are_compared_by_what_is_in_them(self):
        """Shards made anew in the same folder are other data, and the same shards in another folder are not."""
        def identity(fingerprint, weights):
            return {"identity": {"train-data": {"fingerprint": fingerprint, "tokens": 5000, "tokenizer": "gpt2"},
                                 "load": {"fingerprint": weights}}}
        base = [{**BF16[0], **identity("12ab", "77"), "config": {**BF16[0]["config"], "load": "m"}}, *BF16[1:]]
        name = {"load": "copy/of/m", "train-data": ["moved/*.bin"]}
        for config, other, text in (
                (name, identity("12ab", "77"), ""),
                (name, {"identity": {}},
                 "train-data moved/*.bin, base has tok/train_*.bin; load copy/of/m, base has m"),
                ({"load": "m"}, identity("12ab", "78"), "load m (fingerprint 78), base has m (fingerprint 77)"),
                ({"load": "m"}, identity("34cd", "77"),
                 "train-data tok/train_*.bin (5,000 tokens, tokenizer gpt2, fingerprint 34cd), base has "
                 "tok/train_*.bin (5,000 tokens, tokenizer gpt2, fingerprint 12ab)")):
            self.write("base.jsonl", base)
            self.write("other.jsonl", a_log([7.0] + [1.0] * 7, losses_of(8), config, evals={8: 3.4}, **other))
            said = self.call("base.jsonl", "other.jsonl", "--out", "out").stdout
            self.assertEqual(self.rows()["other"]["speed_ratio"] == "", text != "", said)
            self.assertIn(f"[1] not compared: {text} (--allow " if text else "| other ", said)
            page = (self.folder / "out/compare.html").read_text()
            self.assertEqual('"gap":null' in page, "train-data" in text, text)

    def test_a_folder_of_runs(self):
        self.write("runs/one/log.jsonl", BF16)
        self.write("runs/two/log.jsonl", FP8)
        self.call("runs")
        self.assertEqual(list(self.rows("runs")), ["one", "two"])

    def test_figures_a_gpu_of_several(self):
        for i in (1, 2):
            self.write(f"one.{i}.jsonl", BF16)
            self.write(f"four.{i}.jsonl", [{**BF16[0], "world": 4}, *BF16[1:]])
        self.call(*[f"{n}={n}.{i}.jsonl" for n in ("one", "four") for i in (1, 2)], "--out", "out", "--allow", "gpus",
                  "--baseline", "four")
        one, four = self.rows().values()
        for column in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_bf16_peak", "mfu_fp8_peak"):
            self.assertEqual(float(one[column]), 4 * float(four[column]))
        self.assertEqual([one[f"speed_ratio{end}"] for end in ("", "_min", "_max")], ["4.0"] * 3)
        self.assertEqual(four["samples_per_s"], one["samples_per_s"])

    def test_what_is_said_beside_a_ratio(self):
        for header, text in (({"commit": "1234567"}, "commit 1234567, base has aab928652549"),
                             ({"device": {"driver": "12.8"}}, "driver 12.8, base has 13.0"),
                             ({"other": a_log([7.0] + [1.0] * 6, losses_of(7))},
                              f"{7 * TOKENS:,} tokens trained on, base {8 * TOKENS:,}")):
            ratio, said = self.verdict(**header)
            self.assertNotEqual(ratio, "")
            self.assertIn(f"[1] differs: {text}", said)
            self.assertRegex(said, r"\| 1\.22\d \[1\] \|")

    def test_the_options_that_have_a_meaning_here_exist(self):
        options = re.findall(r"(?m)^--([\w-]+)", (ROOT / "tests/golden/cli_options.txt").read_text())
        self.assertLessEqual(differences.NEUTRAL | differences.PRECISION | set(differences.USUAL), set(options))

    def test_what_makes_no_difference(self):
        # Absent in the other log: off.
        ratio, said = self.verdict({"log-file": "b", "save": "x", "save-interval": 5, "eval-interval": 7,
                                    "resume": "auto", "another-option": False, "rampup-batch-size": None})
        self.assertNotEqual(ratio, "")
        self.assertNotIn("\n[1]", said)
        self.assertEqual(self.verdict({"another-option": True})[0], "")

    def test_what_went_wrong_in_a_run_is_told(self):
        log = [{**r, "skipped": True} if r.get("step") in (5, 6) else r for r in FP8[:-1]]
        log.append({"type": "event", "step": 7, "kind": "warning", "text": "memory | grew"})
        _, said = self.verdict(other=log)
        for text in ("* other: other.jsonl does not say that its run ended\n", "* other: 2 steps were skipped",
                     "* other: 1 warnings in other.jsonl, the first in step 7: memory \\| grew\n"):
            self.assertIn(text, said)

    def test_precision_in_words(self):
        for config, words in (({}, "BF16"), ({"dtype": "fp32"}, "FP32"),
                              (DELAYED, "FP8 delayed hybrid, fp8-min-speedup 1.0, fp8-amax-history-len 1024"),
                              ({"fp8-recipe": "tensorwise", "fp8-format": "hybrid", "first-last-layers-bf16": True,
                                "num-layers-at-start-in-bf16": 2, "bf16-linears": ["0.*", "head"], "fp8-margin": 0},
                               "FP8 tensorwise hybrid, first 2 and last 1 layers BF16, bf16-linears 0.*,head"),
                              ({"grad-dtype": "bf16", "grad-comm-dtype": "bf16"}, "BF16, grad-dtype bf16"),
                              ({"zero": 2, "grad-shard-dtype": "bf16"}, "BF16, grad-shard-dtype bf16"),
                              ({"zero": 2, "grad-shard-dtype": "fp32"}, "BF16"),
                              ({"grad-comm-dtype": "fp8"}, "BF16, grad-comm-dtype fp8")):
            self.assertEqual(precision_text({"dtype": "bf16", **config}), words)


class BadInput(CompareTest):
    def refused(self, text, *arguments):
        done = self.call(*arguments, code=2)
        self.assertEqual((done.stdout, len(done.stderr.splitlines())), ("", 1), done.stderr)
        self.assertIn(text, done.stderr)
        self.assertTrue(done.stderr.startswith("error: "), done.stderr)

    def test_options(self):
        self.write("a.jsonl", BF16)
        self.write("b.jsonl", BF16)
        run = ["--run", "a=./train_gpt2", "--out", "out"]
        for text, arguments in (
                ("nothing to compare", []),
                ("unknown option --roundz: did you mean --rounds?", ["a.jsonl", "--roundz", "3"]),
                ("--rounds: invalid int of at least 1 value: '0'", [*run, "--rounds", "0"]),
                ("--warmup: invalid int of at least 0 value: '-1'", ["a.jsonl", "--out", "o", "--warmup", "-1"]),
                ("give either logs, or --table or --run", ["a.jsonl", *run]),
                ("--table and --run: one or the other", ["--table", "gpt2", *run]),
                ("invalid choice: 'gpt3'", ["--table", "gpt3"]),
                ("--only bf17: not in --table formats, which has fp32, bf16, fp8-e4m3, fp8-hybrid",
                 ["--table", "formats", "--only", "bf16,bf17", "--out", "o"]),
                ("--only: chooses rows of a --table", [*run, "--only", "a"]),
                ("--out FOLDER is needed", ["a.jsonl", "b.jsonl"]), ("--out FOLDER is needed", run[:2]),
                ("--rounds: has no effect on finished logs", ["a.jsonl", "--out", "o", "--rounds", "2"]),
                ("--dry-run: has no effect on finished logs", ["a.jsonl", "--out", "o", "--dry-run"]),
                ("-- --lr 1: has no effect on finished logs", ["a.jsonl", "--out", "o", "--", "--lr", "1"]),
                ("--iters: has no effect with --train-iters", [*run, "--train-iters", "9", "--iters", "3"]),
                ("--baseline c: none of the configurations: a, b",
                 ["a.jsonl", "b.jsonl", "--out", "o", "--baseline", "c"]),
                ("--allow seed: nothing to allow; what keeps runs here from being compared: nothing",
                 ["a.jsonl", "b.jsonl", "--out", "o", "--allow", "seed"]),
                ("--run ./train_gpt2: not NAME=COMMAND", ["--run", "./train_gpt2", "--out", "o"]),
                ("--run a=: no command", ["--run", "a=", "--out", "o"]),
                ("--run a=x 'y: No closing quotation", ["--run", "a=x 'y", "--out", "o"]),
                ("--run a/b=: a name is", ["--run", "a/b=x", "--out", "o"]),
                ("--run a=: given twice", [*run, "--run", "a=y"]),
                ("--run a=: --log_file=x is set by the comparison itself", ["--run", "a=x --log_file=x", "--out", "o"]),
                ("--run a=: -x is set by the comparison itself", ["--run", "a=x -x 5", "--out", "o"]),
                ("after --: --train-iters is set by the comparison", [*run, "--", "--train-iters", "5"]),
                ("a: ./train_gpt2: No such file or directory", run)):
            with self.subTest(text):
                self.refused(text, *arguments)
        self.assertFalse((self.folder / "out").exists())

    def test_logs(self):
        self.write("a.jsonl", BF16)
        self.write("x/a.jsonl", FP8)
        self.write("y/a.txt", "")
        self.write("short.jsonl", BF16[:7])
        self.write("none.jsonl", BF16[:2])
        self.write("config.jsonl", [{**BF16[0], "config": "{"}, *BF16[1:]])
        self.write("zero.jsonl", [{**r, "step_seconds": "nan"} if r.get("step") == 5 else r for r in BF16])
        self.write("resumed.jsonl", [*BF16, {**FP8[0], "step": 8}])
        for text, arguments in (
                ("absent.jsonl: No such file", ["absent.jsonl"]), ("none.jsonl: no step yet", ["none.jsonl"]),
                ("short.jsonl: 1 steps after 3 of warm-up in each start, at least 2 are needed", ["short.jsonl"]),
                ("config.jsonl:1: not the log", ["config.jsonl"]),
                ("zero.jsonl: step 5 took nan s", ["zero.jsonl"]),
                ("resumed.jsonl: fp8-recipe is delayed since step 8 and was none: no one configuration; put the lines "
                 "from that header on into a separate log", ["resumed.jsonl"]),
                ("x/a.jsonl: fp8-recipe is delayed, but a.jsonl of the same name n has none: give them different names",
                 ["n=a.jsonl", "n=x/a.jsonl"]),
                ("a.jsonl: given twice", ["n=a.jsonl", "n=a.jsonl"]),
                ("=a.jsonl: no name before the =", ["=a.jsonl"]),
                ("y: no log (*.jsonl) in this folder or its folders", ["y"]),
                ("a.jsonl/out/compare.md: Not a directory", ["a.jsonl", "--out", "a.jsonl/out"])):
            with self.subTest(text):
                self.refused(text, *arguments, *([] if "--out" in arguments else ["--out", "out"]))
        self.write("x/a.1.jsonl", BF16)
        self.write("x/measured.json", "{}")
        self.refused("x/measured.json: damaged", "x")
