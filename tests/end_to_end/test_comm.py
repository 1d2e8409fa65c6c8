"""Collectives between ranks: comm_check over MPI on the CPU device, and through comm_nccl.cpp with a replacement for
NCCL's library; errors when that library is too old, fails or hangs."""
import os
import re
import time
import unittest
import unittest.mock

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN
from tests.support.run_command import run_command
from tests.support.train import BUILD, TrainTest

CHECK = os.path.join(BUILD, "comm_check")
FAKE = os.path.join(BUILD, "fake")
HAVE_CHECK = HAVE_RANKS and os.path.exists(os.path.join(FAKE, "libnccl.so.2"))


@unittest.skipUnless(HAVE_CHECK, "needs OpenMPI and the CPU device")
class CommTest(TrainTest):
    measures_time = True   # of tests/run.py

    def check(self, ranks, *options, expect=0, fake=""):
        environment = dict(ENVIRONMENT, FAKE_NCCL=fake, LD_LIBRARY_PATH=FAKE)
        return run_command([*MPIRUN, "-np", str(ranks), CHECK, *options], expect, env=environment)

    def digest(self, done, ranks):
        found = re.search(rf"comm_check: {ranks} ranks, (\d+) cases as expected, digest (\w+)", done.stdout)
        self.assertTrue(found, done.stdout)
        self.assertGreater(int(found[1]), 180)
        return found[2]

    def test_every_collective_gives_what_it_must_and_repeats_itself(self):
        digests = {}
        for ranks in (1, 2, 4, 3, 3):
            with self.subTest(ranks=ranks):
                digest = self.digest(self.check(ranks), ranks)
                self.assertEqual(digests.setdefault(ranks, digest), digest)

    def test_the_same_through_a_library_in_nccls_place(self):
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                done = self.check(ranks, "--nccl")
                self.digest(done, ranks)
                self.assertEqual("NCCL 2.28.3" in done.stdout, ranks > 1, done.stdout)   # one rank opens none
                self.assertEqual("in shared memory as expected" in done.stdout, ranks > 1, done.stdout)
        older = self.check(2, "--nccl", fake="version=22703")
        self.assertIn("no shared memory: it takes NCCL 2.28.0 or newer, this is 2.27.3\n", older.stdout)
        with unittest.mock.patch.dict(ENVIRONMENT, NCCL_CTA_POLICY="0"):
            self.assertIn("no shared memory: NCCL_CTA_POLICY is 0, not 2\n", self.check(2, "--nccl").stdout)

    def test_groups_of_ranks_exchange_among_themselves(self):
        for ranks, size, nccl in ((4, 2, ()), (4, 2, ("--nccl",))):
            with self.subTest(ranks=ranks, size=size, nccl=nccl):
                done = self.check(ranks, "--groups", str(size), *nccl)
                found = re.search(rf"comm_check: {ranks} ranks, (\d+) cases as expected", done.stdout)
                self.assertGreater(int(found[1]), 540)

    def test_a_library_that_does_not_serve_ends_all_ranks_with_one_line(self):
        for fake, code, text in (
                ("version=21500", 2, "is NCCL 2.15.0, and 2.16.2 or newer is needed: install NCCL"),
                ("fail=ncclCommInitRank:1", 2, "rank 1: ncclCommInitRank of 2 ranks: system error (2); the last word"),
                ("fail=ncclAllGather:1", 2, "rank 1: ncclAllGather of 4194304 fp32: system error (2); the last word"),
                ("fail=ncclAllGather:3", 6, "rank 1: ncclAllGather of 2 fp32: system error (2); the last word"),
                ("fail=ncclCommWindowRegister:1", 6, "ncclCommWindowRegister (NCCL_CTA_POLICY=0 does without) of"),
                ("fail=ncclCommWindowDeregister:1", 6, "ncclCommWindowDeregister of 1 window: system error"),
                ("fail=ncclAlltoAll:3", 6, "rank 1: ncclAlltoAll of 2 fp32: system error"),
                ("fail=ncclGather:1", 6, "rank 1: ncclGather of 2048 e4m3: system error"),
                ("version=22703 fail=ncclRecv:4", 6,
                 "rank 1: ncclSend and ncclRecv (all to all) of 2 fp32: system error"),
                ("late", 6, "NCCL: remote error (6); the last word")):
            with self.subTest(fake):
                errors = self.check(2, "--nccl", expect=code, fake=fake).stderr
                self.assertIn(text, errors)
                self.assertEqual(errors.count("error: "), 1, errors)

    def test_ranks_that_do_not_come_are_given_up(self):
        for fake, text in (("stall=ncclCommInitRank", "2 ranks have not all come through in 3 s"),
                           ("stall=ncclAlltoAll", "first collectives: 2 ranks have not all come through in 3 s")):
            with self.subTest(fake):
                start = time.monotonic()
                self.assertIn(text, self.check(2, "--nccl", "--seconds", "3", expect=6, fake=fake).stderr)
                self.assertLess(time.monotonic() - start, 20)
