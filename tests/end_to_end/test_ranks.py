"""Several ranks over MPI on the CPU device: errors at their start. test_watch.py has ranks that are lost or not alike,
tests/composition equal results for any number of ranks."""
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN, ONE_EACH, RanksTest, each_rank
from tests.support.run_command import run_command
from tests.support.train import GPT2


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class Ranks(RanksTest):
    def test_a_launcher_that_openmpi_does_not_know_is_refused(self):
        """Otherwise each process would train alone, as rank 0, and save into the same folder."""
        for variables in ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2"}):
            with self.subTest(variables):
                done = run_command(self.command(GPT2, *ONE_EACH, "--train-iters", "2"), 2,
                                   env=dict(ENVIRONMENT, **variables))
                self.assertIn("is 2, but each process finds itself alone", done.stderr)

    def test_a_launcher_of_pytorch_is_refused(self):
        """torchrun would train the same run on each of its processes."""
        for size, rank in (("WORLD_SIZE", "RANK"), ("HOROVOD_SIZE", "HOROVOD_RANK")):
            done = run_command(self.command(GPT2, "--train-iters", "1"), 2,
                               env=dict(ENVIRONMENT, **{size: "2", rank: "0"}))
            self.assertRegex(done.stderr, rf"\Aerror: {size} is 2: .* scripts/launch/launch_mpi.sh -np 2 [^\n]*\n\Z")
        for variables in ({"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2"}):   # one process; left over in a shell
            self.run_train(GPT2, "--train-iters", "1", env=dict(ENVIRONMENT, **variables))
        done = run_command(self.mpirun(2, GPT2, "--train-iters", "1"), env=dict(ENVIRONMENT, WORLD_SIZE="2", RANK="0"))

    def test_help_on_one_rank_does_not_keep_the_other_waiting(self):
        train = self.command(GPT2, *ONE_EACH, "--train-iters", "2")
        done = run_command([*MPIRUN, *each_rank(train, [GPT2, "--help"])], 2, env=ENVIRONMENT)
        self.assertIn("1 of 2 ranks print help", done.stderr)
        self.assertNotIn("stopping after", done.stderr)   # mpirun's SIGTERM to the other rank is no request of a user

    def test_bad_input_of_all_ranks_is_told_once(self):
        done = self.ranks(3, GPT2, "--train-iters", "2", expect=2)
        self.assertIn("--global-batch-size 8 must be a multiple of --micro-batch-size 1 x 3 ranks", done.stderr)
        self.assertEqual(sum(line.startswith("error:") for line in done.stderr.splitlines()), 1, done.stderr)
