"""A user's shell has none of the variables that tests/run.py sets: there, too, threads and ranks that wait leave their
core to other processes, unless the user wants otherwise."""
import os
import unittest

from tests.support.ranks import HAVE_RANKS
from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, TrainTest

# MPI's consent to root stands in for another user.
USER = {"HOME": os.environ.get("HOME", "/"), "PATH": os.environ["PATH"], "TERM": "xterm",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class UserShellTest(TrainTest):
    def said(self, *command, **variables):
        done = run_command(command, env={**USER, **variables})
        return done.stdout + done.stderr

    def test_threads_are_passive_unless_the_user_sets_another_policy(self):
        """Spinning threads made a step beside a busy process 29 times as long."""
        for policy, variables in ("PASSIVE", {}), ("ACTIVE", {"OMP_WAIT_POLICY": "active"}):
            lines = self.said(GPT2, "--version", OMP_DISPLAY_ENV="true", **variables).split("\n")
            self.assertEqual([line.split("'")[1] for line in lines if "OMP_WAIT_POLICY" in line][-1], policy)

    @unittest.skipUnless(HAVE_RANKS, "needs mpirun and the executables of the CPU")
    def test_ranks_that_wait_yield_unless_the_user_wants_otherwise(self):
        """Ranks that ask for messages all the time made a step beside a busy process 2 to 9 times as long."""
        for yields, variables in ("true", {}), ("false", {"OMPI_MCA_mpi_yield_when_idle": "0"}):
            said = self.said("mpirun", "-np", "1", *self.command(LLAMA, "--train-iters", "1"),
                             OMPI_MCA_mpi_show_mca_params="enviro", **variables)
            self.assertIn(f"mpi_yield_when_idle={yields} ", said)
