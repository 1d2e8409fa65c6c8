"""Ranks that are lost, stuck or asked to stop, over MPI on the CPU device: all end in time with the right exit code,
and the hang report says which rank waits for which."""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN, ONE_EACH, each_rank, fields, processes
from tests.support.run_command import run_command
from tests.support.train import GPT2, ROOT, TrainTest, make_tokens, records, write_shard

WRAPPER = [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:]]
TIMEOUT = 3   # --comm-timeout; all ranks are gone 5 s later
ANSWER = "stopping after this step, then saving; again: end now"
FOREVER = ["--train-iters", "1000000", "--comm-timeout", str(TIMEOUT)]


def shared_memory(pid):
    """The files of the run and of OpenMPI that a process has mapped or open."""
    found = set()
    try:
        found.update(re.findall(r"/dev/shm/(?!llmc-tests)[\w.-]+", Path(f"/proc/{pid}/maps").read_text()))
        for entry in os.listdir(f"/proc/{pid}/fd"):
            found.update(re.findall(r"^/dev/shm/(?!llmc-tests)[\w.-]+", os.readlink(f"/proc/{pid}/fd/{entry}")))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def catchable():
    """Resets SIGINT: a shell cannot trap a signal that was ignored when it started, and background jobs of a shell
    ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def with_sigusr1_blocked():
    catchable()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class WatchTest(TrainTest):
    measures_time = True   # of tests/run.py

    def setUp(self):
        super().setUp()
        self.save, self.log = self.path("run"), self.path("log.jsonl")

    def command_of(self, ranks, *options, launcher=WRAPPER, faults=None):
        return [*launcher, "-np", str(ranks),
                *self.command(GPT2, *ONE_EACH[:3], str(4 * ranks), *options, faults=faults)]

    def start(self, command, until="step 3/", before=catchable, **environment):
        """Starts the launcher. Returns its process, and its output up to that line."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=dict(ENVIRONMENT, **environment), preexec_fn=before)
        self.addCleanup(self.end, process)
        for line in process.stdout:
            if until in line:
                below = processes(process.pid)
                self.ranks = {pid for pid, name in below.items() if "train_" in name}
                self.shared = set().union(*(shared_memory(pid) for pid in [process.pid, *below]))
                return process
        self.fail(process.stderr.read())

    def end(self, process):
        """Ends the processes that a failed test has left."""
        if process.poll() is None:
            for pid in [process.pid, *processes(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()

    def finish(self, process, expect):
        """Waits for the end. Returns the seconds and the standard error; nothing of the run may be left."""
        start = time.monotonic()
        out, errors = process.communicate(timeout=60)
        took = time.monotonic() - start
        self.assertEqual(process.returncode, expect, out[-2000:] + errors)
        self.gone(self.ranks)
        self.assertEqual([path for path in self.shared if os.path.exists(path)], [])
        return took, errors

    def gone(self, pids):
        """None of these processes is left. On a busy machine a killed one may outlive the launcher for a moment."""
        end = time.monotonic() + 20
        while left := [pid for pid in pids if fields(pid)[:1] not in ([], ["Z"])]:
            self.assertLess(time.monotonic(), end, left)
            time.sleep(0.05)

    def run_all(self, command, expect=0, **environment):
        process = self.start(command, until="model", **environment)
        return self.finish(process, expect)[1]

    def rank_pids(self):
        pids = sorted(self.ranks)   # mpirun starts them in their order
        self.assertGreater(len(pids), 1)
        return pids

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv of util-linux")
    def test_a_killed_launcher_makes_the_ranks_save_and_leave(self):
        save = self.path("run")
        process = self.start(self.command_of(2, *FOREVER, "--save", save))
        process.kill()
        process.communicate(timeout=60)   # the ranks keep the pipe open until they end
        self.gone(self.ranks)
        self.assertEqual(len(self.checkpoints(save)), 1)

    def test_an_mpirun_that_takes_no_notice_of_a_dead_rank_is_ended(self):
        """If a rank is killed while it registers, OpenMPI 4.1 deadlocks in about one of 200 runs."""
        stuck = self.path("mpirun")
        Path(stuck).write_text(f"#!{sys.executable}\nimport os, sys, time\nif os.fork() == 0:\n"
                               "    os.environ['OMPI_COMM_WORLD_SIZE'] = '1'   # it is a rank\n"
                               "    os.execv(sys.argv[1], sys.argv[1:])\ntime.sleep(60)\n")
        os.chmod(stuck, 0o755)
        start = time.monotonic()
        command = [WRAPPER[0], *self.command(GPT2, "--train-iters", "3", faults="kill@backward=2")]
        run_command(command, 6, env=dict(ENVIRONMENT, MPIRUN=stuck))
        self.assertLess(time.monotonic() - start, 15)

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv of util-linux")
    def test_a_launcher_that_is_killed_before_the_ranks_meet_leaves_nothing(self):
        process = subprocess.Popen([*WRAPPER, "-np", "2", "bash", "-c", "echo here; sleep 50 & wait"],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
        self.addCleanup(self.end, process)
        self.assertEqual(process.stdout.readline(), "here\n")
        below = processes(process.pid)
        process.kill()
        self.gone(below)

    # ---- a rank is lost, or hangs

    def test_a_killed_rank_ends_all_and_the_others_say_so(self):
        process = self.start(self.command_of(3, *FOREVER))
        os.kill(self.rank_pids()[1], signal.SIGKILL)
        took, errors = self.finish(process, 6)
        self.assertLess(took, TIMEOUT + 5)
        self.assertRegex(errors, r"rank 1 \(process \d+ on [^)]+\) is gone, last seen in (step \d+|collective \d+)")
        for rank in (0, 2):   # the last place of each rank
            self.assertRegex(errors, rf"launch_mpi.sh: rank {rank} \(process \d+ on [^)]+\): .*step \d+")

    def test_the_report_has_the_place_of_a_rank_and_the_collective_of_the_others(self):
        valid = ["--valid-data", self.path("valid.bin"), "--eval-interval", "4", "--eval-iters", "4"]
        for fault, code, text in (
                ("kill:rank=0@backward=7", 6, r"rank 0 \(.*\) is gone, last seen in step 7, backward"),
                *((f"stop:rank={rank}@backward=7", 6,
                   rf"rank {rank} \(process \d+ on [^)]+\) has been suspended by a signal for 3[.\d]* s, last seen in "
                   rf"step 7, backward; rank {1 - rank} waits in collective \d+ \(reduce .*\) of step 7 for .* s "
                   r"\(--comm-timeout 3\); all ranks end") for rank in (0, 1)),
                ("stall:rank=1@backward=7", 6, r"rank 1 \(.*\) is in step 7, backward, without "
                                           r"progress for 3.*rank 0 waits in collective \d+ \(reduce "),
                ("stall:rank=0@evaluation=3", 6, r"rank 0 \(.*\) is in step 8, evaluation, without")):
            with self.subTest(fault):
                command = self.command_of(2, *FOREVER, *valid, faults=fault)
                start = time.monotonic()
                errors = self.run_all(command, expect=6)
                self.assertLess(time.monotonic() - start, TIMEOUT + 8)
                self.assertRegex(errors, text)
                self.assertEqual(errors.count("error: "), 1, errors)

    def test_without_the_wrapper_a_rank_that_hangs_gives_6_too(self):
        command = self.command_of(2, *FOREVER, launcher=MPIRUN, faults="stall:rank=1@backward=5")
        self.assertRegex(self.run_all(command, expect=6), r"error: rank 1 .* without progress for .*; rank 0 waits")

    def test_ranks_that_read_or_write_files_have_more_time(self):
        save = ["--save", self.save, "--save-interval", "2", "--comm-timeout", "0.5"]
        start = time.monotonic()
        errors = self.run_all(self.command_of(2, *FOREVER, *save, faults="stall@save=2"), expect=6)
        self.assertGreater(time.monotonic() - start, 5)
        self.assertRegex(errors, r"rank 0 \(.*\) is in step 4, save.*, without progress for 5.*--comm-timeout 0.5")
        self.assertEqual(self.checkpoints("run"), ["step-00000002"])

    # Ranks that do not share memory do not see each other's heartbeats. tests/cluster/ has real hosts.
    def two_hosts(self, *options, ranks=4, faults=None):
        """Ranks that are by turns on two hosts: the even ones here."""
        program = self.command(GPT2, *ONE_EACH, *options, faults=faults)
        hosts = ("here", "there") * (ranks // 2)
        return [*WRAPPER, *each_rank(*(["env", f"LLMFP8_HOST={host}", *program] for host in hosts))]

    def test_each_of_two_hosts_reports_its_ranks(self):
        process = self.start(self.two_hosts(*FOREVER))
        os.kill(self.rank_pids()[3], signal.SIGSTOP)
        took, errors = self.finish(process, 6)
        self.assertLess(took, TIMEOUT + 5)
        self.assertRegex(errors, r"error: on there: rank 3 \(process \d+ on there\) has been suspended by a signal for "
                         r"3.*, last seen in .*step \d+.*; rank 1 waits in collective \d+ .* of step \d+ for .*; all")
        self.assertRegex(errors, r"error: on here: all ranks of this host wait for another host \(there: ranks 1,3\); "
                         r"ranks? [02,]+ waits? in collective \d+ .* of step \d+ for .*; all ranks end")
        self.assertNotIn("no hang report", errors)
        for fault, text in (
                ("stall:rank=0@backward=9", r"error: on here: rank 0 \(process \d+ on here\) is in step 9, backward.*,"
                                            r" without progress for 3.*; rank 2 waits in collective \d+ .* of step 9"),
                ("kill:rank=1@backward=9", r"error: on there: rank 1 \(process \d+ on there\) is gone, last seen in .*;"
                                           r" rank 3 ")):
            with self.subTest(fault):
                errors = self.run_all(self.two_hosts(*FOREVER, faults=fault), expect=6)
                self.assertRegex(errors, text)

    def test_a_host_whose_only_rank_is_suspended_is_named_as_silent(self):
        process = self.start(self.two_hosts(*FOREVER, ranks=2))
        os.kill(self.rank_pids()[1], signal.SIGSTOP)
        errors = self.finish(process, 6)[1]
        self.assertRegex(errors, r"error: on here: all ranks of this host wait for another host \(there: rank 1\); "
                         r"rank 0 waits in collective \d+ .* of step \d+ for")
        self.assertIn("launch_mpi.sh: no hang report came from there\n", errors)

    def test_a_rank_that_dies_at_its_start_ends_all(self):
        train = self.command(GPT2, *ONE_EACH, *FOREVER)
        for delay in (0, 0.05, 0.2, 0.5):
            with self.subTest(delay=delay):
                dies = ["bash", "-c", f'"$@" & sleep {delay}; kill -KILL $! $$', "rank", *train]
                start = time.monotonic()
                run_command([*WRAPPER, *each_rank(train, dies)], 6, env=ENVIRONMENT)
                self.assertLess(time.monotonic() - start, 5 + delay)

    # ---- the run is asked to stop

    def last_step(self):
        steps = [r["step"] for r in records(self.log, "step")]
        return max(steps, default=0)

    def saved_and_stopped(self, reason):
        """The run must have saved a checkpoint of its last step, and must resume it."""
        stops = [r["text"] for r in records(self.log, "event") if r["kind"] == "stop"]
        self.assertEqual(len(stops), 1, stops)
        found = re.fullmatch(r"(.*) after step (\d+)", stops[0])
        self.assertTrue(found, stops)
        self.assertIn(found[1], (reason, "a stop of another rank"))
        last = int(found[2])
        self.assertEqual(self.last_step(), last)
        self.assertEqual(self.checkpoints("run")[-1], f"step-{last:08d}")
        shutil.rmtree(self.save)
        os.unlink(self.log)

    def saving(self, *options):
        return [*FOREVER, "--save", self.save, "--log-file", self.log, "--log-interval", "1", *options]

    def test_signals_to_the_wrapper_save_and_leave_with_0(self):
        for number, before in ((signal.SIGTERM, catchable), (signal.SIGINT, catchable), (signal.SIGUSR1, catchable),
                               (signal.SIGTERM, with_sigusr1_blocked)):
            with self.subTest(number.name, before=before.__name__):
                process = self.start(self.command_of(2, *self.saving()), before=before)
                process.send_signal(number)
                took, errors = self.finish(process, 0)
                self.assertLess(took, 5)
                self.assertEqual(errors.count(ANSWER), 1, errors)
                self.saved_and_stopped("a signal to the launch wrapper")

    def test_a_signal_to_every_process_does_the_same(self):
        process = self.start(self.command_of(2, *self.saving()))
        for pid in [*processes(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):   # the wrapper's sleep may be over
                os.kill(pid, signal.SIGTERM)
        self.finish(process, 0)
        self.saved_and_stopped("SIGTERM")

    def test_a_signal_before_the_first_step_leaves_with_0(self):
        process = self.start(self.command_of(2, *self.saving()), until="")
        process.send_signal(signal.SIGTERM)
        self.finish(process, 0)

    def test_a_second_signal_ends_all_at_once(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            process = self.start(self.command_of(2, *FOREVER, faults="stall:rank=1@backward=12"), until="step 10/")
            time.sleep(0.5)   # the rank hangs and cannot finish its step
            process.send_signal(number)
            time.sleep(1.2)   # a copy within a second would not count
            process.send_signal(number)
            took, errors = self.finish(process, 128 + number)
            self.assertLess(took, 5)
            self.assertIn(ANSWER, errors)
            self.assertIn("second signal", errors)

    def test_an_mpirun_that_ends_before_its_ranks_is_named(self):
        process = self.start([*WRAPPER, "-np", "2", "bash", "-c", "echo here; sleep 60"], until="here")
        mpirun = next(pid for pid, name in processes(process.pid).items() if name.endswith(("mpirun", "prterun")))
        os.kill(mpirun, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn(f"mpirun ended with exit code {process.returncode}, and no rank has said why", errors)

    def test_caught_in_evaluation_or_saving(self):
        options = ["--valid-data", self.path("valid.bin"), "--eval-interval", "4", "--eval-iters", "8",
                   "--save-interval", "6"]
        for fault, step, more in (("term:rank=1@evaluation=2", 4, []), ("term:rank=0@evaluation=3", 8, []),
                                  ("term:rank=1@save=1", 6, []), ("term:rank=1@save=1", 6, ["--save-async"])):
            with self.subTest(fault, more=more):
                self.run_all(self.command_of(2, *self.saving(*options, *more), faults=fault))
                if "@save" in fault:   # that one is complete, too
                    self.assertTrue(os.path.exists(os.path.join(self.save, "step-00000006", "manifest.json")))
                self.assertEqual(self.last_step(), step)
                self.saved_and_stopped("SIGTERM")

    def test_the_time_is_up(self):
        start = time.monotonic()
        self.run_all(self.command_of(2, *self.saving("--exit-duration-in-mins", "0.05")))
        self.assertLess(time.monotonic() - start, 10)
        self.saved_and_stopped("--exit-duration-in-mins 0.05")

    def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(self):
        for fault, more in (("enospc@save=2", []), ("enospc:rank=1@save=2", ["--save-async"])):
            with self.subTest(fault):
                command = self.command_of(2, *self.saving("--save-interval", "2", *more), faults=fault)
                errors = self.run_all(command, expect=7)
                self.assertRegex(errors, r"step-00000004 was not saved, rank \d: .*No space left on device")
                self.assertEqual(self.checkpoints("run"), ["step-00000002"])
                shutil.rmtree(self.save)

    # ---- ranks that are not alike

    def differing(self, first, second, text):
        """The run must end with exit code 2 and one line."""
        done = run_command([*WRAPPER, *each_rank(first, second)], 2, env=ENVIRONMENT)
        self.assertRegex(done.stderr, text)
        self.assertEqual(done.stderr.count("error: "), 1, done.stderr)

    def mpirun_below(self, process):
        """The id of the mpirun that the launch wrapper `process` has started."""
        while process.poll() is None:
            for pid, name in processes(process.pid).items():
                if os.path.basename(name) in ("mpirun", "prterun"):   # OpenMPI 4 and 5
                    return pid
            time.sleep(0.01)
        return self.fail("the launch wrapper has ended")

    def test_an_error_of_all_ranks_is_printed_once_even_if_the_launcher_ends_them_late(self):
        ours = self.command(GPT2, *ONE_EACH, "--train-iters", "2")
        ranks = ([*ours, "--seed", str(seed)] for seed in range(2))
        process = subprocess.Popen([*WRAPPER, *each_rank(*ranks)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True, env=ENVIRONMENT)
        self.addCleanup(self.end, process)
        launcher = self.mpirun_below(process)
        errors = next(line for line in process.stderr if "error: " in line)
        with contextlib.suppress(ProcessLookupError):   # on a busy machine it may have ended
            os.kill(launcher, signal.SIGSTOP)
            time.sleep(3)   # rank 1 waits 2 s for rank 0 to print
            os.kill(launcher, signal.SIGCONT)
        errors += process.stderr.read()   # communicate() would lose what was read ahead
        self.assertEqual(process.wait(60), 2, errors)
        self.assertEqual(errors.count("error: "), 1, errors)

    def test_ranks_of_other_builds_options_or_data_are_refused(self):
        ours = self.command(GPT2, *ONE_EACH, "--train-iters", "2")
        other = self.path("train_gpt2")
        shutil.copy(GPT2, other)
        with open(other, "ab") as file:
            file.write(b"\0")
        self.differing(ours, [other, *ours[1:]], r"rank 1 \(host .*\) has another executable than rank 0")
        self.differing(ours, [*ours, "--seed", "6"], r"rank 1 \(host .*\) has another set of options than rank 0.*seed")
        os.mkdir(self.path("other"))
        write_shard(self.path("other", "train_0.bin"), make_tokens(3000, 9))
        write_shard(self.path("other", "train_1.bin"), make_tokens(2001, 9))
        glob = ours.index(self.path("train_*.bin"))
        ours[glob] = "train_*.bin"
        self.differing(["env", "-C", self.dir, *ours], ["env", "-C", self.path("other"), *ours],
                       r"rank 1 \(host .*\) has another training data than rank 0")
