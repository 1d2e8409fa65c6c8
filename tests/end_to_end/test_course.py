"""What keeps a long run on its course, on the CPU device. --skip-grad-norm: the step that has a large gradient, and no
other, is skipped as one that is not finite. --z-loss: training has it, losses in the log and evaluations do not. A run
that is resumed equals one that never stopped."""
import math
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


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ZLossTest(RanksTest):
    CASES = [(1, ["--loss-chunk", "5"]), (2, ["--zero", "2"]), (4, ["--context-parallel", "2", "--zero", "3"])]

    def train(self, ranks, *options, save="run"):
        log = self.path("log.jsonl")
        if os.path.exists(log):
            os.unlink(log)
        self.out = self.ranks(ranks, LLAMA, "--train-iters", "4", "--valid-data", self.path("valid.bin"),
                              "--eval-iters", "2", "--micro-batch-size", "2", "--log-file", log, "--save",
                              self.path(save), "--save-interval", "2", *options).stdout
        return records(log, "step"), records(log, "eval")

    def test_training_has_it_and_losses_do_not(self):
        for dtype in (["--dtype", "fp32"], ["--fp8-recipe", "blockwise", "--fp8-lm-head", "--eval-bf16", "off"]):
            with self.subTest(dtype=dtype):
                name = dtype[1]
                plain, plain_evals = self.train(1, *dtype, save="plain" + name)
                self.assertIsNone(plain[0]["z_loss"])
                steps, evals = self.train(1, *dtype, "--z-loss", "0.1", save=name)
                self.assertIn(f" + z {steps[0]['z_loss']:.4f} |", self.out)
                self.assertEqual(steps[0]["loss"], plain[0]["loss"])
                self.assertEqual(evals[0]["loss"], plain_evals[0]["loss"])
                self.assertNotEqual(steps[0]["grad_norm"], plain[0]["grad_norm"])
                # The log-sum-exp of 61 nearly equal logits is ln 61; training lowers it.
                self.assertAlmostEqual(steps[0]["z_loss"], 0.1 * math.log(61) ** 2, delta=0.02)
                self.assertLess(steps[-1]["z_loss"], steps[0]["z_loss"])
                self.assertLess(steps[-1]["z_loss"], 0.99 * self.z_of_untrained(dtype))
                again, _ = self.train(1, *dtype, "--z-loss", "0.1", "--resume", self.path(name, "step-00000002"),
                                      save=name + "-resumed")
                self.assertEqual([(r["loss"], r["z_loss"], r["grad_norm"]) for r in again],
                                 [(r["loss"], r["z_loss"], r["grad_norm"]) for r in steps[2:]])
                self.assertEqual(state_of(self.path(name + "-resumed", "step-00000004")),
                                 state_of(self.path(name, "step-00000004")))
                for ranks, options in self.CASES if name == "fp32" else []:
                    several, _ = self.train(ranks, *dtype, "--z-loss", "0.1", *options, save=f"{name}-{ranks}")
                    for one, other in zip(steps, several, strict=True):
                        for key in ("loss", "z_loss", "grad_norm"):
                            self.assertAlmostEqual(one[key] / other[key], 1, delta=1e-6)

    def z_of_untrained(self, dtype):
        """After the same steps with a weight that is too small to matter."""
        return 1e5 * self.train(1, *dtype, "--z-loss", "1e-6", save="tiny" + dtype[1])[0][-1]["z_loss"]
