"""Shared by the tests of the real executables: data, options of a small model, runs and resumed runs."""
import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

from tests.support.run_command import run_command

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("LLMC_BUILD", os.path.join(ROOT, "build", "cpu"))
GPT2 = os.path.join(BUILD, "train_gpt2")
LLAMA = os.path.join(BUILD, "train_llama")
VOCAB = 61


def with_faults(command, faults):
    """The command with the executable that injects these faults (tests/support/faults.cpp)."""
    faulty = {binary: ["env", f"LLMC_FAULTS={faults}", os.path.join(BUILD, "faults", os.path.basename(binary))]
              for binary in (GPT2, LLAMA)}
    return [part for word in command for part in faulty.get(word, [word])]


def write_shard(path, tokens):
    """llm.c's format with 16-bit tokens."""
    header = [20240520, 1, len(tokens)] + [0] * 253
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", *header))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def write_hellaswag(path, count, longest, seed=0, labels=()):
    """llm.c's format, questions of random tokens in rows of at most `longest` inputs; returns the questions."""
    draw, words, most, questions = random.Random(seed), [], 0, []
    for i in range(count):
        texts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest // 2))] for _ in range(5)]
        body = [i, labels[i] if labels else draw.randrange(4), 4, *(w for text in texts for w in (len(text), *text))]
        words += [0xffff, 2 * len(body) + 4, *body]
        most = max(most, 2 * len(body) + 4)
        questions.append(texts)
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240522, 1, count, most, *[0] * 252))
        f.write(struct.pack(f"<{len(words)}H", *words))
    return questions


def make_tokens(count, seed):
    """Text with structure: each token mostly determines the next."""
    draw = random.Random(seed)
    tokens = [0]
    while len(tokens) < count:
        tokens.append((tokens[-1] * 7 + 3) % VOCAB if draw.random() < 0.8 else draw.randrange(VOCAB))
    return tokens


def state_of(directory):
    """A hash of every file of a checkpoint; folders and intervals of the run are left out."""
    state = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            state[os.path.relpath(path, directory)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    state["state.json"] = json.loads(Path(directory, "state.json").read_text())
    for option in ("save", "save-interval", "resume", "log-file", "init-method-std", "load", "save-async"):
        state["state.json"]["config"].pop(option, None)
    del state["manifest.json"]   # hashes of the other files
    return state


def records(path, kind):
    with open(path) as f:
        return [r for r in map(json.loads, f) if r["type"] == kind]


SHAPE = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "4",
         "--kv-channels", "8", "--vocab-size", str(VOCAB), "--max-position-embeddings", "16",
         "--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4",
         "--lr", "1e-2", "--lr-warmup-iters", "0", "--seed", "5"]
# For matmuls in INT8, whose in-features are multiples of 64.
SIXTY_FOUR = ["--hidden-size", "64", "--ffn-hidden-size", "192", "--kv-channels", "16"]


class TrainTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="llmc-train-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        write_shard(self.path("train_0.bin"), make_tokens(3000, 1))
        write_shard(self.path("train_1.bin"), make_tokens(2001, 2))
        write_shard(self.path("valid.bin"), make_tokens(700, 3))

    def path(self, *parts):
        return os.path.join(self.dir, *parts)

    def fresh(self, name):
        """The path of a file that is not there."""
        Path(self.path(name)).unlink(missing_ok=True)
        return self.path(name)

    SHAPE = SHAPE

    def command(self, binary, *extra, model=None, faults=None):
        model = model or ("llama-tiny" if binary == LLAMA else "gpt2-tiny")
        groups = ["--num-query-groups", "2" if binary == LLAMA else "4"]
        command = [binary, "--model", model, *self.SHAPE, *groups, "--train-data", self.path("train_*.bin"), *extra]
        return with_faults(command, faults) if faults else command

    def checkpoints(self, save):
        return sorted(name for name in os.listdir(self.path(save)) if name.startswith("step-"))

    def run_train(self, *args, expect=0, env=None, cwd=None, **how):
        done = run_command(self.command(*args, **how), expect, env=env, cwd=cwd)
        if expect:
            self.assertEqual(done.stderr.count("\n"), 1, "one line on standard error: " + done.stderr)
        return done
