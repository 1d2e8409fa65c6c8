"""Context parallelism over MPI on the CPU device: a run with evaluation, HellaSwag, samples and checkpoints repeats
that of one rank, resumes with other numbers of ranks, and refuses what it cannot split. test_context.cpp has the
recipes."""
import re
import unittest

from tests.support.ranks import HAVE_RANKS, RanksTest
from tests.support.train import GPT2, LLAMA, records, state_of, write_hellaswag


@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class ContextTest(RanksTest):
    def log_of(self, name, ranks, binary, *options, **how):
        log = self.path(name + ".jsonl")
        self.text = self.ranks(ranks, binary, "--log-file", log, *options, **how).stdout
        return log

    def test_a_run_is_that_of_one_rank(self):
        write_hellaswag(self.path("hellaswag.bin"), 21, 16)
        options = ["--dtype", "fp32", "--train-iters", "4", "--valid-data", self.path("valid.bin"), "--eval-interval",
                   "2", "--eval-iters", "3", "--hellaswag-data", self.path("hellaswag.bin"), "--sample-every", "4",
                   "--sample-tokens", "6", "--prompt", "3 1 4", "--temperature", "0"]
        self.write_documents()
        documents = ["--reset-attention-mask", "--reset-position-ids"]
        losses = {}
        for binary, more in ((GPT2, []), (LLAMA, []), (GPT2, documents), (LLAMA, documents)):
            one = self.log_of("one", 1, binary, *options, *more)
            losses[binary, bool(more)] = [r["loss"] for r in records(one, "eval")]
            for ranks, context in ((2, 2), (4, 2), (4, 4)):
                with self.subTest(binary=binary, more=more, ranks=ranks, context=context):
                    log = self.log_of("several", ranks, binary, *options, *more, "--context-parallel", str(context))
                    for kind, keys in (("step", ("loss", "grad_norm")), ("eval", ("loss",))):
                        for found, expected in zip(records(log, kind), records(one, kind), strict=True):
                            for key in keys:
                                self.assertLess(abs(found[key] - expected[key]), 1e-6 * expected[key], (kind, key))
                            self.assertEqual(found["counted_tokens"], expected["counted_tokens"])
                    for kind, key in (("hellaswag", "correct"), ("sample", "text")):
                        self.assertEqual([r[key] for r in records(log, kind)], [r[key] for r in records(one, kind)])
                    self.assertIn(f"context parallel {context}", self.text)
                    for step in records(log, "step"):
                        self.assertGreater(step["exposed_comm_seconds"], 0)

        for binary in (GPT2, LLAMA):
            self.assertNotEqual(losses[binary, False], losses[binary, True])

    def test_resumes_on_another_number_of_ranks(self):
        common = ["--fp8-recipe", "delayed", "--seq-length", "64", "--max-position-embeddings", "64",
                  "--train-iters", "8"]
        straight = self.log_of("straight", 4, LLAMA, *common, "--context-parallel", "2", "--save",
                               self.path("straight"), "--save-interval", "4")
        expected = {r["step"]: r for r in records(straight, "step")}
        saved = self.path("straight", "step-00000004")
        for ranks, context in ((4, 2), (2, 2), (4, 4), (2, 1), (1, 1)):
            with self.subTest(ranks=ranks, context=context):
                log = self.log_of(f"resumed-{ranks}-{context}", ranks, LLAMA, *common, "--context-parallel",
                                  str(context), "--resume", saved, "--save", self.path(f"saved-{ranks}-{context}"))
                found = {r["step"]: r for r in records(log, "step")}
                self.assertEqual(list(found), [5, 6, 7, 8])
                for step, record in found.items():
                    self.assertEqual(record["samples"], expected[step]["samples"])
                    self.assertEqual(record["counted_tokens"], expected[step]["counted_tokens"])
                    if (ranks, context) == (4, 2):
                        self.assertEqual(record["loss"], expected[step]["loss"])
                    else:
                        self.assertLess(abs(record["loss"] - expected[step]["loss"]), 0.02 * expected[step]["loss"])
                note = "option changed since the checkpoint: --context-parallel"
                self.assertEqual(note in self.text, context != 2, self.text)
        self.assertEqual(state_of(self.path("saved-4-2", "step-00000008")),
                         state_of(self.path("straight", "step-00000008")))

    def test_what_cannot_be_split_is_refused(self):
        for ranks, context, options, text in (
                (2, 4, [], "--context-parallel 4 must divide the number of ranks, 2"),
                (3, 3, [], "--context-parallel 3 must divide --num-attention-heads 4"),
                (2, 2, ["--seq-length", "15"], "--context-parallel 2 must divide --seq-length 15"),
                (6, 6, ["--num-attention-heads", "12", "--num-query-groups", "4"],
                 "--context-parallel 6 must divide --num-query-groups 4, or be a multiple of it"),
                (2, 2, ["--fp8-recipe", "delayed", "--micro-batch-size", "1"],
                 "tokens 1 x 8 = 8 (--micro-batch-size x --seq-length / --context-parallel)"),
                (2, 2, ["--fp8-recipe", "blockwise", "--micro-batch-size", "2"],
                 "parts of 8 tokens (--seq-length 16) are no multiple of 128, the tokens of a block"),
                (4, 2, ["--global-batch-size", "3"],
                 "must be a multiple of --micro-batch-size 1 x 2 (4 ranks / --context-parallel 2)")):
            with self.subTest(text=text):
                done = self.ranks(ranks, LLAMA, "--train-iters", "1", "--context-parallel", str(context), *options,
                                  expect=2)
                self.assertIn(text, done.stderr)

    def test_a_hang_report_names_the_exchange(self):
        done = self.ranks(2, LLAMA, "--train-iters", "4", "--context-parallel", "2", "--comm-timeout", "2",
                          faults="stall:rank=1@backward=3", expect=6)
        self.assertRegex(done.stderr, r"rank 0 waits in collective \d+ \(heads of layers\.1\) of step 3")

    def test_a_hang_report_names_the_group(self):
        """Ranks 0 and 1 share a sequence, and wait for the other ranks only later."""
        for zero, waits in (
                ("1", r"; ranks 0,1 wait in collective \d+ \(reduce .*; rank 2 waits in collective \d+ "
                      r"\(heads of layers\.1 among ranks 2,3\)"),
                ("3", r"; ranks 0-2 wait in collective \d+ \(reduce head\)")):
            with self.subTest(zero=zero):
                said = self.ranks(4, LLAMA, "--train-iters", "4", "--context-parallel", "2", "--zero", zero,
                                  "--comm-timeout", "2", faults="stall:rank=3@backward=3", expect=6).stderr
                self.assertRegex(said, r"rank 3 \(.*\) is in step 3, backward, without progress for .*"
                                 rf"{waits} of step 3 ")

    def test_the_plan_has_the_exchanges(self):
        plan = self.ranks(1, LLAMA, "--dry-run", "--train-iters", "4", "--ranks", "8", "--context-parallel", "4").stdout
        found = re.search(r"^  all-to-all +bf16 +4 +(\d+) +(\d+) +\d+  of heads, not hidden$", plan, re.M)
        # 4 micro-batches (8 sequences of 1 in 2 groups) of 2 layers: Q, K, V, the output, and their gradients.
        self.assertEqual(int(found[1]), 4 * 2 * 4)
        # 16 / 4 tokens of 4 query heads and, on each of 4 ranks, a key and a value head, of 8 elements.
        self.assertEqual(int(found[2]), 4 * 2 * 2 * (4 * (4 + 2 * 4) * 8 + 4 * 4 * 8) * 2)
        self.assertIn("4 micro-batches of 1 x 4 tokens per step and rank; 4 ranks share each sequence of 16 tokens",
                      plan)
