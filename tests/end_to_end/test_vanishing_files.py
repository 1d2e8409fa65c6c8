"""Shards are truncated while a run reads them: it saves a checkpoint and exits with 2 and one line, on any number of
ranks."""
import json
import os
import re
import shutil
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN, ONE_EACH, RanksTest
from tests.support.train import GPT2, TrainTest, records


def cut_after_a_step(process, path, left=1024):
    """Truncates a shard when the run has printed its third step. Returns the standard error of the run."""
    for line in process.stdout:
        if line.startswith("step 3/"):
            os.truncate(path, left)
            break
    process.stdout.read()
    return process.stderr.read()


class CutShards(TrainTest):
    def run_and_cut(self, path, *options):
        command = self.command(GPT2, "--train-iters", "100000", "--log-interval", "1", "--save", self.path("out"),
                               "--log-file", self.path("log.jsonl"), *options)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            error = cut_after_a_step(process, path)
        self.assertEqual(process.returncode, 2, error)
        self.assertRegex(error, r"^error: data shard '" + re.escape(path) + r"': byte \d+ is missing: the file had "
                                r"\d+ bytes when it was opened and has 1024 now.*; the run stops after step \d+, "
                                r"the newest checkpoint is .*\n$")
        step = int(re.search(r"after step (\d+)", error)[1])
        self.assertEqual(self.checkpoints("out"), [f"step-{step:08d}"])
        last = records(self.path("log.jsonl"), "event")[-1]
        self.assertEqual((last["kind"], f"error: {last['text']}\n"), ("stop", error))
        return step

    def test_a_cut_training_shard_ends_the_run_after_a_save(self):
        whole = self.path("whole")
        shutil.copy(self.path("train_0.bin"), whole)
        step = self.run_and_cut(self.path("train_0.bin"))
        done = self.run_train(GPT2, "--train-iters", str(step + 2), "--save", self.path("out"), "--resume", "auto",
                              "--log-file", self.path("log.jsonl"), expect=2)
        self.assertIn("truncated", done.stderr)
        shutil.copy(whole, self.path("train_0.bin"))
        self.run_train(GPT2, "--train-iters", str(step + 2), "--save", self.path("out"), "--resume", "auto",
                       "--log-file", self.path("log.jsonl"))
        self.assertEqual([r["step"] for r in records(self.path("log.jsonl"), "step")], list(range(1, step + 3)))

    def test_a_cut_validation_shard_ends_the_run_after_a_save(self):
        step = self.run_and_cut(self.path("valid.bin"), "--valid-data", self.path("valid.bin"), "--eval-interval", "2",
                                "--eval-iters", "5")
        self.assertEqual(step % 2, 0)
        with open(self.path("out", f"step-{step:08d}", "state.json")) as file:
            self.assertIn("eval", json.dumps(json.load(file)["missed"]))


@unittest.skipUnless(HAVE_RANKS, "mpirun is needed")
class CutShardsOfRanks(RanksTest):
    measures_time = True   # of tests/run.py

    def test_the_ranks_end_together_if_one_of_them_cannot_read(self):
        for rank in "01":
            os.mkdir(self.path(rank))
            for shard in ("train_0.bin", "train_1.bin"):
                shutil.copy(self.path(shard), self.path(rank, shard))
        command = self.command(GPT2, *ONE_EACH, "--train-iters", "100000", "--log-interval", "1", "--save",
                               self.path("out"))
        command[command.index("--train-data") + 1] = "train_*.bin"
        in_folder = ["bash", "-c", f'cd "{self.dir}/$OMPI_COMM_WORLD_RANK" && exec "$@"', "bash"]
        with subprocess.Popen([*MPIRUN, "-np", "2", *in_folder, *command], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
            error = cut_after_a_step(process, self.path("1", "train_0.bin"))
        self.assertEqual(process.returncode, 2, error)
        lines = [line for line in error.splitlines() if line.startswith("error:")]
        self.assertEqual(len(lines), 1, error)
        self.assertIn("rank 0: data shard 'train_0.bin': byte ", lines[0])
        self.assertIn("(on rank 1)", lines[0])
        step = int(re.search(r"after step (\d+)", lines[0])[1])
        self.assertEqual(self.checkpoints("out"), [f"step-{step:08d}"])
