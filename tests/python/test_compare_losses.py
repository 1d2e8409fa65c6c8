"""dev/losses/compare_losses.py on logs that this test writes: gaps to the baseline of each seed, as trained and
in BF16, means, bad input."""
import json
import sys

from tests.support.comparison import ROOT, TOKENS, a_log
from tests.support.folder import FolderTest
from tests.support.run_command import run_command


class CompareLosses(FolderTest):
    def run_tool(self, **runs):
        """runs: NAME_SEED=(training loss, {step: validation loss, or (that, the one in BF16)}), four steps each."""
        words = []
        for name, (loss, evals) in runs.items():
            path = self.folder / f"{name}.jsonl"
            data = {"train-data": [f"{loss}.bin"]} if name.startswith("moved") else {}
            records = a_log([0.1] * 4, [loss] * 4, data, evals=evals)
            for record in records:
                if record["type"] == "eval" and isinstance(record["loss"], tuple):
                    record["loss"], record["loss_bf16"] = record["loss"]
            path.write_text("".join(json.dumps(r) + "\n" for r in records))
            words.append(f"{name.replace('_', '.')}={path}")
        tool = ROOT / "dev" / "losses" / "compare_losses.py"
        done = run_command([sys.executable, tool, "--out", self.folder, *words], None)
        return done.returncode, done.stdout, done.stderr

    def test_table(self):
        code, out, err = self.run_tool(bf16_1=(2.0, {2: 4.0, 4: 2.0}), bf16_2=(1.0, {2: 4.0, 4: 2.1}),
                                       delayed_1=(2.02, {2: 4.04, 4: (2.03, 2.02)}),
                                       delayed_2=(0.99, {2: 4.0, 4: (2.079, 2.058)}),
                                       tensorwise_1=(2.02, {2: 4.04}), tensorwise_2=(0.99, {2: 4.12, 4: 2.1}),
                                       blockwise_2=(1.0, {2: 4.2}))
        self.assertEqual(code, 0, err)
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line][2:]
        self.assertEqual(rows, [
            ["bf16", "1", "0.5M", "2.0000", "+0.00 %", "", "", "2.0000", "+0.00 %", "0.1000"],
            ["delayed", "1", "0.5M", "2.0300", "+1.50 %", "2.0200", "+1.00 %", "2.0200", "+1.00 %", "0.1000"],
            ["tensorwise", "1", "0.3M", "4.0400", "+1.00 %", "", "", "2.0200", "+1.00 %", "0.1000"],
            ["bf16", "2", "0.5M", "2.1000", "+0.00 %", "", "", "1.0000", "+0.00 %", "0.1000"],
            ["blockwise", "2", "0.3M", "4.2000", "+5.00 %", "", "", "1.0000", "+0.00 %", "0.1000"],
            ["delayed", "2", "0.5M", "2.0790", "-1.00 %", "2.0580", "-2.00 %", "0.9900", "-1.00 %", "0.1000"],
            ["tensorwise", "2", "0.5M", "2.1000", "+0.00 %", "", "", "0.9900", "-1.00 %", "0.1000"],
            ["delayed", "mean of 2", "0.5M", "", "+0.25 %", "", "-0.50 %", "", "+0.00 %", ""],
            ["tensorwise", "mean of 2", "0.3M", "", "+2.00 %", "", "", "", "+0.00 %", ""]])
        self.assertIn("BF16 between seeds, 0.5M: 5.00 %", out)
        lines = (self.folder / "losses.csv").read_text().splitlines()
        self.assertEqual(lines[0], "split,tokens,bf16.1,bf16.2,delayed.1,delayed.2,tensorwise.1,tensorwise.2,"
                                   "blockwise.2")
        self.assertIn(f"valid,{4 * TOKENS},2.000000,2.100000,2.030000,2.079000,,2.100000,", lines)
        self.assertIn(f"valid_bf16,{4 * TOKENS},,,2.020000,2.058000,,,", lines)

    def test_bad_input(self):
        code, _, err = self.run_tool(bf16_1=(2.0, {2: 4.0}), delayed_1=(2.0, {4: 2.0}))
        self.assertEqual((code, err), (2, "error: delayed.1 and bf16.1 have no validation at equal tokens\n"))
        code, _, err = self.run_tool(bf16_1=(2.0, {}))
        self.assertEqual(code, 2)
        self.assertRegex(err, r"^error: .*bf16_1.jsonl has no validation loss \(--valid-data\)$")
        code, _, err = self.run_tool(bf16_1=(2.0, {2: 4.0}), moved_1=(2.0, {2: 4.0}))
        self.assertEqual(code, 2)
        self.assertRegex(err, r"moved_1.jsonl: train-data 2.0.bin, .*bf16_1.jsonl has tok/train_.*: their losses ")
