"""Limits that the shell, a container or the disk sets for a run: it ends with one line and the exit code, or runs as
usual.

A row has a name, a shell command that runs before, environment variables (None: unset), the exit code (or several, if
it depends on the libraries which allocation fails first) and a part of the line on standard error. "" means that there
is no line, or any line if the run fails. FAULTS=print shows every line.
"""
import os
import re
import shutil
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN, each_rank
from tests.support.run_command import run_command
from tests.support.train import BUILD, GPT2, ROOT, TrainTest

FILES = "a run needs 64 open files: raise it with ulimit -n"
SPACE = "out of memory: "

ONE_PROCESS = [
    ("as usual", "", {}, 0, ""),
    ("threads of nested levels", "", {"OMP_NUM_THREADS": "2,2"}, 0, ""),
    ("threads as the library likes", "",
     {"OMP_NUM_THREADS": "4", "OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "1"}, 0, ""),
    # The message is OpenMP's, before the program begins.
    *((f"{value!r} threads", "", {"OMP_NUM_THREADS": value}, 0, "libgomp: Invalid value for environment variable")
      for value in ("0", "-1", "junk", "1e3", "99999999999999999999")),
    # The message is the dynamic loader's.
    ("3 files", "ulimit -n 3", {}, 127, "error while loading shared libraries"),
    *((f"{count} files", f"ulimit -n {count}", {}, 2, f"ulimit -n {count}: {FILES}")
      for count in (4, 5, 8, 16, 32, 63)),
    ("64 files", "ulimit -n 64", {}, 0, ""),
    ("memory for nothing", "ulimit -v 6000", {}, 127, "error while loading shared libraries"),
    ("memory for one thread without data", "ulimit -v 30000", {"OMP_NUM_THREADS": "1"}, 2, SPACE),
    ("no file may have bytes", "ulimit -f 0", {}, 7, "File too large"),
    ("a log of a block", "ulimit -f 1", {}, 7, "log.jsonl: cannot be written: File too large"),
    ("a checkpoint is too large", "ulimit -f 16", {}, 7, "File too large; raise the file size limit (ulimit -f)"),
    ("a stack without end", "ulimit -s unlimited", {}, 0, ""),
    ("no folder for temporary files", "", {"TMPDIR": "/nonexistent/folder"}, 0, ""),
    ("no home", "", {"HOME": None}, 0, ""),
    ("a language that there is not", "", {"LANG": "xx_XX.junk"}, 0, ""),
    ("the working folder was removed", "mkdir gone && cd gone && rmdir ../gone", {}, 0, ""),
    ("a log in a working folder that was removed",
     'mkdir gone && cd gone && rmdir ../gone && set -- "$@" --log-file sub/log.jsonl', {}, 2,
     "--log-file sub/log.jsonl: cannot be opened: its folder cannot be made: cannot mkdir sub: No such file or"),
    ("a working folder for checkpoints that was removed",
     'mkdir gone && cd gone && rmdir ../gone && set -- "${@/*\\/out/run}"', {}, 7, "cannot mkdir run: No such file or"),
]
RANKS = [
    ("as usual", "", {}, 0, ""), ("no folder for temporary files", "", {"TMPDIR": "/nonexistent/folder"}, 0, ""),
    ("no home", "", {"HOME": None}, 0, ""),
    ("files of a few kB", "ulimit -f 16", {}, 7, "files may have 16 KiB (ulimit -f): heartbeats of the ranks need"),
]
# The limit is set in the ranks only; OpenMPI adds lines of its own.
IN_RANKS = [
    ("too few files", "ulimit -n 32", {}, 2, f"ulimit -n 32: {FILES}"),
    ("files of a few kB", "ulimit -f 16", {}, 7, "File too large"),
]
SHARED_MEMORY = [
    ("no shared memory", "mount --bind empty /dev", {}, 7,
     "No such file or directory: heartbeats of the ranks need /dev/shm"),
    ("read-only", "mount -t tmpfs -o ro none /dev/shm", {}, 7, "Read-only file system: heartbeats of the ranks need"),
    ("full", "mount -t tmpfs -o size=16k none /dev/shm", {}, 7, "/dev/shm is full: free 1 MiB of it"),
]


def in_shell(before, command):
    return ["bash", "-c", f'{before or ":"}; exec "$@"', "bash", *command]


@unittest.skipUnless(os.path.basename(BUILD) == "cpu", "CUDA and sanitizers need memory and threads of their own")
class EnvironmentFaults(TrainTest):
    def check(self, rows, command, of_rank=False, alone=False):
        """`command(before)` returns the shell command of a row."""
        for name, before, variables, code, part in rows:
            with self.subTest(name):
                shutil.rmtree(self.path("out"), ignore_errors=True)
                environment = {**ENVIRONMENT, "LC_ALL": "C.UTF-8", **variables}
                environment = {key: value for key, value in environment.items() if value is not None}
                done = run_command(command(before), None, cwd=self.dir, env=environment)
                # OpenMP complains twice, because the program starts again with passive threads.
                said = list(dict.fromkeys(line for line in done.stderr.split("\n") if line))
                if os.environ.get("FAULTS") == "print":
                    print(f"{name}: {done.returncode} {said}")
                self.assertIn(done.returncode, code if isinstance(code, tuple) else (code,),
                              done.stdout[-300:] + done.stderr[-3000:])
                self.assertIn(part, done.stderr)
                self.assertNotRegex(done.stderr, r"terminate called|Segmentation|std::|what\(\)")
                if alone:
                    self.assertEqual(len(said), 1 if code or part else 0, said)
                elif code:
                    self.assertRegex(done.stderr, r"(?m)^(error: |launch_mpi\.sh: )")
                if code == 0:
                    self.assertIn("stop: finished 3 steps", done.stdout)
                    self.assertEqual(self.checkpoints("out"), ["step-00000003"])

    def train(self, *options):
        return self.command(GPT2, "--train-iters", "3", "--save", self.path("out"), *options)

    def test_one_process(self):
        self.check(ONE_PROCESS, lambda before: in_shell(before, self.train()), alone=True)

    def launcher(self, before=""):
        return [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:], "-np", "2",
                *(in_shell(before, self.train()) if before else self.train())]

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_several_ranks(self):
        self.check(RANKS, lambda before: in_shell(before, self.launcher()))
        self.check(IN_RANKS, self.launcher)

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_no_rank_is_taken_for_lost_that_cannot_start_a_thread(self):
        preload = ["env", "LD_PRELOAD=" + os.path.join(BUILD, "fake", "no_threads.so"), *self.train()]
        launcher = [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:]]
        for name, commands in (("first", (preload, self.train())), ("second", (self.train(), preload)),
                               ("both", (preload, preload))):
            for way, start in (("wrapper", launcher), ("mpirun", MPIRUN)):
                with self.subTest(name, way=way):
                    done = run_command([*start, *each_rank(*commands)], 2, env=ENVIRONMENT)
                    self.assertRegex(done.stderr, rf"(?m)^error: rank {int(name == 'second')}: a thread cannot be "
                                                  "started: raise the limit on processes")
                    self.assertNotIn("is gone", done.stderr)

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
    def test_shared_memory_of_several_ranks(self):
        os.mkdir(self.path("empty"))
        private = ["unshare", "--mount"]
        able = run_command([*private, "mount", "-t", "tmpfs", "none", "/mnt"], None)
        if able.returncode:
            self.skipTest("mounting needs privileges: " + able.stderr.strip())
        self.check(SHARED_MEMORY, lambda before: [*private, *in_shell(before, self.launcher())])

    def test_a_save_folder_that_turns_read_only(self):
        """In an immutable folder even root cannot make files."""
        os.mkdir(self.path("out"))
        if subprocess.run(["chattr", "+i", self.path("out")], capture_output=True, check=False).returncode:
            self.skipTest("the file system of temporary files has no immutable folders, or they need privileges")
        subprocess.run(["chattr", "-i", self.path("out")], check=True)
        run = subprocess.Popen(self.command(GPT2, "--train-iters", "1000000", "--save", self.path("out"), "--log-file",
                                            self.path("log.jsonl"), "--save-interval", "20", "--keep", "2"),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.addCleanup(run.kill)
        self.addCleanup(subprocess.run, ["chattr", "-i", self.path("out")], check=True)
        for line in run.stdout:
            if line.startswith("checkpoint step"):
                break
        subprocess.run(["chattr", "+i", self.path("out")], check=True)
        _, said = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 7, said)
        place = re.escape(self.path("out"))
        self.assertRegex(said, rf"\Aerror: cannot \w+ {place}\S+.*: Operation not permitted[^\n]*\n\Z")
        self.assertTrue(self.checkpoints("out"))
