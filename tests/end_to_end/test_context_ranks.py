"""Context parallelism over MPI on the CPU device: hang reports. test_context.cpp compares runs with those of one rank
and has the plan, recipes and evaluations, test_rank_options.cpp what cannot be split, tests/composition checkpoints."""
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import LLAMA


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ContextTest(RanksTest):
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
