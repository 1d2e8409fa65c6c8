"""Mixtures of experts on the CPU device: ranks and ZeRO levels, resumes, optimizers, what is refused."""
import os
import shutil
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import LLAMA, TrainTest, records, state_of

FP8 = ["--fp8-recipe", "blockwise"]
EXPERTS = ["--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01"]
SHARED = ["--num-experts", "4", "--moe-shared-experts", "1", "--moe-router-bias-update-rate", "0.05"]
FIELDS = ("loss", "grad_norm", "router_loss", "router_entropy", "expert_load")


class MoeTest(TrainTest):
    def steps(self, name):
        return records(self.path(name), "step")

    def test_a_resumed_run_is_the_uninterrupted_one(self):
        for name, how in (("adamw", []), ("muon", ["--optimizer", "muon"]), ("fp8", FP8),
                          ("fp8-muon", [*FP8, "--optimizer", "muon", "--recompute", "block"]),
                          ("fp8-later", [*FP8, "--fp8-first-bf16", "1"])):
            options = [*EXPERTS, *how, "--lr-decay-style", "constant"]
            parts, whole = self.path(name + "-parts"), self.path(name)
            for step in ("2", "4"):
                self.run_train(LLAMA, "--train-iters", step, *options, "--save", parts, "--resume", "auto")
            self.run_train(LLAMA, "--train-iters", "4", *options, "--save", whole, "--log-file", whole + ".jsonl",
                           "--valid-data", self.path("valid.bin"))
            states = [state_of(os.path.join(folder, "step-00000004")) for folder in (whole, parts)]
            for state in states:
                del state["state.json"]["config"]
            self.assertEqual(*states)
            self.assertEqual(len(states[0]["state.json"]["expert_load"]) % 4, 0)
            rows = records(whole + ".jsonl", "experts")[-1]["load"]   # of 4 experts in each layer
            self.assertEqual(rows, states[0]["state.json"]["expert_load"])
            self.assertEqual({sum(rows[i:i + 4]) for i in range(0, len(rows), 4)}, {4 * 16 * 2})
            for step in self.steps(name + ".jsonl"):
                self.assertGreaterEqual(step["expert_load"], 1)
                self.assertGreater(step["router_loss"], 0)

    # The step in FP8 after one in BF16 needs the load of experts in that one, which a checkpoint has.
    def test_a_switch_of_precision_keeps_the_load_of_experts(self):
        whole, part = self.path("switched"), self.path("switched-part")
        options = [*EXPERTS, *FP8, "--fp8-first-bf16", "1", "--train-iters", "2", "--save-interval", "1"]
        self.run_train(LLAMA, *options, "--save", whole)
        shutil.copytree(os.path.join(whole, "step-00000001"), os.path.join(part, "step-00000001"))
        self.run_train(LLAMA, *options, "--save", part, "--resume", "auto")
        states = [state_of(os.path.join(folder, "step-00000002")) for folder in (whole, part)]
        for state in states:
            del state["state.json"]["config"]
        self.assertEqual(*states)

    def test_a_resumed_run_has_the_biases_of_the_routers(self):
        options, still = [*SHARED, "--lr-decay-style", "constant"], ["--moe-router-bias-update-rate", "0"]
        runs = {name: self.path(name) for name in ("parts", "whole", "still")}
        for step in ("2", "4"):
            self.run_train(LLAMA, "--train-iters", step, *options, "--save", runs["parts"], "--resume", "auto")
        self.run_train(LLAMA, "--train-iters", "4", *options, "--save", runs["whole"])
        self.run_train(LLAMA, "--train-iters", "4", *options, *still, "--save", runs["still"])
        states = {name: state_of(os.path.join(folder, "step-00000004")) for name, folder in runs.items()}
        for state in states.values():
            del state["state.json"]["config"]
        self.assertEqual(states["parts"], states["whole"])
        self.assertNotEqual(states["still"]["model.safetensors"], states["whole"]["model.safetensors"])

    def test_what_is_not_supported_is_refused(self):
        for options, text in ((["--fp8-recipe", "delayed"], "--num-experts with FP8 needs --fp8-recipe blockwise"),
                              ([*FP8, "--fp8-format", "hybrid"], "and its --fp8-format e4m3"),
                              (["--moe-router-topk", "5"], "--moe-router-topk 5 exceeds --num-experts 4"),
                              (["--activation", "relu2"], "transformers has no other class"),
                              (["--moe-shared-experts", "1"], "balances by a bias, without losses")):
            done = self.run_train(LLAMA, "--train-iters", "1", *EXPERTS, *options, expect=2)
            self.assertIn(text, done.stderr)


@unittest.skipUnless(HAVE_RANKS, "no mpirun")
class MoeRanksTest(RanksTest):
    def test_ranks_zero_levels_and_recomputation_do_not_change_the_run(self):
        runs = {"one": (1, []), "zero0": (2, ["--zero", "0"]), "zero1": (4, []), "zero2": (2, ["--zero", "2"]),
                "zero3": (4, ["--zero", "3"]), "block": (1, ["--recompute", "block"]),
                "norm-act": (2, ["--recompute", "norm-act", "--zero", "3"]),
                "context": (2, ["--context-parallel", "2"])}
        for experts, optimizer in ((EXPERTS, "adamw"), (EXPERTS, "muon"), (SHARED, "adamw")):
            logs = {}
            for name, (ranks, options) in runs.items():
                log = self.path(f"{len(experts)}-{optimizer}-{name}.jsonl")
                self.ranks(ranks, LLAMA, *experts, "--dtype", "fp32", "--train-iters", "3", "--optimizer", optimizer,
                           *options, "--log-file", log)
                logs[name] = records(log, "step")
            for name, steps in logs.items():
                for step, expected in zip(steps, logs["one"], strict=True):
                    for field in FIELDS:
                        self.assertAlmostEqual(step[field], expected[field], delta=2e-6 * expected[field],
                                               msg=(name, field))


if __name__ == "__main__":
    unittest.main()
