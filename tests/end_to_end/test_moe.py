"""Mixtures of experts on the CPU device: resumes, expert parallelism over MPI. That ranks and micro-batches change no
result is in test_expert_parallel.cpp and test_router_balance.cpp, and with other options in tests/composition."""
import os
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import LLAMA, TrainTest, records, state_of, write_hellaswag

FP8 = ["--fp8-recipe", "blockwise"]
EXPERTS = ["--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01"]
SHARED = ["--num-experts", "4", "--moe-shared-experts", "1", "--moe-router-bias-update-rate", "0.05"]
FIELDS = ("loss", "grad_norm", "router_loss", "router_entropy", "expert_load")


class MoeTest(TrainTest):
    def steps(self, name):
        return records(self.path(name), "step")

    def test_a_resumed_run_is_the_uninterrupted_one(self):
        for name, how in (("adamw", EXPERTS), ("muon", [*EXPERTS, "--optimizer", "muon"]), ("fp8", [*EXPERTS, *FP8]),
                          ("fp8-muon", [*EXPERTS, *FP8, "--optimizer", "muon", "--recompute", "block"]),
                          ("fp8-wgrad", [*EXPERTS, "--fp8-recipe", "blockwise-bf16-wgrad"]), ("biases", SHARED)):
            options = [*how, "--lr-decay-style", "constant"]
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
                self.assertEqual(step["router_loss"] > 0, how is not SHARED)


@unittest.skipUnless(HAVE_RANKS, "no mpirun")
class MoeRanksTest(RanksTest):
    def log_of(self, name, ranks, *options):
        log = self.path(name + ".jsonl")
        self.ranks(ranks, LLAMA, *EXPERTS, *options, "--log-file", log)
        return records(log, "step")

    # The step of a gradient that is not finite leaves everything as it is: what is saved again is what was loaded.
    def test_a_checkpoint_has_the_same_bits_with_any_expert_parallel(self):
        saved, options = self.path("saved"), ["--train-iters", "2", "--moment-dtype", "bf16", "--ema", "0.9"]
        self.ranks(4, LLAMA, *EXPERTS, *options, "--expert-parallel", "4", "--save", saved)
        states = [state_of(os.path.join(saved, "step-00000002"))]
        last = os.path.join(saved, "step-00000002")
        options[1] = "3"
        for ranks, parts, zero in ((4, "2", "1"), (2, "2", "0"), (4, "1", "3"), (4, "4", "2")):
            folder = self.path(f"again-{len(states)}")
            self.ranks(ranks, LLAMA, *EXPERTS, *options, "--expert-parallel", parts, "--zero", zero, "--resume", last,
                       "--save", folder, faults="nan@step=1")
            states.append(state_of(os.path.join(folder, "step-00000003")))
        for state in states:
            del state["state.json"]
        for state in states[1:]:
            self.assertEqual(state, states[0])

    def test_a_resumed_run_may_have_another_expert_parallel(self):
        options = ["--dtype", "fp32", "--train-iters", "4", "--lr-decay-style", "constant"]
        whole = self.log_of("whole", 4, *options, "--save", self.path("whole"), "--save-interval", "2")
        for parts in ("2", "4"):
            for optimizer in ((), ("--zero", "3", "--recompute", "block")):
                more = self.log_of(f"more-{parts}-{len(optimizer)}", 4, *options, *optimizer,
                                   "--expert-parallel", parts, "--resume", self.path("whole/step-00000002"))
                self.assertEqual(more[0]["loss"], whole[2]["loss"])
                for step, expected in zip(more, whole[2:], strict=True):
                    for field in FIELDS:
                        self.assertAlmostEqual(step[field] / expected[field], 1, delta=2e-6, msg=(parts, field))

    # All-gathered are codes and scales; the largest values of blocks of an expert are those of the ranks that have it.
    def test_expert_parallel_in_fp8(self):
        runs = [self.log_of(f"fp8-{parts}-{zero}", 4, *FP8, "--train-iters", "2", "--expert-parallel", parts, "--zero",
                            zero, *more)
                for parts, zero, more in (("1", "1", []), ("2", "1", []), ("4", "0", []), ("4", "3", []),
                                          ("2", "3", ["--recompute", "block"]), ("2", "2", ["--zero-group", "2"]))]
        for steps in runs[1:]:
            self.assertEqual(steps[0]["loss"], runs[0][0]["loss"])
            self.assertAlmostEqual(steps[1]["loss"] / runs[0][1]["loss"], 1, delta=1e-4)

    # One of four ranks has a micro-batch of the evaluation; rows of HellaSwag are half as long as the longest.
    def test_what_evaluations_do_not_count_has_the_load_of_a_text(self):
        write_hellaswag(self.path("questions.bin"), 3, 64)
        for data in (["--valid-data", self.path("valid.bin"), "--eval-iters", "1"],
                     ["--hellaswag-data", self.path("questions.bin"), "--seq-length", "64",
                      "--max-position-embeddings", "64"]):
            self.ranks(4, LLAMA, *EXPERTS, *data, "--expert-parallel", "4", "--moe-capacity", "1.5", "--lr", "1e-4",
                       "--train-iters", "1")

    # The experts of two ranks get up to 64 rows of one sequence, and memory is 3 rows of a token.
    def test_a_sample_in_fp8_has_whole_blocks_of_rows(self):
        self.ranks(2, LLAMA, *EXPERTS, *FP8, "--expert-parallel", "2", "--moe-capacity", "1.25", "--train-iters", "1",
                   "--micro-batch-size", "4", "--sample-every", "1", "--lr", "1e-4")

    def test_more_rows_than_the_capacity_end_the_run_before_the_update(self):
        options = ["--train-iters", "3", "--expert-parallel", "2", "--moe-capacity", "1"]
        done = self.ranks(2, LLAMA, *EXPERTS, *options, expect=2)
        self.assertRegex(done.stderr, r"step 1: the experts of one rank had \d+ rows in layer [01], but "
                                      r"--moe-capacity 1 has memory for 32: raise it, or leave it out")
        self.ranks(2, LLAMA, *EXPERTS, *options[:-1], "2")

    def test_plans_of_expert_parallelism(self):
        for options in (FP8, []):
            said = self.ranks(1, LLAMA, *EXPERTS, *options, "--dry-run", "--ranks", "4", "--expert-parallel", "4",
                              "--train-iters", "4", "--gpu", "H200", "--moe-capacity", "1.5").stdout
            self.assertRegex(said, r"all-to-all +fp32 +4 .* of tokens of experts\n")
            self.assertRegex(said, r"matmuls of experts take [\d.]+ ms: \d+ TFLOP/s forward, \d+ dgrad, \d+ wgrad")
            self.assertRegex(said, r"\n.*predicted +\d")
