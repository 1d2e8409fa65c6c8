"""Weighted blends in runs of the real executables: shares in the banner, resume, epochs. test_blend.cpp has the
positions of samples, which depend only on their numbers, and bad weights."""
import subprocess

from tests.support.train import GPT2, TrainTest, make_tokens, records, state_of, write_shard

BLEND = ["0.7", "train_0.bin", "0.3", "train_1.bin", "small.bin"]   # 187 samples; 125 and 31


class BlendTest(TrainTest):
    def setUp(self):
        super().setUp()
        write_shard(self.path("small.bin"), make_tokens(500, 4))

    def train(self, *options, data=BLEND, expect=0):
        words = [self.path(word) if word.endswith(".bin") else word for word in data]
        command = [GPT2, "--model", "gpt2-tiny", *self.SHAPE, "--num-query-groups", "4", "--dtype", "fp32",
                   "--train-data", *words, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, expect, done.stdout[-3000:] + done.stderr)
        return done

    def losses(self, log, after=0):
        return {r["step"]: r["loss"] for r in records(self.path(log), "step") if r["step"] > after}

    def test_shares_in_the_banner_and_the_same_samples_after_resume(self):
        steps = 20
        common = ["--train-iters", str(steps)]
        text = self.train(*common, "--save", self.path("straight"), "--save-interval", "7", "--log-file",
                          self.path("straight.jsonl")).stdout
        self.assertIn(f"training data: 70 % of the samples from {self.path('train_0.bin')}: 1 shard, 187 samples, "
                      "each read 0.299 times", text)
        self.assertIn(f"training data: 30 % of the samples from {self.path('train_1.bin')} and 1 more: 2 shards, "
                      "156 samples, each read 0.154 times", text)
        straight = self.losses("straight.jsonl")
        saved, last = self.path("straight", "step-00000007"), f"step-{steps:08d}"
        self.train(*common, "--resume", saved, "--save", self.path("resumed"), "--log-file", self.path("resumed.jsonl"))
        self.assertEqual(self.losses("resumed.jsonl", 7), {s: l for s, l in straight.items() if s > 7})
        self.assertEqual(state_of(self.path("resumed", last)), state_of(self.path("straight", last)))
        other = ["0.6", "train_0.bin", "0.4", "train_1.bin", "small.bin"]
        self.assertIn("7 : 3 of 1, 2 shards in the checkpoint, 3",
                      self.train(*common, "--resume", saved, data=other, expect=2).stderr)

    def test_an_epoch_has_as_many_samples_as_all_sources(self):
        self.train("--epochs", "0.5", "--log-file", self.path("log.jsonl"))
        self.assertEqual(len(self.losses("log.jsonl")), (187 + 125 + 31) // 2 // 4)

    def test_validation_may_be_a_blend_and_never_reads_a_sample_twice(self):
        valid = ["--valid-data", "0.9", self.path("valid.bin"), "0.1", self.path("small.bin"), "--eval-interval", "4"]
        text = self.train("--train-iters", "4", "--eval-iters", "20", *valid).stdout
        self.assertIn(f"validation data: 90 % of the samples from {self.path('valid.bin')}: 1 shard, 43 samples, each "
                      "read 0.837 times", text)
        self.assertIn("needs 54, its share of 60 (one evaluation", self.train(
            "--train-iters", "4", "--eval-iters", "30", *valid, expect=2).stderr)
