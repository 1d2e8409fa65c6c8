"""--fp8-first-bf16 and --fp8-final-bf16 on the CPU device: a run that switches equals one that is stopped at each
switch and resumed with the other options; one that is resumed before, at and after a switch equals one that never
stopped."""
import json
import os
import unittest
from pathlib import Path

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, SIXTY_FOUR, records, state_of

STEPS, FIRST, FINAL = 6, 2, 2
LAYERS = ["--num-layers", "4", "--bucket-mb", "0.02"]   # groups of several layers, and layers of several groups
BOTH = ["--fp8-first-bf16", str(FIRST), "--fp8-final-bf16", "0.3"]   # of 6 steps
CASES = [
    (1, LLAMA, ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "2"], []),
    (1, GPT2, ["--fp8-recipe", "blockwise", "--fp8-lm-head"], ["--offload", "masters,activations", "--overlap", "off"]),
    (2, LLAMA, ["--fp8-recipe", "tensorwise", "--bf16-linears", "1.*"], ["--zero", "0"]),
    (2, LLAMA, ["--fp8-recipe", "delayed", "--fp8-lm-head"],
     ["--zero", "1", "--offload", "masters,moments", "--offload-fraction", "0.5", "--moment-dtype", "bf16"]),
    (2, GPT2, ["--fp8-recipe", "blockwise"], ["--zero", "2", "--grad-dtype", "bf16", "--recompute", "block"]),
    (2, LLAMA, ["--fp8-recipe", "delayed"], ["--zero", "3", "--grad-comm-dtype", "fp8", "--offload", "moments"]),
    (2, LLAMA, ["--fp8-recipe", "int8-forward"], [*SIXTY_FOUR, "--zero", "3", "--recompute", "norm-act"]),
    (2, LLAMA, ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16"], ["--zero", "3"]),
    (1, LLAMA, ["--fp8-attention"], ["--kv-channels", "64"]),
    (1, LLAMA, ["--fp8-recipe", "blockwise"], ["--num-experts", "4"]),   # FP8 needs the load of the step before
]


