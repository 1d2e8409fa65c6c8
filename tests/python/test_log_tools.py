"""The log's reader and scripts/plot. Standard library; matplotlib where present."""
import importlib.machinery
import importlib.util
import io
import json
import math
import subprocess
import sys
import types
import unittest
import unittest.mock

from llmfp8 import run_export, run_figure
from llmfp8.run_log import InputError, RunLog, read_log
from tests.support.log_tools import BUILD, LOGS, LogToolTest, ROOT, has, records


def script(name):
    """A script without suffix as a module."""
    loader = importlib.machinery.SourceFileLoader(name + "_script", str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    with unittest.mock.patch.object(sys, "dont_write_bytecode", True):
        loader.exec_module(module)
    return module


class Reading(LogToolTest):
    def test_records_by_step(self):
        run = read_log(LOGS / "killed.jsonl")
        expected = [r for r in records("killed.jsonl") if r["type"] == "step"]
        self.assertEqual([r["loss"] for r in run.step_list()], [r["loss"] for r in expected])
        self.assertTrue(math.isnan(run.steps[4]["grad_norm"]))   # "nan" in the file
        self.assertEqual(sorted(run.evals), [0, 4, 8])
        self.assertEqual(sorted(run.fp8), [3, 6])
        self.assertEqual(run.fp8[3]["0.qkv.x"]["amax"], 2.984375)
        self.assertFalse(run.finished)
        self.assertTrue(read_log(LOGS / "bf16.jsonl").finished)

    def test_of_steps_done_twice_the_later_count(self):
        lines = self.twice().read_text().splitlines()
        # Step 7 of the killed run must be recognisable.
        old = next(i for i, line in enumerate(lines) if '"type":"step","step":7,' in line)
        lines[old] = json.dumps(dict(json.loads(lines[old]), loss=99.0))
        run = read_log(self.file("changed.jsonl", "\n".join(lines) + "\n"))
        self.assertEqual(sorted(run.steps), list(range(1, 13)))
        self.assertEqual(run.steps[7]["loss"], read_log(LOGS / "resumed.jsonl").steps[7]["loss"])
        self.assertEqual((run.redone, run.resumed_at), (3, [5]))
        self.assertIn("3 steps were done again", run.warnings()[0])
        # Records of the killed run after the checkpoint are gone, although the resumed run has none of this kind.
        run = read_log(self.file("cut.jsonl", (LOGS / "killed.jsonl").read_text() + lines[21] + "\n"))
        self.assertEqual((sorted(run.steps), sorted(run.evals), sorted(run.fp8)), ([1, 2, 3, 4, 5], [0, 4], [3]))
        self.assertEqual([event["step"] for event in run.events if event["kind"] == "fp8"], [3])

    def test_any_cut_of_the_last_line_is_no_damage(self):
        whole = (LOGS / "bf16.jsonl").read_bytes()
        lines = whole.split(b"\n")
        begin = len(whole) - len(lines[-2]) - len(lines[-3]) - 2
        for end in range(begin + 1, len(whole), 7):
            run = read_log(self.file("cut.jsonl", whole[:end]))
            self.assertEqual(run.torn, whole[end - 1:end] != b"\n")
            self.assertEqual(len(run.steps), 12)

    def test_damaged_lines_are_named(self):
        lines = (LOGS / "bf16.jsonl").read_text().splitlines()
        for damage in ("", lines[6][:40], lines[6] + "}", "[1]", "\0" * 50, '{"type":"step","step":5}',
                       lines[6].replace('"step":4', '"step":"4"')):
            path = self.file("bad.jsonl", "\n".join(lines[:6] + [damage] + lines[7:]) + "\n")
            with self.assertRaisesRegex(InputError, r"bad\.jsonl:7: damaged line"):
                read_log(path)
            run = read_log(path, skip_damaged=True)
            self.assertEqual(sorted(run.steps), [step for step in range(1, 13) if step != 4])
            self.assertIn("bad.jsonl:7", run.warnings()[0])

    def test_what_is_no_log_is_refused(self):
        for content in ("text\n", "{}\n", '{"type":"step"}\n', "\n".join((LOGS / "bf16.jsonl").read_text()
                                                                          .splitlines()[1:]) + "\n"):
            with self.assertRaisesRegex(InputError, "other:1: not the log of a run"):
                read_log(self.file("other", content), skip_damaged=True)
        with self.assertRaisesRegex(InputError, "no line is complete"):
            read_log(self.file("empty", ""))
        with self.assertRaisesRegex(InputError, "format 2"):
            read_log(self.file("new", (LOGS / "bf16.jsonl").read_text().replace('"format":1', '"format":2')))
        with self.assertRaisesRegex(InputError, "No such file"):
            read_log(self.folder / "absent")

    def test_following_gives_what_reading_gives(self):
        whole = self.twice().read_bytes()
        expected = read_log(self.folder / "twice.jsonl")
        for piece in (1, 700, 4096):
            path = self.file("grows.jsonl", b"")
            run = RunLog(path)
            with open(path, "ab", buffering=0) as file:
                for begin in range(0, len(whole), piece):
                    file.write(whole[begin:begin + piece])
                    if piece > 1 or begin % 50 == 0:
                        run.poll()
            run.poll()
            self.assertFalse(run.poll())
            for field in ("steps", "evals", "fp8", "events", "checkpoints", "headers", "redone", "torn"):
                self.assertEqual(repr(getattr(run, field)), repr(getattr(expected, field)), field)

    def test_a_log_that_a_resume_wrote_anew_is_read_anew(self):
        path = self.file("log.jsonl", (LOGS / "killed.jsonl").read_bytes())
        run = RunLog(path)
        run.poll()
        self.assertEqual(len(run.steps), 8)
        # As the trainer does: another file, renamed.
        cut = b"\n".join(line for line in path.read_bytes().split(b"\n")[:15]) + b"\n"
        self.file("log.tmp", cut + (LOGS / "resumed.jsonl").read_bytes()).replace(path)
        self.assertTrue(run.poll())
        self.assertEqual((sorted(run.steps), run.redone), (list(range(1, 13)), 0))

    def test_a_new_run_in_the_same_file_is_read_anew(self):
        killed, bf16 = (LOGS / "killed.jsonl").read_bytes(), (LOGS / "bf16.jsonl").read_bytes()
        for old, new in ((killed, bf16), (bf16, killed)):   # shorter than what was read, and longer
            path = self.file("log.jsonl", old)
            run = RunLog(path)
            run.poll()
            path.write_bytes(new)   # the same inode
            self.assertTrue(run.poll())
            self.assertEqual(repr(run.steps), repr(read_log(path).steps))
            self.assertEqual(len(run.headers), 1)

    def test_tokens(self):
        run = read_log(LOGS / "resumed.jsonl")
        self.assertEqual([run.tokens_at(step) for step in (0, 3, 5, 6, 12)], [0, None, 320, 384, 768])


class PlotData(LogToolTest):
    def test_curves(self):
        run = read_log(self.twice())
        data = run_figure.curves(run)
        # The killed run up to its checkpoint, then the resumed run.
        expected = {r["step"]: r for r in records("killed.jsonl", "resumed.jsonl") if r["type"] == "step"}
        steps = list(range(1, 13))
        self.assertEqual(data["loss"], (steps, [expected[step]["loss"] for step in steps]))
        self.assertEqual(data["seconds"], (steps, [expected[step]["step_seconds"] for step in steps]))
        self.assertEqual(data["rate"], (steps, [expected[step]["tokens_per_second"] for step in steps]))
        norms = dict(zip(*data["norm"]))
        self.assertTrue(math.isnan(norms.pop(4)))
        self.assertEqual(norms, {step: expected[step]["grad_norm"] for step in steps if step != 4})
        validation = {r["step"]: r["loss"] for r in records("killed.jsonl", "resumed.jsonl") if r["type"] == "eval"}
        self.assertEqual(data["valid"], ([0, 4, 8, 12], [validation[step] for step in (0, 4, 8, 12)]))
        by_tokens = run_figure.curves(run, "tokens")
        self.assertEqual(by_tokens["loss"], ([64 * step for step in steps], data["loss"][1]))
        self.assertEqual(by_tokens["valid"], ([0, 256, 512, 768], data["valid"][1]))

    def test_the_clip_ratio_where_there_is_clipping(self):
        run = read_log(self.twice())
        self.assertEqual(run_figure.panel_rows([run]), [["loss", "norm"], ["seconds", "rate"]] + (
            [["clip", "clip"]] if any(r["grad_mul"] < 1 for r in run.steps.values()) else []))
        for record in run.steps.values():
            record["grad_mul"] = 1.0
        self.assertEqual(run_figure.panel_rows([run])[-1], ["seconds", "rate"])
        run.steps[5]["grad_mul"] = 0.25
        self.assertEqual(run_figure.panel_rows([run])[-1], ["clip", "clip"])
        self.assertEqual(run_figure.curves(run)["clip"][1], [1.0] * 4 + [0.25] + [1.0] * 7)

    def test_marks(self):
        run = read_log(self.twice())
        self.assertEqual(run_figure.marks(run), {"skipped": [4], "resumed": [5], "checkpoint": [5, 10, 12],
                                                 "fp8": [3, 6], "stop": [12]})
        self.assertEqual(run_figure.marks(run, "tokens")["checkpoint"], [320, 640, 768])

    def test_health(self):
        run = read_log(self.twice())
        at, groups, rows = run_figure.health(run)
        self.assertEqual(at, [3, 6, 9, 12])
        self.assertEqual([group for group, _ in groups[:5]], ["qkv.x", "proj.x", "up.x", "down.x", "qkv.dy"])
        self.assertEqual(groups[3][1], ["0.down.x", "1.down.x"])
        names = [name for _, members in groups for name in members]
        last = {r["step"]: r for r in records("killed.jsonl", "resumed.jsonl") if r["type"] == "fp8"}
        for field in run_figure.HEALTH:
            for i, step in enumerate(at):
                expected = {tensor["name"]: tensor[field] for tensor in last[step]["tensors"]}
                self.assertEqual([row[i] for row in rows[field]], [expected[name] for name in names])
        largest = max((t["saturated"], t["name"], r["step"]) for r in last.values() for t in r["tensors"])
        self.assertEqual(run_figure.worst(run, "saturated"), largest)

    def test_tensors_are_ordered_by_layer_number(self):
        order = run_figure.tensor_order(["10.up.x", "2.up.x", "lm_head.x", "0.up.dy"])
        self.assertEqual(order, [("up.x", ["2.up.x", "10.up.x"]), ("lm_head.x", ["lm_head.x"]),
                                 ("up.dy", ["0.up.dy"])])

    def test_a_tensor_that_is_not_in_all_records(self):
        run = read_log(self.twice())
        del run.fp8[6]["0.qkv.x"]
        _, _, rows = run_figure.health(run)
        self.assertEqual([math.isnan(value) for value in rows["amax"][0]], [False, True, False, False])

    def test_smooth(self):
        self.assertEqual(run_figure.smooth([1, 2, 6, 4], 3), [1.5, 3, 4, 5])
        self.assertEqual(run_figure.smooth([1, math.nan, 3], 1)[::2], [1, 3])
        self.assertEqual(run_figure.smooth([1, math.nan, 3], 3), [1, 2, 3])

    def test_edges(self):
        self.assertEqual(run_figure.edges([100, 200, 400]), [50, 150, 300, 500])
        self.assertEqual(run_figure.edges([7]), [6.5, 7.5])

    def test_an_axis_is_not_squeezed_by_the_first_step(self):
        self.assertIsNone(run_figure.robust_top([1.0] * 50))
        top = run_figure.robust_top([60.0] + [1.0, 1.1] * 50)
        self.assertTrue(1.1 < top < 1.5, top)

    def test_names(self):
        plot = script("plot")
        path = self.file("a=b.jsonl", "")
        self.assertEqual(plot.named_logs(["one/log.jsonl", "two/log.jsonl", "fp8=x.jsonl", str(path)]),
                         [("one/log.jsonl", "one/log"), ("two/log.jsonl", "two/log"), ("x.jsonl", "fp8"),
                          (str(path), "a=b")])

    def test_a_folder_is_its_logs(self):
        plot, export = script("plot"), [ROOT / "scripts" / "export_log", "--to", "csv", "--out", "-"]
        for name in ("two/b.jsonl", "two/a.jsonl", "two/b.gpu.csv", "one/log.jsonl", "one/log.jsonl.1", "none/x.json"):
            self.file(name, (LOGS / "bf16.jsonl").read_bytes())
        one, two, none = (f"{self.folder}/{name}" for name in ("one", "two", "none"))
        self.assertEqual(plot.named_logs([two, "x=" + one]),
                         [(two + "/a.jsonl", "a"), (two + "/b.jsonl", "b"), (one + "/log.jsonl", "x")])
        self.assertEqual(self.call(*export, one), self.call(*export, LOGS / "bf16.jsonl"))
        for folder, said in ((none, "no log (*.jsonl) in this folder"), (two, "2 logs in this folder")):
            self.assertIn(f"error: {folder}: {said}", self.call(*export, folder, code=2))
        with self.assertRaisesRegex(InputError, "x=.*/two: one name for 2 logs in this folder"):
            plot.named_logs([f"x={two}"])

    def test_follow_draws_until_the_run_ends(self):
        plot = script("plot")
        pieces = [(LOGS / "killed.jsonl").read_text()[:-30], (LOGS / "killed.jsonl").read_text()[-30:],
                  (LOGS / "resumed.jsonl").read_text()]
        path = self.folder / "run.jsonl"
        run = RunLog(path)
        drawn = []

        def grow(_seconds):
            with open(path, "a") as file:
                file.write(pieces.pop(0))
        options = types.SimpleNamespace(x="step", smooth=0, every=1)
        shown = io.StringIO()
        with unittest.mock.patch.object(plot, "draw", lambda runs, *_: sorted(runs[0].steps)), \
                unittest.mock.patch.object(plot, "save", lambda steps, _: drawn.append((len(steps), steps[-1]))), \
                unittest.mock.patch.object(plot.time, "sleep", grow), \
                unittest.mock.patch.object(sys, "stdout", shown):
            plot.follow([run], "out.png", options)   # begins before the log is there
        self.assertEqual(drawn, [(8, 8), (8, 8), (12, 12)])
        self.assertTrue(shown.getvalue().startswith(f"note: {path}: not there yet, waiting for it\n"), shown.getvalue())
        self.assertIn("run: step 8/12 | loss 3.8660 |", shown.getvalue())
        self.assertIn("| eta 00:00:00", shown.getvalue())
        self.assertTrue(shown.getvalue().endswith("finished 12 steps\n"), shown.getvalue())


@unittest.skipUnless(has("matplotlib"), "matplotlib is not installed")
class Figures(LogToolTest):
    def axes_of(self, figure):
        return {axes.get_label(): axes for axes in figure.axes}

    def test_what_is_drawn(self):
        fp8, bf16 = read_log(self.twice()), read_log(LOGS / "bf16.jsonl")
        for run in (fp8, bf16):
            for step, record in run.steps.items():
                record.update(gpu_utilization=90.0 + step, power_w=600.0 - step, joules_per_token=0.5 / step)
        figure = run_figure.draw([fp8, bf16])
        # Eight panels, the marks, three heat maps of the one run with FP8 and their colour bars.
        self.assertEqual(len(figure.axes), 8 + 1 + 3 + 3)
        axes = self.axes_of(figure)
        for panel, (_, label, _) in run_figure.PANELS.items():
            self.assertEqual(axes[panel].get_ylabel(), label)
            lines = [line for line in axes[panel].get_lines() if len(line.get_xdata()) == 12]
            self.assertEqual(len(lines), 2)
            for run, line in zip((fp8, bf16), lines):
                at, values = run_figure.curves(run)[panel]
                self.assertEqual(list(line.get_xdata()), at)
                self.assertEqual(str([float(v) for v in line.get_ydata()]), str(values))
            skipped = [line for line in axes[panel].get_lines() if list(line.get_xdata()) == [4, 4]]
            self.assertEqual(len(skipped), 1)
        self.assertEqual(axes["norm"].get_yscale(), "log")
        self.assertEqual(axes["seconds"].get_yscale(), "linear")
        self.assertIn([0, 4, 8, 12], [list(line.get_xdata()) for line in axes["loss"].get_lines()])
        self.assertEqual([text.get_text() for legend in figure.legends + sum((p.legends for p in figure.subfigs), [])
                          for text in legend.get_texts()], ["twice", "bf16", "validation", "skipped step"])
        self.assertEqual([label.get_text() for label in axes["marks"].get_yticklabels()],
                         ["skipped", "fp8", "resumed", "checkpoint", "stop"])

    def test_block_scales_have_heat_maps_of_their_own(self):
        run = read_log(self.blockwise())
        figure = run_figure.draw([run])
        _, _, rows = run_figure.health(run, fields=run_figure.BLOCK_SCALES)
        drawn = [mesh.get_array().tolist() for axes in figure.axes for mesh in axes.collections
                 if getattr(mesh.get_array(), "shape", None) == (24, 2)]
        self.assertEqual(len(drawn), 3 + 4)
        self.assertEqual(drawn[3:6], [rows["scale_min"], rows["scale_median"], rows["scale_max"]])
        self.assertIn("largest scale_at_ends: 0.023", [axes.get_title()[:28] for axes in figure.axes])

    def test_heat_maps_have_the_values(self):
        run = read_log(self.twice())
        figure = run_figure.draw([run])
        _, groups, rows = run_figure.health(run)
        meshes = [mesh for axes in figure.axes for mesh in axes.collections if mesh.get_array() is not None
                  and getattr(mesh.get_array(), "shape", None) == (24, 4)]
        self.assertEqual(len(meshes), 3)
        for mesh, field in zip(meshes, run_figure.HEALTH):
            for drawn, row in zip(mesh.get_array().tolist(), rows[field]):
                # Zero stands below the range of the colours.
                self.assertTrue(all(a == b or (b == 0 and a < mesh.norm.vmin) for a, b in zip(drawn, row)))
        self.assertEqual([t.get_text() for t in meshes[0].axes.get_yticklabels()], [group for group, _ in groups])

    def test_short_and_strange_runs_are_drawn(self):
        run = read_log(LOGS / "bf16.jsonl")
        for step in list(run.steps)[1:]:
            del run.steps[step]
        run_figure.save(run_figure.draw([run], "tokens"), self.folder / "one.png")   # one step
        run.steps[1].update(loss=math.nan, grad_norm=math.inf, step_seconds=0.0)
        run.evals.clear()
        run_figure.save(run_figure.draw([run]), self.folder / "none.png")   # nothing finite
        fp8 = read_log(LOGS / "resumed.jsonl")
        for tensors in fp8.fp8.values():
            for tensor in tensors.values():
                tensor.update(amax=0.0, flushed=math.nan)
        run_figure.save(run_figure.draw([fp8] + [run] * 11, "tokens"), self.folder / "twelve.svg")

    def test_command(self):
        self.twice()
        said = self.call(ROOT / "scripts" / "plot", "FP8=twice.jsonl", LOGS / "bf16.jsonl", "--x", "tokens", "--out",
                         "new/both.png")
        self.assertIn("new/both.png", said)
        self.assertEqual((self.folder / "new" / "both.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual(sorted(p.name for p in (self.folder / "new").iterdir()), ["both.png"])   # no leftovers
        self.call(ROOT / "scripts" / "plot", "twice.jsonl", "--follow", "--every", "0.1")
        self.assertTrue((self.folder / "twice.png").stat().st_size > 20000)
        self.assertIn("twice.png", self.call(ROOT / "scripts" / "plot", self.folder))
        said = self.call(ROOT / "scripts" / "plot", "twice.jsonl", "--out", "both.nothing", code=2)
        self.assertEqual(said, "error: --out both.nothing: its suffix says the format: .png, .svg or .pdf\n")


class Trainer(LogToolTest):
    @unittest.skipUnless((BUILD / "train_gpt2").exists(), "train_gpt2 is not built")
    def test_a_log_written_now(self):
        """The fixtures are from an earlier trainer; the readers must read the log of the present one in the same
        way."""
        import struct
        for name, k in (("train.bin", 1), ("valid.bin", 2)):
            tokens = [k * i * i % 61 for i in range(500)]
            self.file(name, struct.pack("<256i500H", 20240520, 1, 500, *[0] * 253, *tokens))
        shape = ("--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 "
                 "--vocab-size 61 --max-position-embeddings 16 --seq-length 16 --micro-batch-size 2 "
                 "--global-batch-size 4 --lr 1e-2 --lr-warmup-iters 0 --train-data train.bin --valid-data valid.bin "
                 "--eval-iters 2 --train-iters 4 --fp8-recipe delayed --fp8-stats-interval 2 --log-file log.jsonl")
        said = subprocess.run([str(BUILD / "train_gpt2"), "--model", "gpt2-tiny", *shape.split()],
                              cwd=self.folder, text=True, capture_output=True, timeout=300)
        self.assertEqual(said.returncode, 0, said.stderr)
        run = read_log(self.folder / "log.jsonl")
        self.assertEqual((sorted(run.steps), sorted(run.fp8), run.finished), ([1, 2, 3, 4], [2, 4], True))
        since = {"forward_seconds", "backward_seconds"}   # fields that the fixtures do not have
        self.assertEqual(set(run.steps[1]), set(read_log(LOGS / "bf16.jsonl").steps[1]) | since)
        for step in run.steps.values():
            self.assertTrue(0 < step["forward_seconds"] < step["step_seconds"], step)
            self.assertTrue(0 < step["backward_seconds"] < step["step_seconds"], step)
        for write in run_export.TEXT_FORMATS.values():
            write(run, io.StringIO())
