"""--eval-bf16 on the CPU device: what an FP8 run evaluates in BF16 is what a BF16 run of its exported weights
evaluates, and training does not see it."""
import json
import os
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, SIXTY_FOUR, records, state_of, write_hellaswag

LAYERS = ["--num-layers", "4", "--bucket-mb", "0.02"]   # groups of several layers, and layers of several groups
CASES = [
    (1, LLAMA, ["--fp8-recipe", "delayed"], []),
    (1, GPT2, ["--fp8-recipe", "blockwise", "--fp8-lm-head", "--offload", "masters", "--grad-dtype", "bf16"], []),
    (2, LLAMA, ["--fp8-recipe", "blockwise", "--fp8-lm-head", "--zero", "0"], []),
    (2, LLAMA, ["--fp8-recipe", "delayed", "--fp8-lm-head", "--zero", "1", "--offload", "masters,activations"], []),
    (3, GPT2, ["--fp8-recipe", "tensorwise", "--zero", "1", "--bf16-linears", "1.*", "--loss-chunk", "8"], []),
    (3, LLAMA, ["--fp8-recipe", "delayed", "--zero", "2", "--offload", "masters", "--offload-fraction", "0.5"], []),
    (2, GPT2, ["--fp8-recipe", "blockwise", "--zero", "2", "--overlap", "off", "--grad-shard-dtype", "bf16"], []),
    (3, LLAMA, ["--fp8-recipe", "delayed", "--fp8-lm-head", "--zero", "3", "--recompute", "block"], []),
    (2, LLAMA, ["--fp8-recipe", "blockwise", "--zero", "3", "--offload", "masters", "--grad-dtype", "bf16"], []),
    (2, LLAMA, ["--fp8-recipe", "int8-forward", "--zero", "3"], SIXTY_FOUR),
    (4, LLAMA, ["--fp8-recipe", "delayed", "--zero", "3", "--zero-group", "2"],
     ["--context-parallel", "2", "--micro-batch-size", "2"]),
    (2, LLAMA, ["--fp8-attention", "--kv-channels", "64", "--fp8-recipe", "tensorwise"],
     ["--context-parallel", "2", "--micro-batch-size", "2"]),
    (1, LLAMA, ["--fp8-attention", "--kv-channels", "64"], []),
]


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class EvalBf16Test(RanksTest):
    def run_log(self, ranks, binary, *options):
        log = self.fresh("log.jsonl")
        self.text = self.ranks(ranks, binary, *LAYERS, "--global-batch-size", "12", "--valid-data",
                               self.path("valid.bin"), "--eval-iters", "5", "--hellaswag-data",
                               self.path("hellaswag.bin"), "--sample-tokens", "3", "--temperature", "0",
                               "--log-file", log, *options).stdout
        return log

    def test_it_is_the_evaluation_of_the_exported_weights_and_changes_no_training(self):
        write_hellaswag(self.path("hellaswag.bin"), 7, 16)
        for number, (ranks, binary, fp8, both) in enumerate(CASES):
            with self.subTest(ranks=ranks, fp8=fp8):
                train = ["--train-iters", "4", "--eval-interval", "2", "--sample-every", "2", *fp8, *both]
                off, on = self.path(f"off-{number}"), self.path(f"on-{number}")
                plain = self.run_log(ranks, binary, *train, "--save", off, "--eval-bf16", "off")
                steps, trained = records(plain, "step"), records(plain, "eval")
                log = self.run_log(ranks, binary, *train, "--save", on, "--eval-bf16", "on")
                for before, after in zip(steps, records(log, "step"), strict=True):
                    self.assertEqual([before[key] for key in ("loss", "grad_norm")],
                                     [after[key] for key in ("loss", "grad_norm")])
                step = "step-00000004"
                before, after = (state_of(os.path.join(folder, step)) for folder in (off, on))
                self.assertEqual(after["state.json"]["config"].pop("eval-bf16"), "on")
                self.assertEqual(before["state.json"]["config"].pop("eval-bf16"), "off")
                self.assertEqual(before, after)
                evals = records(log, "eval")
                self.assertEqual([r["loss"] for r in evals], [r["loss"] for r in trained])
                self.assertEqual([r["step"] for r in evals if "loss_bf16" in r], [0, 2, 4])
                self.assertNotEqual(evals[-1]["loss"], evals[-1]["loss_bf16"])
                self.assertIn(", in BF16 %.4f |" % evals[-1]["loss_bf16"], self.text)
                hellaswag, sample = records(log, "hellaswag")[-1], records(log, "sample")[-1]
                exported = self.run_log(ranks, binary, "--load", os.path.join(on, step), "--train-iters", "1",
                                        "--sample-every", "1", *both, *fp8[fp8.index("--kv-channels"):][:2]
                                        if "--kv-channels" in fp8 else [])
                self.assertEqual(records(exported, "eval")[0]["loss"], evals[-1]["loss_bf16"])
                self.assertNotIn("loss_bf16", records(exported, "eval")[0])
                self.assertEqual(records(exported, "hellaswag")[0]["correct"], hellaswag["correct_bf16"])
                self.assertEqual(records(exported, "sample")[0]["text"], sample["text"])
