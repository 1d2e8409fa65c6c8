"""Checkpoints of several ranks over MPI on the CPU device: all ranks write them, any number of ranks resumes them, and
a partial one is never used."""
import json
import os
import random
import shutil
import signal
import subprocess
import time
import unittest
from pathlib import Path

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, RanksTest, processes
from tests.support.train import GPT2, LLAMA, records, state_of


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
    BATCH = ["--micro-batch-size", "1", "--global-batch-size", "12"]   # for 1, 2, 3 and 4 ranks

    def process_of(self, rank, mpirun):
        for pid, command in processes(mpirun.pid).items():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if command == GPT2 and f"OMPI_COMM_WORLD_RANK={rank}".encode() in environment:
                return pid
        return self.fail(f"no process of rank {rank}")

    def steps(self, log):
        return {r["step"]: r for r in records(self.path(log), "step")}

    def test_saved_on_two_and_resumed_on_others(self):
        """Resumes across the end of an epoch, which has 312 samples or 26 steps; each number of ranks twice."""
        recipes = {"fp32": (GPT2, (1, 3), ["--dtype", "fp32"]),
                   "delayed": (LLAMA, (2, 4), ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "3"]),
                   "1F1L": (LLAMA, (1, 4), ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16",
                                            "--num-layers-at-end-in-bf16", "0"]),
                   "blockwise": (GPT2, (2, 3), ["--fp8-recipe", "blockwise"])}
        for name, (binary, others, options) in recipes.items():
            common = ["--train-iters", "30", *options]
            self.ranks(2, binary, *common, "--save", self.path(name), "--save-interval", "24", "--save-async",
                       "--log-file", self.path(name + ".jsonl"))
            straight = self.steps(name + ".jsonl")
            saved = self.path(name, step_directory(24))
            expected = state_of(saved)
            self.assertGreater(len(expected), 5)
            for ranks in others:
                with self.subTest(recipe=name, ranks=ranks):
                    again, log = self.path(f"{name}-{ranks}"), f"{name}-{ranks}.jsonl"
                    self.ranks(ranks, binary, *common, "--resume", saved, "--save", again, "--save-interval", "24",
                               "--train-iters", "24")
                    found = state_of(os.path.join(again, step_directory(24)))
                    self.assertEqual(found["state.json"]["config"]["train-iters"], 24)
                    found["state.json"]["config"]["train-iters"] = 30
                    self.assertEqual(found, expected)
                    self.ranks(ranks, binary, *common, "--resume", saved, "--log-file", self.path(log))
                    resumed = self.steps(log)
                    self.assertEqual(list(resumed), list(range(25, 31)))
                    for step, record in resumed.items():
                        self.assertEqual(record["samples"], straight[step]["samples"])
                        tolerance = 0 if ranks == 2 else 1e-5 if name == "fp32" else 1e-2
                        self.assertLessEqual(abs(record["loss"] / straight[step]["loss"] - 1), tolerance)

    def test_damage_is_named_by_file_and_rank(self):
        save = self.path("run")
        common = ["--save", save, "--save-interval", "2", "--log-file", self.path("log.jsonl"), "--resume", "auto"]
        self.ranks(3, LLAMA, "--train-iters", "4", *common)
        newest = os.path.join(save, step_directory(4))
        ranges = json.loads(Path(newest, "manifest.json").read_text())["files"]["optimizer/m.safetensors"]["ranges"]
        self.assertEqual({r["rank"] for r in ranges}, {0, 1, 2})
        victim = next(r for r in ranges if r["rank"] == 2)
        damaged = os.path.join(newest, "optimizer", "m.safetensors")
        flip(damaged, victim["begin"] + victim["bytes"] // 2)
        text = f"bytes {victim['begin']} to {victim['begin'] + victim['bytes']}, written by rank 2"
        for ranks in (1, 2):
            done = self.ranks(ranks, LLAMA, "--train-iters", "6", "--resume", newest, expect=5)
            self.assertIn("optimizer/m.safetensors is damaged", done.stderr)
            self.assertIn(text, done.stderr)
        whole = os.path.getsize(damaged)
        os.truncate(damaged, whole - 8)
        done = self.ranks(2, LLAMA, "--train-iters", "6", "--resume", newest, expect=5)
        self.assertIn(f"optimizer/m.safetensors has {whole - 8} bytes instead of {whole}", done.stderr)
        done = self.ranks(4, LLAMA, "--train-iters", "6", *common)
        self.assertIn(f"skipped checkpoint: {newest}", done.stdout)
        self.assertEqual(list(self.steps("log.jsonl")), [1, 2, 3, 4, 5, 6])

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

    def test_a_rank_killed_while_it_saves_costs_no_checkpoint(self):
        save, log = self.path("run"), self.path("log.jsonl")
        draw = random.Random(1)
        common = ["--save", save, "--save-interval", "1", "--keep", "3", "--resume", "auto", "--log-file", log,
                  "--lr-decay-style", "constant"]
        left_half = 0
        for trial in range(8):
            mode = ["--save-async"] if trial % 2 else []
            process = subprocess.Popen(self.mpirun(2, GPT2, "--train-iters", "100000", *common, *mode),
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
            saves = 0
            while saves < 3:
                line = process.stdout.readline()
                self.assertTrue(line, "the run ended by itself")
                saves += line.startswith("checkpoint step")
            time.sleep(draw.random() * 0.05)
            os.kill(self.process_of(trial // 2 % 2, process), signal.SIGKILL)
            process.communicate(timeout=60)
            names = os.listdir(save)
            left_half += any(name.startswith(".tmp-") for name in names)
            newest = max(int(name[5:]) for name in names if name.startswith("step-"))
            done = self.ranks(1 + trial % 3, GPT2, "--train-iters", str(newest + 1), *common, *mode)
            self.assertIn(f"resumed {save}/{step_directory(newest)} at step {newest}", done.stdout)
            self.assertNotIn("skipped checkpoint", done.stdout)
            self.assertFalse([name for name in os.listdir(save) if not name.startswith("step-")])
            self.assertLess(newest, 90000)
        self.assertGreater(left_half, 0, "no kill fell into a save")

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
        last = max(self.steps("log.jsonl"))
        names = sorted(os.listdir(self.path("run")))
        self.assertEqual(names, [step_directory(s) for s in sorted({*range(5, last + 1, 5), last})])
        shutil.rmtree(self.path("run", names[0]))
        for name in names[1:]:
            self.assertTrue(os.path.isfile(self.path("run", name, "manifest.json")))
