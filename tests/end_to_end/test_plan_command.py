"""`plan`, `--dry-run`, and the lines on its plan that a run prints. Standard library only."""
import json
import re

from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, TrainTest, records


class PlanTest(TrainTest):
    def test_the_verdict_comes_first_and_is_the_exit_code(self):
        def plan(code, *options):
            done = run_command([LLAMA, "plan", "--model", "llama3-8B", *options], None)
            self.assertEqual((done.returncode, done.stderr), (code, ""), done.stdout)
            return done.stdout
        text = plan(2)
        self.assertRegex(text, r"\Adoes not fit: 170\.940 GiB of [\d.]+ GiB on .*\n")
        gib, options = re.search(r"(?m)^ +([\d.]+) GiB, fits, with (--.*)$", text).groups()   # test_plan.cpp has all
        self.assertTrue(plan(0, *options.split()).startswith(f"fits: {gib} GiB of "), options)
        self.assertIs(json.loads(plan(2, "--json"))["memory"]["fits"], False)
        self.assertRegex(plan(0, "--ranks", "8"), r"\Afits: 92\.413 GiB of [\d.]+ GiB on .*\nparameters  ")

    def test_the_log_has_the_memory_of_its_arena_by_purpose(self):
        log = self.path("log.jsonl")
        self.run_train(GPT2, "--train-iters", "1", "--log-file", log)
        header, = records(log, "header")
        self.assertEqual(sum(header["purpose_bytes"].values()), header["arena_bytes"])
        self.assertGreater(header["purpose_bytes"]["weights"], 0)

    def test_plan_is_the_dry_run_and_json_has_its_figures(self):
        def said(*words):
            return run_command([LLAMA, *words]).stdout
        options = ("--model", "llama3-8B", "--seq-length", "8192", "--ranks", "8", "--fp8-recipe", "delayed",
                   "--recompute", "block")
        text = said("plan", *options, "--gpu", "H100 NVL")
        self.assertEqual(text, said(*options, "--dry-run", "--gpu", "H100 NVL"))
        self.assertIn("SCALED, not measured", text)
        self.assertIn("\ntokens            65536 per step\n", text)   # no length is given
        self.assertIn("\ntokens            65536 per step, 3 steps, 1.966e+05 in all\n",
                      said("plan", *options, "--train-iters", "3"))
        plan = json.loads(said("plan", *options, "--json"))
        self.assertEqual((plan["type"], plan["gpu"]["name"], plan["ranks"]), ("plan", "H200", 8))

    def test_after_twenty_steps_the_log_has_the_plan_beside_what_was_measured(self):
        done = self.run_train(GPT2, "--train-iters", "21", "--log-file", self.path("log.jsonl"))
        self.assertEqual(done.stdout.count("\nplan: no step time is predicted for this device, measured "), 1)
        self.assertIn("(median of steps 11-20); memory planned ", done.stdout)
        [plan] = records(self.path("log.jsonl"), "plan")
        self.assertEqual((plan["step"], plan["predicted_ms"]), (20, None))
        times = sorted(r["step_seconds"] for r in records(self.path("log.jsonl"), "step")[10:20])
        self.assertAlmostEqual(plan["measured_ms"], 500 * (times[4] + times[5]), places=6)
        self.assertEqual(plan["planned_bytes"], records(self.path("log.jsonl"), "header")[0]["arena_bytes"])
