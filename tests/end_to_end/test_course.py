"""What keeps a long run on its course, on the CPU device. --skip-grad-norm: the step that has a large gradient, and no
other, is skipped as one that is not finite. --z-loss: training has it, losses in the log and evaluations do not. --ema:
the average of the saved masters, evaluated and exported, without an effect on training. --lr-scale
and --mup-base-width: the updates of each group. tests/composition compares resumed runs with these options."""
import array
import json
import math
import os
import statistics
import struct
import unittest
from pathlib import Path

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, records, state_of, write_hellaswag

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
        log = self.fresh(f"{name}.jsonl")
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
        log = self.fresh("log.jsonl")
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
                for ranks, options in self.CASES if name == "fp32" else []:
                    several, _ = self.train(ranks, *dtype, "--z-loss", "0.1", *options, save=f"{name}-{ranks}")
                    for one, other in zip(steps, several, strict=True):
                        for key in ("loss", "z_loss", "grad_norm"):
                            self.assertAlmostEqual(one[key] / other[key], 1, delta=1e-6)

    def z_of_untrained(self, dtype):
        """After the same steps with a weight that is too small to matter."""
        return 1e5 * self.train(1, *dtype, "--z-loss", "1e-6", save="tiny" + dtype[1])[0][-1]["z_loss"]


