"""Runs on synthetic data: they refuse checkpoints of other data, and every output says that the data is synthetic."""
import json
import os
import shutil
import unittest
from pathlib import Path

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import LLAMA, records


class SyntheticTest(RanksTest):
    def command(self, binary, *options, **how):
        shape = super().command(binary, **how)
        del shape[shape.index("--train-data"):]
        return shape + [*options, *([] if "--train-data" in options else ["--synthetic-data"])]

    def test_the_folder_of_another_run_stays_as_it_is(self):
        run = ["--train-iters", "1", "--save", self.path("run")]
        self.run_train(LLAMA, *run)

        def bytes_of_all():
            names = [os.path.join(at, name) for at, _, files in os.walk(self.path("run")) for name in files]
            return {name: Path(name).read_bytes() for name in names}
        before = bytes_of_all()
        self.assertIn(self.path("run", "log.jsonl"), before)
        done = self.run_train(LLAMA, *run, "--seed", "9", expect=2)
        self.assertIn("holds checkpoints of an earlier run, up to step-00000001", done.stderr)
        self.assertIn("no such file", self.run_train(LLAMA, "--train-iters", "1", "--save", self.path("other"),
                                                     "--tokenizer", self.path("none"), expect=2).stderr)
        self.assertFalse(os.path.exists(self.path("other")))   # before the first step
        # Nor may another run's checkpoint be resumed into the folder; its own may, however the path is written.
        self.run_train(LLAMA, "--train-iters", "1", "--save", self.path("other"))
        done = self.run_train(LLAMA, "--train-iters", "2", "--save", self.path("run"), "--resume",
                              self.path("other", "step-00000001"), expect=2)
        self.assertIn("holds checkpoints of an earlier run", done.stderr)
        for save in (".", self.path("run")):   # also with the folder as the working folder
            done = self.run_train(LLAMA, "--train-iters", "2", "--save", save, cwd=self.path("run"), expect=2)
            self.assertIn("holds checkpoints of an earlier run", done.stderr)
        self.assertEqual(bytes_of_all(), before)
        for name, folder in (("step-00000001", self.path("run")), (self.path("run", "step-00000001") + "/", None)):
            self.run_train(LLAMA, "--train-iters", "2", "--save", self.path("run"), "--resume", name, cwd=folder)
            shutil.rmtree(self.path("run", "step-00000002"))

    def test_every_output_says_so(self):
        options = ["--train-iters", "3", "--save", self.path("run"), "--sample-every", "2"]
        done = self.run_train(LLAMA, *options)
        banner, _, rest = done.stdout.partition("\nstep 1/3 ")
        self.assertIn("\ndata        synthetic tokens, for timing only\n", banner)
        self.assertIn(" --synthetic-data\n", banner)
        self.assertIn("\nnote: SYNTHETIC DATA", banner)
        steps = [line for line in ("step 1/3 " + rest).splitlines() if line.startswith("step ")]
        self.assertEqual(len(steps), 3)
        self.assertTrue(all(line.endswith(" | synthetic data") for line in steps), steps)
        log = self.path("run", "log.jsonl")
        self.assertIs(records(log, "header")[0]["synthetic_data"], True)
        self.assertTrue(any("SYNTHETIC DATA" in r["text"] for r in records(log, "event")))
        state = json.loads(Path(self.path("run", "step-00000003", "state.json")).read_text())
        self.assertEqual((state["train_data"], state["config"]["synthetic-data"]), ({"synthetic": 1}, True))
        # The header of the resumed part says so, too.
        self.run_train(LLAMA, *options, "--train-iters", "5", "--resume", "auto")
        self.assertEqual([r["synthetic_data"] for r in records(log, "header")], [True, True])
        plan = self.run_train(LLAMA, "--dry-run").stdout
        self.assertIn("\nnote: SYNTHETIC DATA", plan)

    # An untrained router would send most tokens to the same experts.
    @unittest.skipUnless(HAVE_RANKS, "no mpirun")
    def test_experts_have_equal_loads(self):
        fp8 = ["--fp8-recipe", "blockwise", "--recompute", "block"]
        parallel = ["--moe-capacity", "1", "--expert-parallel"]
        for ranks, options in ((1, []), (1, fp8), (2, [*parallel, "2"]), (4, [*parallel, "4", *fp8]),
                               (1, ["--moe-shared-experts", "1"]), (2, ["--context-parallel", "2"])):
            log = self.fresh("experts.jsonl")
            done = self.ranks(ranks, LLAMA, "--train-iters", "3", *options, "--log-file", log, model="moe-tiny")
            self.assertIn("losses mean nothing, and experts are chosen evenly", done.stdout)
            for step in records(log, "step"):
                self.assertEqual(step["expert_load"], 1, options)
                self.assertEqual(step["rank_load"], 1 if "--expert-parallel" in options else None)
