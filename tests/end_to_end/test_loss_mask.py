"""Training with loss masks: targets that do not count have no effect on losses, gradients and the counts in the
log."""
import json
import os
import re
import struct
from pathlib import Path

from tests.support.train import GPT2, LLAMA, TrainTest, make_tokens, records, state_of, write_shard

STEPS = 6


def write_mask(path, flags):
    bits = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        bits[i // 8] |= flag << (i % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<8sQQQ", b"LOSSMASK", 1, len(flags), sum(flags)) + bits)


class LossMaskTest(TrainTest):
    def setUp(self):
        super().setUp()
        os.unlink(self.path("train_1.bin"))
        # 24 samples of 16 tokens, all of them in 6 steps of 4; the last token is a target and never an input.
        self.tokens = make_tokens(24 * 16 + 1, 1)
        write_shard(self.path("train_0.bin"), self.tokens)

    def train(self, name, *options, binary=GPT2):
        text = self.run_train(binary, "--train-iters", str(STEPS), "--save", self.path(name), "--log-file",
                              self.path(name + ".jsonl"), *options).stdout
        return records(self.path(name + ".jsonl"), "step"), text

    def weights(self, name):
        return state_of(self.path(name, f"step-{STEPS:08d}"))["model.safetensors"]

    def test_a_target_that_does_not_count_has_no_part(self):
        for binary, options in ((GPT2, []), (LLAMA, ["--fp8-recipe", "tensorwise"])):
            weights, losses = {}, {}
            for counts in (0, 1):
                for last in (3, 4):
                    write_shard(self.path("train_0.bin"), self.tokens[:-1] + [last])
                    write_mask(self.path("train_0.mask"), [i % 3 == 0 for i in range(len(self.tokens) - 1)] + [counts])
                    name = f"{os.path.basename(binary)}-{counts}-{last}"
                    steps, _ = self.train(name, *options, binary=binary)
                    losses[counts, last], weights[counts, last] = [r["loss"] for r in steps], self.weights(name)
                    expected = sum(i % 3 == 0 for i in range(1, len(self.tokens) - 1)) + counts
                    self.assertEqual(sum(r["counted_tokens"] for r in steps), expected)
            self.assertEqual(losses[0, 3], losses[0, 4])
            self.assertEqual(weights[0, 3], weights[0, 4])
            self.assertNotEqual(losses[1, 3], losses[1, 4])
            self.assertNotEqual(weights[1, 3], weights[1, 4])
            self.assertNotEqual(weights[0, 3], weights[1, 3])

    def test_batches_without_a_target_that_counts_are_ignored(self):
        """One of 24 samples counts, so one of six batches per epoch does, and one of its micro-batches has a zero
        gradient, in FP8 too."""
        write_mask(self.path("train_0.mask"), [0] * 17 + [1] * 16 + [0] * (len(self.tokens) - 33))
        note = re.compile(r"note: step (\d+): none of (\d+) samples has a target that counts, they are ignored")
        for recipe in ("none", "delayed", "tensorwise", "blockwise"):
            options = [] if recipe == "none" else ["--fp8-recipe", recipe]
            steps, text = self.train(recipe, *options)
            self.assertEqual([r["step"] for r in steps], list(range(1, STEPS + 1)))
            self.assertTrue(all(r["counted_tokens"] == 16 and 0 < r["loss"] < 10 and r["grad_norm"] > 0
                                and not r["skipped"] for r in steps))
            self.assertGreater(steps[-1]["samples"], 24 * (STEPS - 1))
            passed = [(int(step), int(samples)) for step, samples in note.findall(text)]
            self.assertEqual(sum(samples for _, samples in passed), steps[-1]["samples"] - 4 * STEPS)
            self.assertEqual(len({step for step, _ in passed}), len(passed))

    def test_nothing_that_counts_ends_with_2(self):
        write_mask(self.path("train_0.mask"), [0] * len(self.tokens))
        done = self.run_train(GPT2, "--train-iters", "3", expect=2)
        self.assertIn("--train-data: no token counts as a target (loss masks)", done.stderr)
        write_mask(self.path("train_0.mask"), [1] + [0] * (len(self.tokens) - 1))   # the first token is never a target
        done = self.run_train(GPT2, "--train-iters", "3", expect=2)
        self.assertIn("step 1: none of 48 samples has a target that counts", done.stderr)
        done = self.run_train(GPT2, "--train-iters", "3", "--overfit-one-batch", expect=2)
        self.assertIn("step 1: none of 4 samples has a target that counts", done.stderr)
        os.unlink(self.path("train_0.mask"))
        write_mask(self.path("valid.mask"), [0] * 700)
        done = self.run_train(GPT2, "--train-iters", "3", "--valid-data", self.path("valid.bin"), "--eval-iters", "2",
                              expect=2)
        self.assertIn("--valid-data: no token of an evaluation counts as a target", done.stderr)

    def test_samples_begin_at_documents(self):
        separator, lengths = 60, [5, 9, 14, 3, 11, 7, 17, 40, 2] * 3
        tokens = [t if t != separator else 0 for t in make_tokens(sum(lengths), 1)]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for start in starts:
            tokens[start] = separator
        write_shard(self.path("train_0.bin"), tokens)
        write_mask(self.path("train_0.mask"), [int(i not in starts) for i in range(len(tokens))])
        Path(self.path("train_0.meta.json")).write_text(json.dumps({"tokenizer": {"separator": separator}}))
        one = ["--micro-batch-size", "1", "--global-batch-size", "1", "--epochs", "1"]
        text = self.run_train(GPT2, *one, "--save", self.path("run"), "--log-file", self.path("log.jsonl"),
                              "--reset-attention-mask", "--save-interval", "5").stdout
        found = re.search(r"note: training data: samples begin at documents: 27 documents in "
                          r"(\d+) samples, [\d.]+ % padding; 3 longer than a sample are cut, their later parts have "
                          r"21 % of the tokens", text)
        self.assertTrue(found, text)
        steps = records(self.path("log.jsonl"), "step")
        self.assertEqual(len(steps), int(found[1]))
        # An epoch counts every target once: all but the first token of each document.
        self.assertEqual(sum(r["counted_tokens"] for r in steps), len(tokens) - len(starts))
        self.run_train(GPT2, *one, "--save", self.path("again"), "--resume", self.path("run", "step-00000005"),
                       "--reset-attention-mask")
        done = self.run_train(GPT2, *one, "--save", self.path("run"), "--resume", "auto", "--align-documents", "off",
                              expect=2)
        self.assertIn("--align-documents: auto in the checkpoint, off now", done.stderr)
        last = f"step-{len(steps):08d}"
        self.assertEqual(state_of(self.path("again", last)), state_of(self.path("run", last)))