def tensors_of(path):
    """The values of an FP32 safetensors file, by name."""
    content = Path(path).read_bytes()
    size, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = array.array("f", content[8 + size + begin:8 + size + end])
    return found


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class EmaTest(RanksTest):
    STEPS, DECAY = 4, 0.4   # the warm-up ends at the third step
    FP8 = ["--eval-bf16", "on", "--fp8-recipe"]
    CASES = [
        (1, GPT2, ["--offload", "moments,masters"], []),
        (1, GPT2, [*FP8, "delayed", "--fp8-lm-head", "--offload", "masters"],
         ["--untie-embeddings-and-output-weights"]),
        (2, LLAMA, [*FP8, "delayed", "--fp8-lm-head", "--zero", "1", "--offload", "moments"], []),
        (3, GPT2, [*FP8, "blockwise", "--zero", "2", "--offload", "moments,masters", "--offload-fraction", "0.5"], []),
        (3, LLAMA, [*FP8, "tensorwise", "--zero", "3", "--save-async"], []),
        (2, LLAMA, ["--zero", "0", "--moment-dtype", "bf16"], []),
        (2, GPT2, [*FP8, "delayed", "--zero", "3", "--overlap", "off"], []),
        (4, LLAMA, ["--zero", "3", "--zero-group", "2"], ["--context-parallel", "2", "--micro-batch-size", "2"]),
        (2, LLAMA, [*FP8, "delayed", "--fp8-final-bf16", "1"], []),
        (2, LLAMA, [*FP8, "delayed", "--optimizer", "muon", "--zero", "3", "--offload", "moments", "--moment-dtype",
                    "fp8"], []),
    ]

    def train(self, ranks, binary, *options, fault=None):
        log = self.fresh("log.jsonl")
        self.out = self.ranks(ranks, binary, "--num-layers", "3", "--bucket-mb", "0.02", "--global-batch-size", "12",
                              "--valid-data", self.path("valid.bin"), "--eval-iters", "5", "--eval-interval", "1",
                              "--hellaswag-data", self.path("hellaswag.bin"), "--log-file", log, *options,
                              faults=fault).stdout
        return records(log, "step"), records(log, "eval"), records(log, "hellaswag")

    def state(self, name, step=STEPS, ema=True):
        state = state_of(self.path(name, f"step-{step:08d}"))
        state["state.json"]["config"].pop("ema")
        return {name: digest for name, digest in state.items() if ema or "ema" not in name}

    def check_average(self, name, skipped=()):
        average = None
        for step in range(1, self.STEPS + 1):
            folder = self.path(name, f"step-{step:08d}", "optimizer")
            masters, saved = (tensors_of(os.path.join(folder, file + ".safetensors")) for file in ("master", "ema"))
            self.assertEqual(list(saved), list(masters))
            if average is not None and step not in skipped:
                t = step - sum(s < step for s in skipped)
                decay = min(self.DECAY, (1 + t) / (10 + t))
                for tensor, values in saved.items():
                    for old, master, value in zip(average[tensor], masters[tensor], values, strict=True):
                        self.assertAlmostEqual(value, decay * old + (1 - decay) * master, delta=1e-6)
                self.assertNotEqual(saved, masters)
            average = saved

    def test_it_is_the_average_evaluated_and_exported_and_changes_no_training(self):
        write_hellaswag(self.path("hellaswag.bin"), 7, 16)
        last = f"step-{self.STEPS:08d}"
        for number, (ranks, binary, options, both) in enumerate(self.CASES):
            with self.subTest(ranks=ranks, options=options):
                name, ema = f"run-{number}", ["--ema", str(self.DECAY), "--save-interval", "1"]
                run = ["--train-iters", str(self.STEPS), *options, *both]
                plain, plain_evals, _ = self.train(ranks, binary, *run, "--save", self.path("plain" + name))
                steps, evals, hellaswag = self.train(ranks, binary, *run, *ema, "--save", self.path(name))
                for before, after in zip(plain, steps, strict=True):
                    self.assertEqual([before[key] for key in ("loss", "grad_norm")],
                                     [after[key] for key in ("loss", "grad_norm")])
                for key in ("loss", "loss_bf16"):
                    self.assertEqual([r.get(key) for r in evals], [r.get(key) for r in plain_evals])
                self.assertEqual(self.state(name, ema=False), self.state("plain" + name))
                self.assertEqual([r["step"] for r in evals if "loss_ema" in r], list(range(1, self.STEPS + 1)))
                self.assertIn(", EMA %.4f" % evals[-1]["loss_ema"], self.out)
                self.check_average(name)
                # The exported model, evaluated in BF16.
                self.assertNotEqual(evals[-1]["loss_ema"], evals[-1]["loss"])
                bf16 = "_bf16" if "loss_ema_bf16" in evals[-1] else ""
                self.assertEqual(bf16 != "", "--fp8-recipe" in options and "--fp8-final-bf16" not in options)
                _, exported, answers = self.train(ranks, binary, "--load", self.path(name, last, "ema"),
                                                  "--train-iters", "1", *both)
                self.assertEqual(exported[0]["loss"], evals[-1]["loss_ema" + bf16])
                self.assertEqual(answers[0]["correct"], hellaswag[-1]["correct_ema" + bf16])
                for file in os.listdir(self.path(name, last)):
                    if os.path.isfile(self.path(name, last, file)) and file not in ("state.json", "manifest.json"):
                        self.assertTrue(os.path.exists(self.path(name, last, "ema", file)), file)

    def test_skipped_steps_and_checkpoints_without_it(self):
        write_hellaswag(self.path("hellaswag.bin"), 7, 16)
        run = ["--train-iters", "4", "--save-interval", "1", "--zero", "2"]
        self.train(2, LLAMA, *run, "--ema", str(self.DECAY), "--save", self.path("skips"), fault="nan@step=2")
        self.check_average("skips", skipped=(2,))
        self.assertEqual(*(Path(self.path("skips", f"step-0000000{step}", "optimizer", "ema.safetensors")).read_bytes()
                           for step in (1, 2)))
        self.train(2, LLAMA, *run, "--save", self.path("none"))
        self.assertFalse(os.path.exists(self.path("none", "step-00000002", "ema")))
        resume = ["--resume", self.path("none", "step-00000002"), "--ema", str(self.DECAY)]
        self.train(2, LLAMA, *run, *resume, "--train-iters", "2", "--save", self.path("began"))
        self.assertIn("the checkpoint has no EMA: it starts from the master weights", self.out)
        folder = self.path("began", "step-00000002", "optimizer")
        self.assertEqual(*(tensors_of(os.path.join(folder, f"{name}.safetensors")) for name in ("ema", "master")))
        self.train(2, LLAMA, *run, "--resume", self.path("skips", "step-00000002"), "--save", self.path("dropped"))
        self.assertFalse(os.path.exists(self.path("dropped", "step-00000004", "ema")))


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class LrScaleTest(RanksTest):
    SCALES = {"embedding": 0.5, "head": 4, "matrix": 2, "vector": 0.25}

    @staticmethod
    def group(name):
        if name == "lm_head.weight":
            return "head"
        return "embedding" if name in ("wte.weight", "wpe.weight") else ("vector" if "norm" in name or
                                                                           "bias" in name else "matrix")

    def masters(self, ranks, binary, name, *options, step=1):
        self.ranks(ranks, binary, "--train-iters", "1", "--global-batch-size", "6", "--save", self.path(name), *options)
        return tensors_of(self.path(name, f"step-{step:08d}", "optimizer", "master.safetensors"))

    def test_each_group_moves_by_its_factor(self):
        for ranks, binary, options in ((1, GPT2, []), (2, LLAMA, ["--zero", "3"]), (3, LLAMA, ["--optimizer", "muon"])):
            with self.subTest(ranks=ranks):
                scales = {group: scale for group, scale in self.SCALES.items() if group != "head" or binary == LLAMA}
                words = ["--lr-scale", ",".join(f"{group}={scale}" for group, scale in scales.items())]
                still, plain, scaled = (self.masters(ranks, binary, f"{ranks}-{name}", *options, *more)
                                        for name, more in (("still", ["--lr", "1e-30", "--min-lr", "0"]),
                                                           ("plain", []), ("scaled", words)))
                seen = set()
                for name, begin in still.items():
                    seen.add(self.group(name))
                    for a, b, c in zip(begin, plain[name], scaled[name], strict=True):
                        self.assertAlmostEqual(c - a, scales[self.group(name)] * (b - a), delta=1e-6, msg=name)
                    self.assertNotEqual(plain[name], begin)
                self.assertEqual(seen, set(scales))
        said = self.run_train(GPT2, "--train-iters", "1", "--lr-scale", "head=2", expect=2).stderr
        self.assertIn("--lr-scale head: the output matrix is the embedding", said)
        for wrong in ("head", "head=", "head=0", "head=-1", "body=1", "head=2,head=3", "head=1,head=3", "head=x"):
            said = self.run_train(LLAMA, "--train-iters", "1", "--lr-scale", wrong, expect=2).stderr
            self.assertIn("--lr-scale", said)

    def test_a_resumed_run_has_the_factors_that_it_is_given(self):
        """Of the update, and with --mup-base-width 8 of a width of 32 not of the decay, which is 0.01 of a weight."""
        factors = {**{group: 1 for group in self.SCALES}, "head": 0.25}
        for ranks, options, by_width in ((1, [], 0.25), (3, ["--optimizer", "muon"], 0.5)):
            same = [*options, "--lr-decay-style", "constant", "--weight-decay", "1"]
            begin = self.masters(ranks, LLAMA, f"begin-{ranks}", *same)
            plain, scaled, mup = (self.masters(
                ranks, LLAMA, f"{ranks}-{len(more)}-{more[-1:]}", *same, "--train-iters", "2", *more, "--resume",
                self.path(f"begin-{ranks}", "step-00000001"), step=2)
                for more in ([], ["--lr-scale", "head=0.5,matrix=2"], ["--mup-base-width", "8"]))
            for scales, found, decays in (({**factors, "head": 0.5, "matrix": 2}, scaled, 0),
                                          ({**factors, "matrix": by_width}, mup, 0.01)):
                for name, old in begin.items():
                    scale, decay = scales[self.group(name)], 0 if self.group(name) == "vector" else decays
                    for a, b, c in zip(old, plain[name], found[name], strict=True):
                        self.assertAlmostEqual(c - a, scale * (b - a + decay * a) - decay * a, delta=1e-6, msg=name)
