"""A user's shell has none of the variables that tests/run.py sets. What runs in it is nearly as fast as in the tests,
also with a busy process beside."""
import os
import statistics
import subprocess
import sys
import unittest

from tests.support.ranks import HAVE_RANKS
from tests.support.train import BUILD, LLAMA, ROOT, TrainTest, records

# MPI's consent to root stands in for another user.
USER = {"HOME": os.environ.get("HOME", "/"), "PATH": os.environ["PATH"], "TERM": "xterm", "LLMC_BUILD": BUILD,
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RECIPE = os.path.join(ROOT, "scripts", "recipes", "train_gpt2_124M_bf16.sh")


@unittest.skipUnless(HAVE_RANKS, "needs mpirun and the executables of the CPU")
class UserShellTest(TrainTest):
    measures_time = True

    def mean_step(self, name, environment):
        options = ["--num-query-groups", "4", "--zero", "3", "--train-iters", "100", "--log-file", self.path(name)]
        done = subprocess.run([RECIPE, *self.SHAPE, "--train-data", self.path("train_*.bin"), "--valid-data",
                               self.path("valid.bin"), *options], env={**environment, "RANKS": "2"},
                              cwd=self.dir, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
        return statistics.fmean(record["step_seconds"] for record in records(self.path(name), "step"))

    def test_ranks_that_wait_yield_unless_the_user_wants_otherwise(self):
        for said, variables in ("true", {}), ("false", {"OMPI_MCA_mpi_yield_when_idle": "0"}):
            done = subprocess.run(["mpirun", "-np", "1", *self.command(LLAMA, "--train-iters", "1")], text=True,
                                  env={**USER, "OMPI_MCA_mpi_show_mca_params": "enviro", **variables},
                                  capture_output=True, timeout=120, check=False)
            self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
            self.assertIn(f"mpi_yield_when_idle={said} ", done.stdout + done.stderr)

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "needs two cores")
    def test_a_recipe_on_two_ranks_beside_a_busy_process(self):
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.addCleanup(busy.wait)
        self.addCleanup(busy.kill)
        os.sched_setaffinity(busy.pid, sorted(os.sched_getaffinity(0))[:1])
        tests = self.mean_step("tests", {**os.environ, **USER})
        # Ranks that ask for messages all the time, and leave their core to nobody, made a step 2 to 9 times as long.
        self.assertLess(self.mean_step("user", USER), 3 * tests)
