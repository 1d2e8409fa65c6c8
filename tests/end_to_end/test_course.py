"""--skip-grad-norm on the CPU device: the step that has a large gradient, and no other, is skipped as one that is not
finite; a run that is resumed before or after it equals one that never stopped."""
import os
import statistics
import struct
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, records, state_of

STEPS, SPIKE, LEAST = 24, 20, 16
CASES = [
    (1, GPT2, ["--offload", "masters,moments", "--clip-grad", "0"]),
    (2, LLAMA, ["--fp8-recipe", "delayed", "--zero", "1", "--moment-dtype", "bf16"]),
    (3, LLAMA, ["--fp8-recipe", "tensorwise", "--zero", "3", "--fp8-final-bf16", "2", "--micro-batch-size", "1"]),
]


def rounded(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class SkipGradNormTest(RanksTest):
    def train(self, name, *options, faults=None):
        log = self.path(f"{name}.jsonl")
        if os.path.exists(log):
            os.unlink(log)
        done = self.ranks(self.np, self.binary, *self.both, "--global-batch-size", "12", "--train-iters", str(STEPS),
                          "--lr-decay-style", "linear", "--save", self.path(name), "--log-file", log, *options,
                          faults=faults)
        self.out = done.stdout
        return {r["step"]: r for r in records(log, "step")}

    def state(self, name, step=STEPS):
        state = state_of(self.path(name, f"step-{step:08d}"))
        state["state.json"]["config"].pop("skip-grad-norm")
        return state

    def tensors(self, name):
        return {file: digest for file, digest in self.state(name).items() if file.endswith(".safetensors")}

    def test_the_step_is_skipped_as_one_that_is_not_finite(self):
        for number, (self.np, self.binary, self.both) in enumerate(CASES):
            with self.subTest(ranks=self.np, binary=self.binary, both=self.both):
                spike, skip = f"spike@step={SPIKE}", ["--skip-grad-norm", "6"]
                name = f"run-{number}"
                steps = self.train(name, *skip, "--save-interval", "2", faults=spike)
                self.assertIn("norm above ", self.out)
                self.assertIn(f"finished {STEPS} steps, 1 skipped (1 by --skip-grad-norm)", self.out)
                self.assertEqual([step for step, r in steps.items() if r["norm_skipped"]], [SPIKE])
                self.assertEqual([step for step, r in steps.items() if r["skipped"]], [SPIKE])
                self.assertEqual((steps[STEPS]["skips"], steps[STEPS]["norm_skips"]), (1, 1))
                norms = [steps[step]["grad_norm"] for step in sorted(steps)]
                for step, r in steps.items():
                    earlier = norms[:step - 1]
                    limit = rounded(6 * statistics.median_high(earlier)) if len(earlier) >= LEAST else None
                    self.assertEqual(r["norm_limit"], limit, step)
                lost = self.train(f"lost-{number}", *skip, faults=f"nan@step={SPIKE}")
                self.assertEqual(self.tensors(f"lost-{number}"), self.tensors(name))
                self.assertEqual([r["lr"] for r in lost.values()], [r["lr"] for r in steps.values()])
                self.assertEqual(lost[STEPS]["norm_skips"], 0)
                # Without the option, and so early that there is no median yet, nothing is skipped.
                self.assertEqual(self.train(f"off-{number}", faults=spike)[STEPS]["skips"], 0)
                self.assertNotEqual(self.tensors(f"off-{number}"), self.tensors(name))
                early = self.train(f"early-{number}", *skip, faults=f"spike@step={LEAST}")
                self.assertFalse(early[LEAST]["skipped"])
                for begin in (SPIKE - 6, SPIKE, SPIKE + 2):   # with 14 norms, the spike among the norms, a later one
                    resumed = self.train(f"{name}-{begin}", *skip, "--resume", self.path(name, f"step-{begin:08d}"),
                                         faults=spike.replace(str(SPIKE), str(SPIKE - begin)))
                    keys = ("loss", "grad_norm", "norm_limit", "skips", "norm_skips", "lr")
                    for step, r in resumed.items():
                        self.assertEqual([r[key] for key in keys], [steps[step][key] for key in keys])
                    self.assertEqual(len(resumed), STEPS - begin)
                    self.assertEqual(self.state(f"{name}-{begin}"), self.state(name))
