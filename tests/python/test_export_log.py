"""scripts/export_log: the contents of its formats. tensorboard and wandb are tested if they are installed.

tests/golden/logs are exports of tests/fixtures/logs: scripts/export_log --to csv LOG --out tests/golden/logs/NAME.csv.
"""
import csv
import io
import json
import os
import sys
import time
import types
import unittest
import unittest.mock

from llmfp8 import run_export
from llmfp8.run_log import InputError, RunLog, read_log
from tests.support.folder import has
from tests.support.log_tools import LOGS, LogToolTest, ROOT, records

GOLDEN = ROOT / "tests" / "golden" / "logs"


class ExportTest(LogToolTest):
    def check_board(self, board, run):
        """What TensorBoard reads of the log of twice(): every step once."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        read = EventAccumulator(str(board), size_guidance={"scalars": 0})
        read.Reload()
        losses = read.Scalars("train/loss")
        self.assertEqual([e.step for e in losses], list(range(1, 13)))
        for event in losses:   # stored as 32-bit floats
            self.assertLess(abs(event.value / run.steps[event.step]["loss"] - 1), 2 ** -24)
        self.assertEqual([e.step for e in read.Scalars("valid/loss")], [0, 4, 8, 12])
        return read


class Exports(ExportTest):
    def test_golden(self):
        self.twice()
        for to in ("csv", "llmc", "megatron"):
            self.call(ROOT / "scripts" / "export_log", "--to", to, "twice.jsonl", "--out", f"new/{to}")
            self.assertEqual((self.folder / "new" / to).read_text(), (GOLDEN / f"twice.{to}").read_text())
        shown = self.call(ROOT / "scripts" / "export_log", "--to", "megatron", LOGS / "h200.jsonl", "--out", "-")
        self.assertEqual(shown, (GOLDEN / "h200.megatron").read_text())

    def csv_of(self, run):
        """The rows by step."""
        text = io.StringIO()
        run_export.write_csv(run, text)
        return {int(row["step"]): row for row in csv.DictReader(io.StringIO(text.getvalue()))}

    def changed(self, kind, step, after=(), **values):
        """bf16.jsonl with other values in a record, and more records after it."""
        lines = []
        for record in records("bf16.jsonl"):
            found = record["type"] == kind and record["step"] == step
            lines += [{**record, **values}, *after] if found else [record]
        return self.file("log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def test_csv_has_the_log_at_full_precision(self):
        rows = self.csv_of(read_log(self.twice()))
        self.assertEqual(list(rows), list(range(13)))
        for record in records("resumed.jsonl"):
            if record["type"] == "step":
                for column, field in (("train/loss (nats/token)", "loss"), ("train_gradient/norm", "grad_norm"),
                                      ("train_speed/step_time (s)", "step_seconds"), ("train/lr", "lr")):
                    self.assertEqual(rows[record["step"]][column], repr(record[field]))

    def test_values_that_not_every_log_has(self):
        sampled = {"gpu_utilization": 97.5, "power_w": 651.25, "sm_clock_mhz": 1711.0, "gpu_temperature_c": 61.0,
                   "gpu_memory_gib": 33.5, "energy_j": 812.5, "joules_per_token": 0.0125, "throttled_by": "power cap",
                   "max_logit": 12.5, "expert_load": 1.5, "dead_experts": 2, "rank_load": 1.25, "z_loss": 0.003}
        run = read_log(self.changed("step", 4, **sampled))
        columns = {f"train_gpu/{name}": value for name, value in (
            ("utilization (percent)", "97.5"), ("power (W)", "651.25"), ("sm_clock (MHz)", "1711.0"),
            ("temperature (C)", "61.0"), ("memory (GiB)", "33.5"), ("energy (J)", "812.5"),
            ("joules_per_token (J/token)", "0.0125"))} | {
            "train_attention/max_logit": "12.5", "train_experts/load (times the mean)": "1.5",
            "train_experts/dead (experts)": "2", "train_experts/rank_load (times the mean)": "1.25",
            "train/z_loss (nats/token)": "0.003"}
        rows = self.csv_of(run)
        self.assertEqual({column: rows[4][column] for column in columns}, columns)
        self.assertEqual({rows[5][column] for column in columns}, {""})
        self.assertNotIn("train_gpu/power", run_export.all_scalars(run, 5))
        for field in ("power_w", "max_logit", "expert_load", "rank_load"):
            with self.assertRaisesRegex(InputError, f"with a wrong {field}"):
                read_log(self.changed("step", 4, **{field: "much"}))
        asked = {"type": "hellaswag", "step": 4, "accuracy": 0.29546, "correct": 2967, "examples": 10042, "seconds": 1,
                 "accuracy_bf16": 0.3, "accuracy_ema": 0.31, "accuracy_ema_bf16": 0.32}
        run = read_log(self.changed("eval", 4, after=[asked], loss_bf16="inf", loss_ema=3.5, loss_ema_bf16=3.25))
        self.assertEqual([run_export.row_of(run, 4)[f"valid/{tag}_{which}"] for tag in ("loss", "hellaswag_accuracy")
                          for which in ("bf16", "ema", "ema_bf16")], [float("inf"), 3.5, 3.25, 0.3, 0.31, 0.32])
        self.assertEqual([row["valid/hellaswag_accuracy (share of examples)"] for row in self.csv_of(run).values()
                          if row["valid/hellaswag_accuracy (share of examples)"]], ["0.29546"])
        out = io.StringIO()
        run_export.write_llmc(run, out)
        self.assertRegex(out.getvalue(), r"\ns:4 tel:[\d.]+\ns:4 eval:0.2955\ns:4 trl")

    def test_block_scales(self):
        scalars = run_export.all_scalars(read_log(self.blockwise()), 3)
        tensors = next(r for r in records("killed.jsonl") if r["type"] == "fp8" and r["step"] == 3)["tensors"]
        for i, tensor in enumerate(tensors):
            for field, value in (("min", 2.0 ** i), ("median", 2.0 ** (i + 1)), ("max", 2.0 ** (i + 3)),
                                 ("at_ends", i / 1000), ("zeros", 0.25)):
                self.assertEqual(scalars[f"values_in_fp8_scale_{field}/{tensor['name']}"], value)
        self.assertEqual(scalars["train_fp8/largest_scales_at_ends"], (len(tensors) - 1) / 1000)
        tags = sorted(scalars)   # as TensorBoard shows them
        self.assertEqual(tags[0], "train/loss")
        first = next(i for i, tag in enumerate(tags) if "qkv" in tag)
        self.assertTrue(all(tag.startswith("values_in_fp8_") for tag in tags[first:]), tags)
        text = self.blockwise().read_text().replace('"at_ends": 0.0', '"at_ends": "much"', 1)
        with self.assertRaisesRegex(InputError, "with a wrong tensors"):
            read_log(self.file("damaged.jsonl", text))

    def test_synthetic_data_is_said_everywhere(self):
        text = (LOGS / "bf16.jsonl").read_text().replace('"world":1', '"synthetic_data":true,"world":1')
        run = read_log(self.file("log.jsonl", text))
        self.assertIn("synthetic data", run.warnings()[0])
        self.assertIn("train/loss_of_synthetic_data", run_export.all_scalars(run, 1))
        for write, expected in ((run_export.write_csv, "valid/loss_of_synthetic_data (nats/token)"),
                                (run_export.write_megatron, "| lm loss of synthetic data: 4.11")):
            out = io.StringIO()
            write(run, out)
            self.assertIn(expected, out.getvalue())
            self.assertEqual("4.112360026687384" in out.getvalue(), write is run_export.write_csv)

    def test_times_of_day_follow_the_lives(self):
        run = read_log(self.twice())
        times = run_export.wall_times(run)
        self.assertEqual(times[0], run.headers[0]["unix_time"])
        self.assertAlmostEqual(times[5] - times[0], sum(run.steps[s]["step_seconds"] for s in range(1, 6)), 5)
        self.assertAlmostEqual(times[6], run.headers[1]["unix_time"] + run.steps[6]["step_seconds"], 5)

    def test_missing_packages_are_named(self):
        self.twice()
        requirements = (ROOT / "requirements.txt").read_text().splitlines()
        for package in ("tensorboard", "wandb"):
            self.file(f"none/{package}.py", f"raise ImportError('no {package} here')\n")
            said = self.call(ROOT / "scripts/export_log", "--to", package, "twice.jsonl", "--out", "b",
                             packages=self.folder / "none", code=2)
            pins = [line.split(";")[0].strip() for line in requirements if line.startswith(package + "==")]
            self.assertTrue(any(f"python3 -m pip install '{pin}'" in said for pin in pins), said)

    def test_errors_are_one_line(self):
        bad = self.file("bad.jsonl", (LOGS / "bf16.jsonl").read_text().replace('{"type":"eval","step":4', "{{", 1))
        to_screen = [ROOT / "scripts" / "export_log", "--to", "csv", "--out", "-"]
        self.assertRegex(self.call(*to_screen, bad, code=2),
                         r"^error: \S*bad\.jsonl:8: damaged line: not a record of a log\n$")
        self.assertIn("note: ", self.call(*to_screen, bad, "--skip-damaged"))

    @staticmethod
    def to_package(name, run, folder):
        export = run_export.PackageExport(run, lambda run: run_export.PACKAGE_FORMATS[name](run, folder, "p", False))
        export.update()
        export.writer.close()
        return export.writer.hint

    @unittest.skipUnless(has("tensorboard"), "tensorboard is not installed")
    def test_tensorboard_reads_it_back(self):
        run = read_log(self.twice())
        board = self.folder / "board"
        self.to_package("tensorboard", run, board)
        read = self.check_board(board, run)
        self.assertEqual([(e.step, e.value) for e in read.Scalars("values_in_fp8_amax/0.qkv.x")],
                         [(step, run.fp8[step]["0.qkv.x"]["amax"]) for step in sorted(run.fp8)])
        with self.assertRaisesRegex(InputError, "has event files already"):
            self.to_package("tensorboard", run, board)

    def test_wandb_is_given_every_step(self):
        # A replacement for the package.
        session = unittest.mock.Mock(step=0, dir=str(self.folder / "wandb" / "offline-run-1" / "files"))
        wandb = types.ModuleType("wandb")
        wandb.Settings, wandb.init = dict, unittest.mock.Mock(return_value=session)
        run = read_log(self.twice())
        with unittest.mock.patch.dict(sys.modules, wandb=wandb):
            said = self.to_package("wandb", run, self.folder)
        self.assertEqual(said, f"wandb sync {self.folder / 'wandb' / 'offline-run-1'}")
        self.assertEqual(wandb.init.call_args.kwargs["mode"], "offline")
        self.assertEqual(wandb.init.call_args.kwargs["config"]["options"]["fp8-recipe"], "delayed")
        self.assertEqual([call.kwargs["step"] for call in session.log.call_args_list], list(range(13)))
        self.assertEqual(session.log.call_args_list[8].args[0]["valid/loss"], run.evals[8]["loss"])


class Collected:
    """A writer that stores the values as TensorBoard would show them."""

    def __init__(self):
        self.values, self.hint, self.closed = {}, "", False

    def restart(self, run, step):
        self.values = {key: value for key, value in self.values.items() if key[0] < step}

    def write(self, step, seconds, scalars):
        for tag, value in scalars.items():
            assert (step, tag) not in self.values, (step, tag)   # no value is written twice
            self.values[step, tag] = value

    def flush(self):
        pass


def everything(run):
    return {(step, tag): value for step in run_export.all_steps(run)
            for tag, value in run_export.all_scalars(run, step).items()}


class Following(ExportTest):
    def export(self, path):
        run = RunLog(path)
        export = run_export.PackageExport(run, lambda run: Collected())

        def update():
            run.poll()
            export.update()
            return export.writer.values if export.writer else {}
        return update

    def test_following_gives_what_the_whole_log_gives(self):
        whole = self.twice().read_bytes()   # its resumed run repeats three steps
        for piece in (37, 700, len(whole)):
            path = self.file("grows.jsonl", b"")
            update = self.export(path)
            with open(path, "ab", buffering=0) as file:
                for begin in range(0, len(whole), piece):
                    file.write(whole[begin:begin + piece])
                    values = update()
            self.assertEqual(repr(sorted(values.items())),   # some are nan
                             repr(sorted(everything(read_log(path)).items())))

    def test_a_log_that_a_resume_wrote_anew(self):
        path = self.file("log.jsonl", (LOGS / "killed.jsonl").read_bytes())
        update = self.export(path)
        self.assertEqual(max(step for step, _ in update()), 8)
        cut = b"\n".join(line for line in path.read_bytes().split(b"\n")[:15]) + b"\n"
        self.file("log.tmp", cut + (LOGS / "resumed.jsonl").read_bytes()).replace(path)
        self.assertEqual(len(update()), len(everything(read_log(path))))
        # Another run in the same file begins anew.
        path.write_bytes((LOGS / "bf16.jsonl").read_bytes())
        self.assertEqual(len(update()), len(everything(read_log(path))))

    @unittest.skipUnless(has("tensorboard"), "tensorboard is not installed")
    def test_tensorboard_shows_no_step_twice(self):
        board = self.folder / "board"
        # The following process is started again with the resumed run: it writes the whole log.
        follow = [ROOT / "scripts" / "export_log", "--to", "tensorboard", "log.jsonl", "--out", board, "--follow"]
        self.file("log.jsonl", self.twice().read_bytes())
        self.call(*follow)
        time.sleep(1.1)   # names of event files have seconds
        self.call(*follow)
        self.check_board(board, read_log(self.folder / "log.jsonl"))

    @unittest.skipUnless(has("wandb"), "wandb is not installed")
    def test_wandb_follows_offline(self):
        with unittest.mock.patch.dict(os.environ, WANDB_MODE="offline"):
            said = self.call(ROOT / "scripts" / "export_log", "--to", "wandb", self.file(
                "log.jsonl", (LOGS / "bf16.jsonl").read_bytes()), "--out", self.folder, "--follow", "--project", "ours")
        self.assertIn("look at it with: wandb sync ", said)
        written = list(self.folder.glob("wandb/offline-run-*/*.wandb"))
        self.assertEqual(len(written), 1)
        for record in records("bf16.jsonl"):
            if record["type"] in ("step", "eval"):
                self.assertIn(repr(record["loss"]).encode(), written[0].read_bytes())
