"""Checkpoints of several ranks over MPI on the CPU device. test_checkpoint_ranks.cpp and test_checkpoint_async.cpp have
damage to them and kills at each call, tests/composition resumes them on other numbers of ranks."""
import os
import shutil
import signal
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, RanksTest
from tests.support.train import GPT2, records


def step_directory(step):
    return f"step-{step:08d}"


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class RankCheckpointsTest(RanksTest):
    def test_a_stop_signal_waits_for_the_save_behind_training(self):
        process = subprocess.Popen(self.mpirun(2, GPT2, "--train-iters", "100000", "--save", self.path("run"),
                                               "--save-interval", "5", "--save-async", "--log-file",
                                               self.path("log.jsonl")),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for line in process.stdout:
            if line.startswith("step 12/"):
                break
        process.send_signal(signal.SIGUSR1)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, error)
        last = max(r["step"] for r in records(self.path("log.jsonl"), "step"))
        names = sorted(os.listdir(self.path("run")))
        self.assertEqual(names, [step_directory(s) for s in sorted({*range(5, last + 1, 5), last})])
        shutil.rmtree(self.path("run", names[0]))
        for name in names[1:]:
            self.assertTrue(os.path.isfile(self.path("run", name, "manifest.json")))
