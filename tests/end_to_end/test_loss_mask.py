"""Training with loss masks: batches and data without a target that counts. test_loss_mask.cpp has which targets count,
tests/composition runs on them."""
import os
import re
import struct

from tests.support.train import GPT2, TrainTest, make_tokens, records, write_shard

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

    def train(self, name, *options):
        text = self.run_train(GPT2, "--train-iters", str(STEPS), "--log-file", self.path(name + ".jsonl"),
                              *options).stdout
        return records(self.path(name + ".jsonl"), "step"), text

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
        os.unlink(self.path("train_0.mask"))
        write_mask(self.path("valid.mask"), [0] * 700)
        done = self.run_train(GPT2, "--train-iters", "3", "--valid-data", self.path("valid.bin"), "--eval-iters", "2",
                              expect=2)
        self.assertIn("--valid-data: no token of an evaluation counts as a target", done.stderr)
