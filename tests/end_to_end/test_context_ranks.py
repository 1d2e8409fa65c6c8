"""Context parallelism over MPI on the CPU device: what it cannot split, hang reports and the plan. test_ranks.py
compares a run with that of one rank, test_context.cpp has recipes and evaluations, tests/composition checkpoints."""
import re
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import LLAMA


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ContextTest(RanksTest):
    def test_what_cannot_be_split_is_refused(self):
        for ranks, context, options, text in (
                (2, 4, [], "--context-parallel 4 must divide the number of ranks, 2"),
                (3, 3, [], "--context-parallel 3 must divide --num-attention-heads 4"),
                (2, 2, ["--seq-length", "15"], "--context-parallel 2 must divide --seq-length 15"),
                (6, 6, ["--num-attention-heads", "12", "--num-query-groups", "4"],
                 "--context-parallel 6 must divide --num-query-groups 4, or be a multiple of it"),
                (2, 2, ["--fp8-recipe", "delayed", "--micro-batch-size", "1"],
                 "tokens 1 x 8 = 8 (--micro-batch-size x --seq-length / --context-parallel)"),
                (2, 2, ["--fp8-recipe", "blockwise", "--micro-batch-size", "2"],
                 "parts of 8 tokens (--seq-length 16) are no multiple of 128, the tokens of a block"),
                (4, 2, ["--global-batch-size", "3"],
                 "must be a multiple of --micro-batch-size 1 x 2 (4 ranks / --context-parallel 2)")):
            with self.subTest(text=text):
                done = self.ranks(ranks, LLAMA, "--train-iters", "1", "--context-parallel", str(context), *options,
                                  expect=2)
                self.assertIn(text, done.stderr)

    def test_a_hang_report_names_the_exchange(self):
        done = self.ranks(2, LLAMA, "--train-iters", "4", "--context-parallel", "2", "--comm-timeout", "2",
                          faults="stall:rank=1@backward=3", expect=6)
        self.assertRegex(done.stderr, r"rank 0 waits in collective \d+ \(heads of layers\.1\) of step 3")

    def test_a_hang_report_names_the_group(self):
        """Ranks 0 and 1 share a sequence, and wait for the other ranks only later."""
        for zero, waits in (
                ("1", r"; ranks 0,1 wait in collective \d+ \(reduce .*; rank 2 waits in collective \d+ "
                      r"\(heads of layers\.1 among ranks 2,3\)"),
                ("3", r"; ranks 0-2 wait in collective \d+ \(reduce head\)")):
            with self.subTest(zero=zero):
                said = self.ranks(4, LLAMA, "--train-iters", "4", "--context-parallel", "2", "--zero", zero,
                                  "--comm-timeout", "2", faults="stall:rank=3@backward=3", expect=6).stderr
                self.assertRegex(said, r"rank 3 \(.*\) is in step 3, backward, without progress for .*"
                                 rf"{waits} of step 3 ")

    def test_the_plan_has_the_exchanges(self):
        plan = self.ranks(1, LLAMA, "--dry-run", "--train-iters", "4", "--ranks", "8", "--context-parallel", "4").stdout
        found = re.search(r"^  all-to-all +bf16 +4 +(\d+) +(\d+) +\d+  of heads, not hidden$", plan, re.M)
        # 4 micro-batches (8 sequences of 1 in 2 groups) of 2 layers: Q, K, V, the output, and their gradients.
        self.assertEqual(int(found[1]), 4 * 2 * 4)
        # 16 / 4 tokens of 4 query heads and, on each of 4 ranks, a key and a value head, of 8 elements.
        self.assertEqual(int(found[2]), 4 * 2 * 2 * (4 * (4 + 2 * 4) * 8 + 4 * 4 * 8) * 2)
        self.assertIn("4 micro-batches of 1 x 4 tokens per step and rank; 4 ranks share each sequence of 16 tokens",
                      plan)
