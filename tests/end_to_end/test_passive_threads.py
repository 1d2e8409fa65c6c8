"""Threads of OpenMP that wait for work leave their core to other processes, unless the user wants otherwise."""
import os
import statistics
import subprocess
import sys
import unittest

from tests.support.train import GPT2, TrainTest, records

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class PassiveThreadsTest(TrainTest):
    measures_time = True

    def environment(self, **values):
        return {**{name: value for name, value in os.environ.items() if name not in VARIABLES}, **values}

    def policy(self, **values):
        """The policy that OpenMP says it has, in the lines that it prints last."""
        done = subprocess.run([GPT2, "--version"], capture_output=True, text=True, check=True,
                              env=self.environment(OMP_DISPLAY_ENV="true", **values))
        return [line.split("'")[1] for line in done.stderr.split("\n") if "OMP_WAIT_POLICY" in line][-1]

    def test_threads_are_passive_unless_the_user_sets_another_policy(self):
        self.assertEqual(self.policy(), "PASSIVE")
        self.assertEqual(self.policy(OMP_WAIT_POLICY="active"), "ACTIVE")

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "needs two cores")
    def test_a_busy_process_beside_slows_a_step_by_its_share_only(self):
        cores = sorted(os.sched_getaffinity(0))[:2]
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.addCleanup(busy.wait)
        self.addCleanup(busy.kill)
        os.sched_setaffinity(busy.pid, cores[:1])

        def median_step(name, **values):
            self.run_train(GPT2, "--train-iters", "30", "--log-file", self.path(name),
                           env=self.environment(OMP_NUM_THREADS="2", **values))
            return statistics.median(record["step_seconds"] for record in records(self.path(name), "step"))
        # Spinning threads made the step 29 times as long; other tests beside this one may double it.
        self.assertLess(median_step("default"), 4 * median_step("passive", OMP_WAIT_POLICY="passive"))
