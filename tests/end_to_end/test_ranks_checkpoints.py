"""Checkpoints of several ranks over MPI on the CPU device. test_checkpoint_ranks.cpp and test_checkpoint_async.cpp have
damage to them and kills at each call, tests/composition resumes them on other numbers of ranks."""
import json
import os
import shutil
import signal
import subprocess
import unittest
from pathlib import Path

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, records


def step_directory(step):
    return f"step-{step:08d}"


def flip(path, place):
    """Flips one bit of the byte at this offset."""
    with open(path, "r+b") as f:
        f.seek(place)
        byte = f.read(1)[0]
        f.seek(place)
        f.write(bytes([byte ^ 32]))


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class RankCheckpointsTest(RanksTest):
    BATCH = ["--micro-batch-size", "1", "--global-batch-size", "12"]   # for 2 and 3 ranks

    def test_damaged_weights_are_found_whichever_rank_looks(self):
        save = self.path("run")
        self.ranks(3, LLAMA, "--train-iters", "1", "--save", save)
        checkpoint = os.path.join(save, step_directory(1))
        ranges = json.loads(Path(checkpoint, "manifest.json").read_text())["files"]["model.safetensors"]["ranges"]
        self.assertGreater(len(ranges), 2)
        load = ["--train-iters", "1", "--load", checkpoint]
        self.ranks(2, LLAMA, *load)
        for part in ranges[:3]:
            flip(os.path.join(checkpoint, "model.safetensors"), part["begin"] + part["bytes"] // 2)
            done = self.ranks(2, LLAMA, *load, expect=5)
            self.assertIn(f"no usable model at {checkpoint}: model.safetensors is damaged: the XXH3 of bytes "
                          f"{part['begin']} to", done.stderr)
            flip(os.path.join(checkpoint, "model.safetensors"), part["begin"] + part["bytes"] // 2)
        self.ranks(2, LLAMA, *load)

    def test_a_stop_signal_waits_for_the_save_behind_training(self):
        process = subprocess.Popen(self.mpirun(2, GPT2, "--train-iters", "100000", "--save", self.path("run"),
                                               "--save-interval", "5", "--save-async", "--log-file",
                                               self.path("log.jsonl")),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for line in process.stdout:
            if line.startswith("step 12/"):
                break
        process.send_signal(signal.SIGUSR1)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, error)
        last = max(r["step"] for r in records(self.path("log.jsonl"), "step"))
        names = sorted(os.listdir(self.path("run")))
        self.assertEqual(names, [step_directory(s) for s in sorted({*range(5, last + 1, 5), last})])
        shutil.rmtree(self.path("run", names[0]))
        for name in names[1:]:
            self.assertTrue(os.path.isfile(self.path("run", name, "manifest.json")))
