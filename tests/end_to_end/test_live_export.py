"""--tensorboard-dir and --wandb-project: processes that follow the log of a run. A replacement of the package records
the steps that it gets; tests/python/test_export_log.py tests scripts/export_log with the real packages."""
import os
import signal
import subprocess
import time
import unittest

from tests.support.log_tools import fake_tensorboard
from tests.support.train import LLAMA, TrainTest, records


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"   # it has ended, but its parent is gone


class LiveExport(TrainTest):
    measures_time = True   # of tests/run.py

    def setUp(self):
        super().setUp()
        self.env = dict(os.environ, PYTHONPATH=fake_tensorboard(self.path("packages")), PYTHONDONTWRITEBYTECODE="1")
        self.log, self.board = self.path("log.jsonl"), self.path("board")

    def options(self, steps):
        return ["--train-iters", str(steps), "--log-file", self.log, "--tensorboard-dir", self.board]

    def read(self, name):
        with open(os.path.join(self.board, name)) as file:
            return file.read().split()

    def wait_for(self, holds, seconds=60):
        end = time.monotonic() + seconds
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def long_run(self):
        process = subprocess.Popen(self.command(LLAMA, *self.options(100000)), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=self.env)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.wait_for(lambda: os.path.exists(os.path.join(self.board, "pid")) and self.read("pid"))
        self.wait_for(lambda: len(self.read("steps")) > 3)
        return process, int(self.read("pid")[0])

    def warnings(self):
        return [r["text"] for r in records(self.log, "event") if r["kind"] == "warning"]

    def test_every_step_is_written_while_the_run_goes_on(self):
        done = self.run_train(LLAMA, *self.options(12), "--valid-data", self.path("valid.bin"), "--eval-interval", "4",
                              env=self.env)
        self.assertEqual(done.stderr, "")
        self.assertEqual(sorted(set(map(int, self.read("steps")))), list(range(13)))
        self.assertTrue(gone(int(self.read("pid")[0])))
        self.assertEqual(self.warnings(), [])

    def test_a_trainer_that_is_killed_leaves_nothing_out(self):
        process, follower = self.long_run()
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.wait_for(lambda: gone(follower))
        self.assertEqual(int(self.read("steps")[-1]), records(self.log, "step")[-1]["step"])

    def test_a_follower_that_is_killed_hurts_nobody(self):
        process, follower = self.long_run()
        os.kill(follower, signal.SIGKILL)
        self.wait_for(lambda: self.warnings())
        done = len(records(self.log, "step"))
        self.wait_for(lambda: len(records(self.log, "step")) > done + 3)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 0)
        self.assertEqual(self.warnings(), [f"--tensorboard-dir {self.board}: scripts/export_log has ended (signal 9); "
                                           "the run goes on"])

    def test_a_missing_package_is_one_warning(self):
        with open(self.path("packages", "tensorboard", "__init__.py"), "w") as file:
            file.write("raise ImportError('none here')")
        done = self.run_train(LLAMA, *self.options(40), env=self.env)
        said = [*self.warnings(), *done.stderr.splitlines()]   # a short run may end before it is noticed
        self.assertEqual(len(said), 1)
        self.assertIn("scripts/export_log has ended (exit code 2): error: --to tensorboard needs the Python package "
                      "tensorboard (none here): ", said[0])
        self.assertEqual(len(records(self.log, "step")), 40)

    def test_there_must_be_a_log(self):
        done = self.run_train(LLAMA, "--train-iters", "1", "--wandb-project", "p", "--log-file", "", expect=2)
        self.assertIn("--wandb-project follows the log file, and there is none: --log-file FILE or --save DIR",
                      done.stderr)


if __name__ == "__main__":
    unittest.main()
