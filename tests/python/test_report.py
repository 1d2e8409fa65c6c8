"""scripts/report: what the page has, hostile logs, bounds; in headless Chromium where there is one."""
import base64
import csv
import hashlib
import html.parser
import json
import math
import re
import struct
import subprocess
import sys
import unittest

from llmfp8.report import markup, reduce
from llmfp8.report.stream import COLUMNS, StreamedLog
from llmfp8.run_log import RunLog, read_log
from tests.support import browser
from tests.support.log_tools import LOGS, LogToolTest, ROOT, records

UPLOT = {"uPlot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
         "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"}


class Elements(html.parser.HTMLParser):
    """The start tags of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


class ReportTest(LogToolTest):
    def log(self, lines, name="run"):
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def long_log(self, count, tensors=(), every=10, name="run"):
        """A log of `count` steps with one spike of the loss, and FP8 records of the tensors."""
        header, step = (next(r for r in records("bf16.jsonl") if r["type"] == kind) for kind in ("header", "step"))
        lines = [{**header, "step": 0}]
        for i in range(1, count + 1):
            lines.append({**step, "step": i, "tokens": 100 * i, "loss": 99.0 if i == count // 3 else 3 + i / count,
                          "skipped": i == 5, "step_seconds": 1.0})
            if tensors and i % every == 0:
                lines.append({"type": "fp8", "step": i, "tensors": [
                    {"name": tensor, "format": "e4m3", "amax": 1.0 + i, "quant_mul": 2.0, "flushed": 0.25,
                     "saturated": 1e-3 if i == every else 0.0, "nonfinite": 0} for tensor in tensors]})
        return self.log(lines, name)

    def exponents(self, step, names, shadow=False, **changes):
        """A record of histograms: a quarter of the values are zeros, others spread over 2^-12 to 2^(-7 + step % 3)."""
        fields = {"tensorwise_flushed": 0.125, "delayed_saturated": 1e-4 * step, "delayed_flushed": 0.25,
                  "blockwise_flushed_at_most": 0.125} if shadow else {}
        return {"type": "exponents", "step": step, "tensors": [
            {"name": name, "format": "e5m2" if name.endswith("dy") else "e4m3", "amax": 0.5, "scale": 16.0,
             "zeros": 250, "nonfinite": 0, "first": -12,
             "counts": [750 - 50 * (4 + step % 3), *[50] * (4 + step % 3)], **fields, **changes} for name in names]}

    def add(self, log, lines):
        with open(log, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return log

    def report(self, *arguments, status=0):
        done = subprocess.run([sys.executable, ROOT / "scripts/report", *map(str, arguments)], capture_output=True,
                              text=True, timeout=120)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def data(self, path):
        return json.loads(Elements(path.read_text()).scripts[0])


class Page(ReportTest):
    def test_streamed_records_are_those_of_the_reader(self):
        for name in ("killed", "resumed", "bf16"):
            whole, streamed = read_log(LOGS / f"{name}.jsonl"), StreamedLog(LOGS / f"{name}.jsonl")
            streamed.poll()
            self.assertEqual(sorted(whole.steps), list(streamed.steps))
            for step, record in whole.steps.items():
                for field in ("loss", "grad_norm", "lr", "tokens", "step_seconds"):
                    self.assertEqual(repr(float(record[field])), repr(float(streamed.steps[step][field])))
            self.assertEqual(sorted(whole.fp8), sorted(streamed.fp8))
            self.assertEqual((whole.redone, whole.events, whole.evals), (streamed.redone, streamed.events,
                                                                         streamed.evals))

    def test_extremes_survive_and_the_csv_is_whole(self):
        out = self.folder / "run.html"
        self.report(self.long_log(10_007), "--out", out)
        run = self.data(out)["runs"][0]
        self.assertLessEqual(len(run["curves"]["loss"]), 2 * reduce.BUCKETS)
        self.assertEqual(len(run["axes"]["step"]), len(run["curves"]["loss"]))
        self.assertEqual((max(run["curves"]["loss"]), min(run["curves"]["loss"])), (99.0, reduce.short(3 + 1 / 10_007)))
        self.assertEqual(run["axes"]["hours"][-1], reduce.short(10_007 / 3600))
        with open(out.with_suffix(".csv"), newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), 10_007)
        self.assertLess(out.stat().st_size, 3e6)

    def test_heat_map_is_bounded_and_keeps_the_largest(self):
        names = ["0.qkv.x", "1.qkv.x", "0.qkv.dy"]
        run = StreamedLog(self.long_log(1030, names, 2))
        run.poll()
        found = reduce.run_data(run)["heat"]
        self.assertLessEqual(len(found["columns"]), COLUMNS)
        self.assertEqual(found["names"], ["0.qkv.x", "1.qkv.x", "0.qkv.dy"])
        self.assertEqual([found["columns"][0]["first"], found["columns"][-1]["last"]], [2, 1030])
        first = [column["saturated"][0] for _, _, column in run.heat.columns]
        self.assertEqual((first[0], max(first[1:])), (1e-3, 0.0))
        self.assertEqual(max(run.heat.columns[-1][2]["amax"]), 1031.0)
        self.assertEqual(sum(last >= first for first, last, _ in run.heat.columns), len(found["columns"]))

    def test_amaxes_of_each_map_have_their_own_range(self):
        """Amaxes of gradients and of activations are ten orders of magnitude apart; a cell still has two digits."""
        names = [f"{layer}.qkv.{role}" for layer in range(4) for role in ("x", "dy")]
        run = StreamedLog(self.add(self.long_log(30), [self.exponents(step, names, True) for step in (10, 20, 30)]))
        run.poll()
        for i, (_, _, column) in enumerate(run.heat.columns):
            column["amax"] = [(4.0 if name.endswith(".x") else 4e-10) * (1 + row / 100 + i / 10)
                              for name, row in run.heat.names.items()]
        found = reduce.run_data(run)["heat"]
        cells = base64.b64decode(found["maps"]["amax"]["data"])
        self.assertEqual([group for group, _ in found["groups"]], ["qkv.x", "qkv.dy"])
        for row, name in enumerate(found["names"]):
            low, high = found["maps"]["amax"]["ranges"][row // 4]
            for i, (_, _, column) in enumerate(run.heat.columns):
                shown = low * (high / low) ** ((cells[3 * row + i] - 1) / (reduce.LEVELS - 1))
                self.assertLess(abs(shown / column["amax"][run.heat.names[name]] - 1), 0.005)

    def test_predictions_have_the_sign_of_the_screen(self):
        log = self.add(self.long_log(30), [{
            "type": "plan", "step": 20, "predicted_ms": 110.0, "measured_ms": 100.0, "planned_bytes": 1 << 40,
            "used_bytes": (1 << 40) + 1}])
        out = self.folder / "plan.html"
        self.report(log, "--out", out)
        self.assertIn("+10.0 %", out.read_text())
        self.assertNotIn("-0.0 %", out.read_text())

    def test_records_of_a_known_form_are_still_looked_at(self):
        """Of a form that was found right, a wrong value is an error of RunLog, and others are columns of their own."""
        header, step = (next(r for r in records("bf16.jsonl") if r["type"] == kind) for kind in ("header", "step"))
        right = [{**header, "step": 0}, *({**step, "step": i} for i in (1, 2, 3))]
        for wrong in ({"tokens": 1 << 64}, {"step": 1 << 64}, {"lr": None}, {"lr": "0.1"}, {"skipped": "no"},
                      {"loss": [3]}, {"step": 4.0}):
            path = self.log([*right, {**step, "step": 4, **wrong}])
            lines = []
            for reader in (RunLog, StreamedLog):
                run = reader(path, skip_damaged=True)
                run.poll()
                self.assertEqual(list(run.steps), [1, 2, 3])
                lines.append(run.damaged)
            self.assertEqual(len(lines[0]), 1)
            self.assertEqual(*lines)
        run = StreamedLog(self.log([*right, *({**step, "step": i, "loss": loss, "mfu": mfu} for i, loss, mfu in (
            (4, "inf", 0.5), (5, 2.5, None), (6, 1, 10 ** 400)))]))
        run.poll()
        self.assertEqual([repr(run.steps.columns[field][3:].tolist()) for field in ("loss", "mfu")],
                         ["[inf, 2.5, 1.0]", "[0.5, nan, nan]"])

    def test_tensors_that_change_from_record_to_record(self):
        def tensor(name, amax, **more):
            return {"name": name, "format": "e4m3", "amax": amax, "quant_mul": 1.0, "saturated": 0.0, "flushed": 0.5,
                    "nonfinite": 1, **more}
        blocks = {"block_scales": {"min": 1, "median": 7.0, "max": 9, "at_ends": 0.25, "zeros": 0}}
        header = next(r for r in records("bf16.jsonl") if r["type"] == "header")
        steps = [[tensor("a", 1.0), tensor("b", 2.0)], [tensor("b", 5.0), tensor("a", "inf")], [],
                 [tensor("c", 3.0, **blocks), tensor("c", 4.0)]]
        run = StreamedLog(self.log([{**header, "step": 0}, *({"type": "fp8", "step": i + 1, "tensors": tensors}
                                                             for i, tensors in enumerate(steps))]))
        run.poll()
        self.assertEqual(run.heat.names, {"a": 0, "b": 1, "c": 2})
        amax, scale = ([column[field].tolist() for _, _, column in run.heat.columns] for field in ("amax", "scale"))
        self.assertEqual([len(rows) for rows in amax], [2, 2, 2, 3])
        self.assertEqual((amax[0], amax[1], amax[3][2], scale[3][2]), ([1.0, 2.0], [math.inf, 5.0], 4.0, 7.0))
        self.assertEqual([total[""]["nonfinite"] for total in run.fp8.values()], [2, 2, 0, 2])
        self.assertEqual(run.fp8[4][""]["scale_at_ends"], 0.25)

    def test_histograms_of_at_most_16_steps(self):
        names = ["0.qkv.x", "1.qkv.x", "0.qkv.dy"]
        log = self.long_log(1000, names, 10)
        self.add(log, [self.exponents(step, names) for step in range(10, 1001, 10)])
        run = StreamedLog(log)
        run.poll()
        found = reduce.run_data(run)["heat"]["exponents"]
        self.assertLessEqual(len(found["steps"]), 16)
        self.assertGreater(len(found["steps"]), 7)
        self.assertEqual((found["steps"][0], found["steps"][-1]), (10, 1000))
        self.assertEqual((found["low"], found["bins"]), (-12, 7))
        levels = struct.unpack(f"<{len(found['steps']) * 3 * 9}H", base64.b64decode(found["data"]))
        # The last step is 1000, and 1000 % 3 = 1: 750 - 250 in the first bin, 50 in each of five, 250 zeros.
        last = [0 if level == 0 else 2 ** (40 * ((level - 1) / 65534 - 1)) for level in levels[-9:]]
        for share, expected in zip(last, [0.5, 0.05, 0.05, 0.05, 0.05, 0.05, 0, 0.25, 0]):
            self.assertAlmostEqual(share, expected, delta=5e-4 * expected)
        self.assertEqual(found["scales"][-1], [16, 16, 16])

    def test_histograms_of_a_large_model_fit(self):
        names = [f"{layer}.{linear}.{role}" for layer in range(126) for linear in ("qkv", "proj", "up", "down")
                 for role in ("x", "weight", "dy")]
        log = self.add(self.long_log(200, ["0.qkv.x"], 10),
                       [self.exponents(step, names, True, counts=[1 << i for i in range(45)])
                        for step in range(10, 201, 10)])
        out = self.folder / "large.html"
        self.report(log, "--out", out)
        self.assertLess(out.stat().st_size, 3e6)
        steps = self.data(out)["runs"][0]["heat"]["exponents"]["steps"]
        self.assertEqual(steps[-1], 200)
        self.assertGreater(len(steps), 2)

    def test_a_resume_forgets_histograms(self):
        log = self.long_log(40, ["0.qkv.x"], 10)
        header = json.loads(log.read_text().splitlines()[0])
        self.add(log, [self.exponents(step, ["0.qkv.x"]) for step in (10, 20, 30)])
        self.add(log, [{**header, "step": 15}, self.exponents(25, ["0.qkv.x"])])
        run = StreamedLog(log)
        run.poll()
        self.assertEqual([step for step, _ in run.exponents.steps()], [10, 25])

    def test_shadow_of_a_bf16_run(self):
        names = ["0.qkv.x", "0.qkv.weight", "0.qkv.dy"]
        log = self.add(self.long_log(30), [self.exponents(step, names, True) for step in (10, 20, 30)])
        run = StreamedLog(log)
        run.poll()
        found = reduce.run_data(run)["heat"]
        self.assertEqual(list(found["maps"]), ["amax", "scale", "nonfinite", "tensorwise_flushed",
                                               "delayed_saturated", "delayed_flushed", "blockwise_flushed_at_most"])
        self.assertEqual([high for _, high in found["maps"]["delayed_saturated"]["ranges"]], [0.003] * 3)
        out = self.folder / "shadow.html"
        self.report(log, "--out", out)
        with open(out.with_suffix(".csv"), encoding="utf-8") as file:   # which has no casts
            self.assertFalse(any(row.get("fp8/largest_flushed") for row in csv.DictReader(file)))

    def test_nothing_of_a_log_is_markup(self):
        evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028&\ud800"
        header, step = (dict(next(r for r in records("bf16.jsonl") if r["type"] == kind)) for kind in
                        ("header", "step"))
        header.update(command=evil, commit=evil, config={evil: evil}, device={"name": evil}, fp8_plan=evil,
                      communication=[{evil: evil}])
        lines = [header, step, {"type": "event", "step": 1, "kind": evil, "text": evil},
                 {"type": "fp8", "step": 1, "tensors": [{"name": evil, "format": evil, "amax": 1, "saturated": 0,
                                                         "flushed": "nan", "nonfinite": 0}]},
                 {"type": "checkpoint", "step": 1, "path": evil}]
        out = self.folder / "evil.html"
        self.report(f"{evil.split('/')[0]}=" + str(self.log(lines)), "--out", out)
        clean = Elements(out.read_text())
        expected = self.folder / "plain.html"
        harmless = {**header, "command": "x", "commit": "x", "config": {"x": "x"}, "device": {"name": "x"},
                    "fp8_plan": "x", "communication": [{"x": "x"}]}
        self.report(self.log([harmless, *lines[1:]], "plain"), "--out", expected)
        self.assertEqual([tag for tag, _ in clean.tags], [tag for tag, _ in Elements(expected.read_text()).tags])
        self.assertFalse([name for _, attributes in clean.tags for name in attributes if name.startswith("on")
                          or name == "src"])
        self.assertNotRegex(clean.scripts[0], "[<>&\u2028]")
        policy = next(attributes["content"] for tag, attributes in clean.tags if "http-equiv" in attributes)
        self.assertIn("default-src 'none'", policy)
        self.assertEqual(re.findall(r"script-src ([^;]*);", policy), [markup.digest(clean.scripts[1])])

    def test_damaged_logs_are_one_line(self):
        for name, content in (("empty", b""), ("html", b"<html>\n"), ("cut", b'{"type":"header"'),
                              ("null", b"\0" * 1000), ("list", b"[1]\n"), ("deep", b"[" * 100000 + b"\n")):
            path = self.folder / f"{name}.jsonl"
            path.write_bytes(content)
            done = self.report(path, "--out", self.folder / "x.html", status=2)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        log = self.long_log(20, ["0.qkv.x"])
        lines = log.read_text().splitlines()
        for record in ({"type": "fp8", "step": 3, "tensors": [{"name": "a", "saturated": "x", "flushed": 0,
                                                               "nonfinite": 0}]},
                       {"type": "fp8", "step": "3", "tensors": []}, {"type": "step", "step": 21},
                       self.exponents(3, ["a"], counts="x"), self.exponents(3, ["a"], counts=[-1]),
                       self.exponents(3, ["a"], first=1e9), self.exponents(3, ["a"], scale="x"),
                       self.exponents(3, ["a"], counts=[1] * 300), self.exponents(3, ["a"], delayed_flushed=[]),
                       self.exponents(3, ["a"], zeros=None), {"type": "exponents", "step": 3, "tensors": [1]}):
            log.write_text("\n".join([*lines, json.dumps(record, separators=(",", ":"))]) + "\n")
            self.assertIn("damaged line", self.report(log, "--out", self.folder / "x.html", status=2).stderr)
            self.report(log, "--skip-damaged", "--out", self.folder / "x.html")

    def test_gap_to_the_baseline(self):
        runs = [{"name": name, "means": {1: loss, 2: loss}} for name, loss in
                (("bf16", 3.0), ("bf16", 3.5), ("fp8", 4.0))]
        found = reduce.gaps(runs)
        self.assertEqual(found["runs"], [["bf16", [-0.25, -0.25]], ["bf16", [0.25, 0.25]], ["fp8", [0.75, 0.75]]])
        self.assertEqual((found["band"], found["seeds"]), ([0.25, 0.25], 2))
        self.assertIsNone(reduce.gaps(runs[:1]))

    def test_the_library_is_what_was_published(self):
        for name, digest in UPLOT.items():
            self.assertEqual(hashlib.sha256((markup.HERE / name).read_bytes()).hexdigest(), digest)

    def test_followed_until_its_end(self):
        log, out = self.long_log(20), self.folder / "live.html"
        follower = subprocess.Popen([sys.executable, ROOT / "scripts/report", log, "--out", out, "--follow", "--every",
                                     "0.1"], stdout=subprocess.DEVNULL)
        with open(log, "a") as file:
            file.write(json.dumps({"type": "event", "step": 20, "kind": "stop", "text": "done"}) + "\n")
        self.assertEqual(follower.wait(60), 0)
        self.assertEqual(self.data(out)["runs"][0]["marks"][-1]["kind"], "stop")


@unittest.skipUnless(browser.CHROMIUM, "needs chromium")
class InBrowser(ReportTest):
    def test_panels_draw_and_answer(self):
        out = self.folder / "run.html"
        names = [f"{layer}.{linear}.{role}" for layer in range(4) for linear in ("qkv", "down")
                 for role in ("x", "weight", "dy")]
        self.report(f"<b>bf16={self.long_log(300, name='a')}", f"fp8={self.long_log(300, names, name='b')}",
                    "--out", out)
        with browser.Browser() as chromium:
            chromium.open(out)
            self.assertEqual(chromium.errors, [])
            self.assertEqual(chromium.requests, [f"file://{out}"])   # no network, no second file
            self.assertIn(": <b>bf16, fp8 (", chromium.run("document.querySelector('h1').textContent"))
            # Every chart and map has ink, a name, and can have the focus.
            drawn = chromium.run("""[...document.querySelectorAll("canvas")].map((canvas) => {
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                return data.some((value) => value !== data[0] && value !== 255); })""")
            self.assertTrue(all(drawn) and len(drawn) > 10, drawn)
            self.assertEqual(chromium.run("""[...document.querySelectorAll(".chart, .heats canvas")].filter((e) =>
                e.tabIndex !== 0 || (e.getAttribute("aria-label") ?? "").length < 10).length"""), 0)
            self.assertIn("largest 99", chromium.run("document.querySelector('.chart').getAttribute('aria-label')"))
            # Hover over a curve fills the legend; so do the arrow keys.
            legend = "document.querySelectorAll('.chart')[1].querySelector('.u-value').textContent"
            chromium.hover(*chromium.center(".chart .u-over"))
            self.assertRegex(chromium.run("document.querySelector('.chart .u-value').textContent"), r"\d")
            chromium.run("document.querySelectorAll('.chart')[1].focus()")
            chromium.key("End")
            self.assertEqual(chromium.run(legend), "300")
            # The legend has the dashes of the lines, for a page in grey.
            markers = chromium.run("""[...document.querySelectorAll('.chart')[1].querySelectorAll('.u-marker')].map(
                (e) => getComputedStyle(e).borderTopStyle)""")
            self.assertEqual(markers[-2:], ["solid", "dashed"])
            # Heat map: hover names the tensor, a click draws it.
            chromium.hover(*chromium.center(".heats canvas"))
            self.assertRegex(chromium.run("document.querySelector('.reading').textContent"),
                             r"^\d\.qkv\.x \(e4m3\), step")
            before = chromium.run("document.querySelectorAll('.chart').length")
            chromium.click(*chromium.center(".heats canvas"))
            self.assertGreater(chromium.run("document.querySelectorAll('#tensor .chart').length"), 2)
            # Another axis and another field of the tensors.
            chromium.run("document.querySelector('input[value=tokens]').click()")
            self.assertEqual(chromium.run("document.querySelector('.chart .u-label').textContent"), "tokens")
            self.assertGreater(chromium.run("document.querySelectorAll('.chart').length"), before)
            chromium.run("document.querySelector('details summary').click()")
            self.assertEqual(chromium.errors, [])

    def test_a_cell_opens_its_histogram(self):
        names = [f"{layer}.{linear}.{role}" for layer in range(4) for linear in ("qkv", "down")
                 for role in ("x", "weight", "dy")]
        fp8 = self.add(self.long_log(300, names, 100, name="fp8"),
                       [self.exponents(step, names) for step in (100, 200, 300)])
        shadow = self.add(self.long_log(300, name="bf16"),
                          [self.exponents(step, names, True) for step in (100, 200, 300)])
        # With the scale of the amax nothing is above the largest number; with a limit of 2^-6 what is above that.
        for scale, above in ((448 / 0.03, "0"), (448 * 64, "5")):
            log, out = self.long_log(3, name="amax"), self.folder / "amax.html"
            self.report(self.add(log, [self.exponents(2, names, True, amax=0.03, scale=scale)]), "--out", out)
            with browser.Browser() as chromium:
                chromium.open(out)
                chromium.click(*chromium.center(".heats canvas"))
                self.assertIn(f" {above} % above the largest", chromium.run(
                    "document.querySelector('#tensor svg').getAttribute('aria-label')"))
        figure = "document.querySelector('#tensor .exponents')"
        for log, shades in ((fp8, "saturated"), (shadow, "tensorwise_flushed")):
            out = self.folder / "exponents.html"
            self.report(log, "--out", out)
            with browser.Browser() as chromium:
                chromium.open(out)
                self.assertTrue(chromium.run(f"!!document.querySelector('option[value={shades}]')"))
                chromium.click(*chromium.center(".heats canvas"))
                # The middle column is step 200: bars of seven exponents, three limits of E4M3 at scale 16.
                chosen = f"{figure}.querySelector('select').selectedOptions[0].textContent"
                self.assertEqual(chromium.run(chosen), "200")
                self.assertEqual(chromium.run(f"{figure}.querySelectorAll('rect').length"), 7)
                self.assertEqual(chromium.run(f"{figure}.querySelectorAll('line.limit').length"), 3)
                self.assertRegex(chromium.run("document.querySelector('.reading').textContent"),
                                 r"amax [\d.]+, scale [\d.]+,")
                # The names of the limits do not overlap.
                ends = chromium.run(f"""[...{figure}.querySelectorAll('text.limit')].map((e) => {{
                    const box = e.getBoundingClientRect(); return [box.left, box.right]; }})""")
                self.assertTrue(all(a[1] <= b[0] for a, b in zip(ends, ends[1:])) and len(ends) == 3, ends)
                # The bars are of 2^-12 to 2^-6; half of the smallest subnormal is 2^-14, the smallest normal 2^-10.
                places, bars = (chromium.run(f"""[...{figure}.querySelectorAll('{what}')].map((e) =>
                    +e.getAttribute('{x}'))""") for what, x in (("line.limit", "x1"), ("rect", "x")))
                octave = bars[1] - bars[0]
                self.assertAlmostEqual((places[0] - bars[0] + 0.5) / octave, -2, delta=0.01)
                self.assertAlmostEqual((places[1] - bars[0] + 0.5) / octave, 2, delta=0.01)
                self.assertAlmostEqual((places[2] - bars[0] + 0.5) / octave, 12 + 4.807, delta=0.01)   # log2(28)
                said = chromium.run(f"{figure}.querySelector('svg').getAttribute('aria-label')")
                self.assertRegex(said, r"^\d\.qkv\.x, exponents\. Step 200: about 0 % flushed to zero, 50 % subnormal, "
                                       r"25 % normal, 0 % above the largest, zeros 25 %, not finite 0 %")
                # By keyboard: the focus is on the choice of steps; a cell opens with Enter.
                self.assertEqual(chromium.run("document.activeElement.tagName"), "SELECT")
                chromium.run(f"""(() => {{ const e = {figure}.querySelector('select'); e.value = 0;
                    e.dispatchEvent(new Event('change')); }})()""")
                self.assertIn("Step 100:", chromium.run(f"{figure}.querySelector('p').textContent"))
                chromium.run("document.querySelectorAll('.heats canvas')[2].focus()")
                chromium.key("ArrowRight")
                chromium.key("Enter")
                self.assertIn("dy", chromium.run(f"{figure}.querySelector('svg').getAttribute('aria-label')"))
                self.assertIn("e5m2" if log == shadow else "e4m3",
                              chromium.run(f"{figure}.querySelector('small').textContent"))
                chromium.run(f"{figure}.querySelector('summary').click()")
                self.assertGreater(chromium.run(f"{figure}.querySelectorAll('tbody tr').length"), 5)
                self.assertEqual(chromium.errors, [])

    def test_what_fp8_would_do_is_said_of_the_chosen_run_alone(self):
        names, out = ["0.qkv.x"], self.folder / "two.html"
        fp8 = self.add(self.long_log(300, names, 100, name="fp8"), [self.exponents(100, names)])
        self.report(fp8, self.add(self.long_log(300, name="bf16"), [self.exponents(100, names, True)]), "--out", out)
        with browser.Browser() as chromium:
            chromium.open(out)
            for name, said in (("fp8", False), ("bf16", True)):
                chromium.run(f"""(() => {{ const e = [...document.querySelectorAll('section select option')].find((o) =>
                    o.textContent === '{name}'); e.selected = true;
                    e.parentNode.dispatchEvent(new Event('change', {{bubbles: true}})); }})()""")
                self.assertEqual(chromium.run("document.querySelector('section').innerText.includes('would do')"), said)

    def test_a_script_of_a_log_does_not_run(self):
        log, out = self.long_log(10, ["<script>document.title='owned'</script>"]), self.folder / "evil.html"
        text = log.read_text().replace('"commit": "', '"commit": "<img src=x onerror=document.title=1>')
        log.write_text(text)
        self.report(log, "--out", out)
        page_text = out.read_text()
        with browser.Browser() as chromium:
            chromium.open(out)
            self.assertEqual((chromium.errors, len(chromium.requests)), ([], 1))
            self.assertTrue(chromium.run("document.title").startswith("Training report"))
            # The policy holds by itself: what is put into the page as markup does not run either.
            out.write_text(page_text.replace("<main>", "<main><script>document.title='owned'</script>"))
            chromium.open(out)
            self.assertTrue(chromium.run("document.title").startswith("Training report"))
            self.assertTrue(any("Content Security Policy" in error for error in chromium.errors), chromium.errors)


if __name__ == "__main__":
    unittest.main()