def figures(log):
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(log, "step")}


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class SwitchedPrecision(RanksTest):
    BATCH = ["--micro-batch-size", "1", "--global-batch-size", "8", *LAYERS]

    def train(self, name, *options, expect=0, faults=None):
        """A run of this case; (figures of its steps, its output)."""
        log = self.path(f"{name}.jsonl")
        done = self.ranks(self.np, self.binary, *self.both, "--train-iters", str(STEPS), "--valid-data",
                          self.path("valid.bin"), "--eval-iters", "2", "--eval-interval", "2", "--log-file", log,
                          *options, expect=expect, faults=faults)
        return (figures(log) if os.path.exists(log) else {}), done.stdout + done.stderr

    def state(self, name, step):
        state = state_of(self.path(name, f"step-{step:08d}"))
        del state["state.json"]["config"]
        return state

    def test_it_equals_resumed_runs_of_either_precision(self):
        for number, (self.np, self.binary, fp8, self.both) in enumerate(CASES):
            with self.subTest(ranks=self.np, fp8=fp8):
                name, bf16 = f"{number}", ["--fp8-recipe", "none"]
                steps, said = self.train(name, *fp8, *BOTH, "--save", self.path(name), "--save-interval", "1")
                # By hand: BF16, then FP8 from its checkpoint, then BF16 from that.
                by_hand, last, back = {}, None, STEPS - FINAL
                for begin, end, options in ((0, FIRST, bf16), (FIRST, back, fp8), (back, STEPS, bf16)):
                    part = f"{name}-{begin}"
                    resume = ["--resume", self.path(last, f"step-{begin:08d}")] if last else []
                    by_hand.update(self.train(part, *options, *resume, "--save", self.path(part), "--save-interval",
                                              str(end))[0])
                    for step in [s for s in by_hand if s > end]:   # to the end of the run
                        del by_hand[step]
                    last = part
                self.assertEqual(steps, by_hand)
                self.assertEqual(self.state(name, STEPS), self.state(last, STEPS))
                self.check_log(self.path(f"{name}.jsonl"), said, fp8)
                for begin in (1, FIRST, FIRST + 1, STEPS - FINAL, STEPS - FINAL + 1):
                    part = f"{name}-resumed-{begin}"
                    again, said = self.train(part, *fp8, *BOTH, "--resume", self.path(name, f"step-{begin:08d}"),
                                             "--save", self.path(part))
                    self.assertEqual(again, {step: steps[step] for step in steps if step > begin})
                    self.assertEqual(self.state(part, STEPS), self.state(name, STEPS))
                    self.assertNotIn("changed", said)

    def check_log(self, log, said, fp8):
        told = [(r["step"], r["text"]) for r in records(log, "event") if r["kind"] == "precision"]
        self.assertEqual(told, [(FIRST, f"FP8 from step {FIRST + 1} on"), (STEPS - FINAL, "BF16 from step 5 on")])
        self.assertIn("BF16 in steps 1-2 and 5-6", " ".join(said.split()))
        if "--fp8-recipe" in fp8:
            counts = [r["text"].split(" ")[0] for r in records(log, "event") if "ran in the first step in" in r["text"]]
            self.assertEqual([count == "0" for count in counts], [True, False, True])
        evals = records(log, "eval")
        self.assertEqual([r["step"] for r in evals], [0, 2, 4, 6])
        self.assertEqual(evals[-1]["loss"], evals[-1]["loss_bf16"])
        self.assertEqual(records(log, "header")[0]["config"]["fp8-final-bf16"], 0.3)

    def test_steps_in_bf16_have_no_memory_for_what_fp8_attention_reads(self):
        for name in ("train_0", "train_1", "valid"):
            Path(self.path(name + ".meta.json")).write_text('{"tokenizer": {"separator": 0}}')
        self.np, self.binary, self.both = 2, LLAMA, ["--context-parallel", "2", "--kv-channels", "64"]
        steps, _ = self.train("positions", "--fp8-attention", "--reset-position-ids", *BOTH)
        self.assertEqual(len(steps), STEPS)

    def test_a_switch_that_does_not_happen_ends_the_run(self):
        self.np, self.binary, self.both = 1, LLAMA, []
        said = self.train("kept", "--fp8-recipe", "delayed", "--fp8-first-bf16", "1", expect=3, faults="bf16@1.down")[1]
        self.assertIn("FP8 was requested and is not effective: the first step in FP8 (9 micro-batches) ran", said)

    def test_plan_tells_time_and_memory_of_both(self):
        fp8 = ["--fp8-recipe", "delayed", "--offload", "activations", "--num-layers", "5"]
        command = self.command(LLAMA, "--dry-run", "--gpu", "H200", "--train-iters", "100")
        plans = {}
        for name, options in (("fp8", fp8), ("bf16", [*fp8[2:]]), ("both", [*fp8, "--fp8-final-bf16", "10"])):
            run = [*command, *options]
            said = run_command([*run, "--json"]).stdout
            plans[name] = json.loads(said)
        arenas = {name: plan["memory"]["arena_bytes"] for name, plan in plans.items()}
        self.assertEqual(arenas["both"], max(arenas["fp8"], arenas["bf16"]))
        self.assertEqual(plans["both"]["memory"]["pinned_host_bytes"], plans["bf16"]["memory"]["pinned_host_bytes"])
        times = {name: plan["time"]["step_ms"] for name, plan in plans.items()}
        self.assertEqual(times["both"], times["fp8"])
        self.assertEqual(plans["both"]["time"]["bf16_step_ms"], times["bf16"])
        text = run_command(run).stdout
        self.assertIn(f"  BF16 in steps 91-100: {times['bf16'] / 1e3:.4g} s/it\n", text)
        hours = (90 * times["fp8"] + 10 * times["bf16"]) / 3.6e6
        self.assertIn(f"100 steps in {hours:.4g} hours", text)
        self.assertRegex(text, r"arena +\d+ bytes +[\d.]+ GiB: FP8 takes [\d.]+ GiB, BF16 [\d.]+\n")
