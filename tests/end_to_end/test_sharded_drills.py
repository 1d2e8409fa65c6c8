"""A few trials of the drill with ZeRO-3, with context parallelism and with both; `make drill` runs many."""
import shutil
import unittest

from tests.drill import kills
from tests.drill.run import Shared
from tests.support.ranks import HAVE_RANKS

SHARDED = [run for run in kills.RUNS if "--zero" in run[4] or "--context-parallel" in run[4]]


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ShardedDrills(unittest.TestCase):
    measures_time = True   # of tests/run.py

    def trials(self, part, function):
        self.assertEqual(len(SHARDED), 3)
        for number, run in enumerate(SHARDED):
            with self.subTest(run=run[0]):
                shared = Shared(seed=number, keep=False)
                self.addCleanup(shutil.rmtree, shared.folder, ignore_errors=True)
                kills.prepare(shared, [run])
                case = shared.trial(part, function, number)
                self.assertEqual(case.findings, [], "\n".join(case.story))

    def test_killed(self):
        self.trials("kills", kills.trial)

    def test_suspended(self):
        self.trials("suspended ranks", kills.suspended_rank)
