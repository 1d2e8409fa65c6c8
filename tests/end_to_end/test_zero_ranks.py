"""ZeRO over MPI on the CPU device: gathered weights, and the log's record of communication. test_zero*.cpp has every
recipe with every communication dtype and number of ranks."""
import re
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, SIXTY_FOUR, records

TWELVE = ["--global-batch-size", "12", "--train-iters", "4", "--bucket-mb", "0.02"]


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ZeroTest(RanksTest):
    def run_log(self, ranks, binary, *options):
        log = self.fresh("log.jsonl")
        self.text = self.ranks(ranks, binary, *TWELVE, "--log-file", log, *options).stdout
        self.communication = records(log, "header")[0]["communication"]
        return log

    def test_weights_are_gathered_in_every_pass(self):
        """Evaluates a number of micro-batches that is not divisible by the ranks, and draws samples."""
        passes = ["--valid-data", self.path("valid.bin"), "--eval-interval", "2", "--eval-iters", "4", "--sample-every",
                  "2", "--sample-tokens", "3", "--num-layers", "4"]
        for binary, options in ((LLAMA, ["--fp8-recipe", "delayed", "--fp8-lm-head", "--recompute", "block"]),
                                (LLAMA, ["--fp8-recipe", "int8-forward", "--fp8-stats-interval", "2", *SIXTY_FOUR]),
                                (GPT2, ["--fp8-recipe", "blockwise", "--fp8-stats-interval", "2", "--grad-shard-dtype",
                                        "bf16"])):
            def seen(*more):
                log = self.run_log(3, binary, *options, *passes, *more)
                return [[(r["step"], *(r[key] for key in keys)) for r in records(log, kind)] for kind, keys in
                        (("step", ("loss", "grad_norm")), ("eval", ("loss",)), ("sample", ("text",)))]
            expected = seen("--zero", "2")
            self.assertEqual([len(kind) > 0 for kind in expected], [True] * 3)
            self.assertEqual(seen("--zero", "3"), expected)

    def test_a_run_says_what_it_exchanges_and_how_long_nothing_hid_it(self):
        wires = ["--grad-comm-dtype", "fp8", "--fp8-recipe", "delayed"]
        log = self.run_log(2, LLAMA, "--fp8-stats-interval", "2", *wires)
        header = records(log, "header")[0]["communication"]
        self.assertIn({"all-to-all"}, [{c["collective"]} for c in header if c["dtype"] == "e4m3"])
        for step in records(log, "step"):
            self.assertGreater(step["exposed_comm_seconds"], 0)
            self.assertLess(step["exposed_comm_seconds"], step["step_seconds"])
        wire = records(log, "grad_wire")
        self.assertEqual([r["step"] for r in wire], [2, 4])
        for record in wire:
            self.assertEqual([g["name"] for g in record["gradients"]], ["linears in FP8", "linears in BF16"])
            for gradients in record["gradients"]:
                self.assertGreater(gradients["relative_l2"], 0.01)
                self.assertLess(gradients["relative_l2"], 0.0625)   # E4M3 rounds by 2^-4 at most
                self.assertGreater(gradients["cosine"], 0.998)      # of two that are 2^-4 apart
                self.assertEqual((gradients["saturated"], gradients["nonfinite"]), (0, 0))
        plan = self.ranks(2, LLAMA, *TWELVE, "--dry-run", *wires).stdout
        total = re.search(r"^  all +(\d+) +(\d+)$", plan, re.M)
        self.assertEqual([int(n) for n in total.groups()],
                         [sum(c[key] for c in header) for key in ("bytes", "sent_bytes")])

    def test_one_rank_exchanges_nothing(self):
        log = self.run_log(1, LLAMA, "--bucket-mb", "1")
        self.assertIn("note: --bucket-mb has no effect with one rank", self.text)
        self.assertEqual(records(log, "header")[0]["communication"], [])
        self.assertEqual({r["exposed_comm_seconds"] for r in records(log, "step")}, {None})
