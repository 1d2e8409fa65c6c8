"""Faults of the environment: a run goes on or ends with one line and its exit code, never by a signal or a hang.

A row has a name, what a shell does before the run, the exit codes that may come, and a part of the line if it fails.
`$DIR` is the test's folder. The loader of the system answers some limits itself, with 127, before the program starts.
"""
import os
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, ONE_EACH
from tests.support.train import GPT2, ROOT, TrainTest

LOADER = 127
ROWS = (
    ("OMP_NUM_THREADS=100000", "export OMP_NUM_THREADS=100000", {2}, "OMP_NUM_THREADS asks for 100000 threads"),
    ("OMP_NUM_THREADS=0", "export OMP_NUM_THREADS=0", {0}, ""),
    ("OMP_NUM_THREADS=-1", "export OMP_NUM_THREADS=-1", {0}, ""),
    ("OMP_NUM_THREADS=junk", "export OMP_NUM_THREADS=junk", {0}, ""),
    ("OMP_NUM_THREADS=99999999999999999999", "export OMP_NUM_THREADS=99999999999999999999", {0}, ""),
    *((f"ulimit -n {n}", f"ulimit -n {n}", {0, 2, 7, LOADER}, "Too many open files") for n in (3, 4, 5, 6, 8, 12, 32)),
    *((f"ulimit -v {mb} MB", f"ulimit -v {mb}000", {0, 1, 2, LOADER}, "") for mb in (5, 13, 15, 20, 22, 30, 60, 200)),
    *((f"ulimit -f {n}", f"ulimit -f {n}", {7}, "") for n in (0, 1, 8)),
    ("ulimit -s 64", "ulimit -s 64", {0, LOADER}, ""),
    ("ulimit -s 256", "ulimit -s 256", {0, 2, LOADER}, ""),
    ("no TMPDIR", "export TMPDIR=/nonexistent/folder", {0}, ""),
    ("no HOME", "unset HOME", {0}, ""),
    ("LANG junk", "export LANG=xx_YY.junk LC_ALL=xx_YY.junk", {0}, ""),
    ("no PATH", "export PATH=", {0}, ""),
    ("empty environment", 'exec env -i "$@"', {0}, ""),
)


class EnvironmentFaults(TrainTest):
    def test_one_line_and_the_right_code(self):
        self.maxDiff = None
        for name, before, codes, part in ROWS:
            with self.subTest(name):
                out = self.path(name.replace(" ", ""))
                words = self.command(GPT2, "--train-iters", "3", "--save", out, "--log-file", out + ".jsonl")
                done = subprocess.run(["bash", "-c", f'{before}; exec "$@"', "bash", *words], capture_output=True,
                                      text=True, timeout=60, cwd=self.dir)
                self.assertIn(done.returncode, codes, done.stdout[-1000:] + done.stderr)
                if done.returncode in (0, LOADER) or "libgomp: Out of memory" in done.stderr:
                    continue
                lines = [line for line in done.stderr.splitlines() if not line.startswith("libgomp: ")]
                self.assertEqual(len(lines), 1, done.stderr)
                self.assertTrue(lines[0].startswith("error: "), done.stderr)
                self.assertIn(part, lines[0])


def can_mount():
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True,
                          check=False).returncode == 0


@unittest.skipUnless(can_mount(), "a mount namespace of its own needs root rights")
class Disks(TrainTest):
    """File systems that are full, missing or turn read-only, in a mount namespace of its own."""

    def inside(self, script, *words, limit=60):
        return subprocess.run(["unshare", "-m", "bash", "-c", script, "bash", *words], capture_output=True, text=True,
                              timeout=limit, cwd=self.dir, env=ENVIRONMENT)

    def test_a_save_folder_that_turns_read_only(self):
        os.mkdir(self.path("out"))
        # A mount over the folder, since one with open files cannot be made read-only.
        script = """{ "$@" 2>error | while read -r line; do case $line in
                    "step 3/"*) mount --bind out out && mount -o remount,bind,ro out;; esac; done
                    code=${PIPESTATUS[0]}; cat error >&2; exit $code; }"""
        words = self.command(GPT2, "--train-iters", "3000", "--log-interval", "1", "--save", "out",
                             "--save-interval", "50", "--log-file", "log.jsonl")
        done = self.inside(script, *words)
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertRegex(done.stderr, r"^error: .*out/.*Read-only file system.*\n$")

    def test_a_full_save_folder(self):
        os.mkdir(self.path("out"))
        words = self.command(GPT2, "--train-iters", "3", "--save", "out", "--log-file", "log.jsonl")
        done = self.inside('mount -t tmpfs -o size=64k tmpfs out && exec "$@"', *words)
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertRegex(done.stderr, r"^error: .*out.*\n$")

    @unittest.skipUnless(HAVE_RANKS, "mpirun is needed")
    def test_shared_memory_that_is_full_or_read_only(self):
        ranks = ["--oversubscribe", "--allow-run-as-root", "-np", "2",
                 *self.command(GPT2, *ONE_EACH, "--train-iters", "3")]
        launcher = os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh")
        for options, starter, code, part in (("size=4k", launcher, 7, "/dev/shm is full"),
                                             ("ro", launcher, 7, "/dev/shm"), ("size=4k", "mpirun", 0, ""),
                                             ("ro", "mpirun", 0, "")):
            with self.subTest(options, starter=os.path.basename(starter)):
                done = self.inside(f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', starter, *ranks)
                self.assertEqual(done.returncode, code, done.stderr)
                if code:
                    self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                    self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()
