"""--mup-base-width on the CPU device: the best learning rate of three widths. Its results depend on no machine."""
import random

from tests.support.train import LLAMA, TrainTest, records, write_shard

TOKENS, WIDTHS, RATES = 64, (32, 64, 128), ("1e-3", "4e-3", "1.6e-2", "6.4e-2", "2.56e-1")


def make_text(count, seed):
    """A token follows from the two before it, in nine of ten cases."""
    table, draw = random.Random(0), random.Random(seed)
    following = [table.randrange(TOKENS) for _ in range(TOKENS * TOKENS)]
    text = [0, 1]
    while len(text) < count:
        text.append(following[text[-2] % 8 * TOKENS + text[-1]] if draw.random() < 0.9 else draw.randrange(TOKENS))
    return text


class MupTest(TrainTest):
    SHAPE = ["--num-layers", "2", "--kv-channels", "16", "--vocab-size", str(TOKENS), "--seq-length", "32",
             "--max-position-embeddings", "32", "--micro-batch-size", "16", "--dtype", "fp32", "--train-iters", "60",
             "--lr-warmup-iters", "6", "--lr-decay-style", "linear", "--min-lr", "0", "--eval-interval", "0"]

    def setUp(self):
        super().setUp()
        write_shard(self.path("train_0.bin"), make_text(40000, 1))
        write_shard(self.path("train_1.bin"), make_text(40000, 2))
        write_shard(self.path("valid.bin"), make_text(5000, 3))

    def losses(self, width, *options):
        losses = []
        for rate in RATES:
            log, heads = self.path(f"{width}-{len(options)}-{rate}.jsonl"), str(width // 16)
            self.run_train(LLAMA, "--hidden-size", str(width), "--ffn-hidden-size", str(2 * width),
                           "--num-attention-heads", heads, "--num-query-groups", heads, "--lr", rate, "--valid-data",
                           self.path("valid.bin"), "--eval-iters", "4", "--log-file", log, *options)
            losses.append(records(log, "eval")[-1]["loss"])
        return losses

    def test_the_best_rate_does_not_move(self):
        base, middle, wide = (self.losses(width, "--mup-base-width", str(WIDTHS[0])) for width in WIDTHS)
        best = base.index(min(base))
        self.assertIn(best, range(1, len(RATES) - 1))   # there are worse rates on both sides
        self.assertEqual([losses.index(min(losses)) for losses in (middle, wide)], [best, best])
        self.assertTrue(base[best] > middle[best] > wide[best])   # a wider model is better at that rate
        without = self.losses(WIDTHS[-1])
        self.assertLess(without.index(min(without)), best)
        self.assertGreater(without[best], wide[best])
