"""scripts/report: what the page has, hostile logs, bounds; in headless Chromium where there is one."""
import base64
import csv
import hashlib
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
import types
import unittest
import unittest.mock

from llmfp8.report import markup, reduce
from llmfp8.report.page import report
from llmfp8.run_log import InputError, read_log
from tests.support.log_tools import LogToolTest, ROOT, records
from tests.support.run_command import run_command

UPLOT = {"uPlot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
         "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"}


class Elements(html.parser.HTMLParser):
    """The start tags of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.titles = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.tags and self.tags[-1][0] == "title":
            self.titles.append(data)


def fp8_record(step, names, **more):
    return {"type": "fp8", "step": step, "tensors": [
        {"name": name, "format": "e4m3", "amax": 1.0 + step, "quant_mul": 2.0, "flushed": 0.25, "saturated": 0.0,
         "nonfinite": 0, **more} for name in names]}


class ReportTest(LogToolTest):
    def log(self, lines, name="run"):
        return self.file(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def long_log(self, count, tensors=(), every=10, name="run", more=(), **header):
        """A log of `count` steps with one spike of the loss, and FP8 records of the tensors."""
        first, step = (next(r for r in records("bf16.jsonl") if r["type"] == kind) for kind in ("header", "step"))
        lines = [{**first, "step": 0, **header}]
        for i in range(1, count + 1):
            lines.append({**step, "step": i, "tokens": 100 * i, "loss": 99.0 if i == count // 3 else 3 + i / count,
                          "skipped": i == 5, "step_seconds": 1.0})
            if tensors and i % every == 0:
                lines.append(fp8_record(i, tensors, saturated=1e-3 if i == every else 0.0))
        return self.log([*lines, *more], name)

    def report(self, *arguments, status=0):
        return run_command([sys.executable, ROOT / "scripts/report", *map(str, arguments)], status)

    def data(self, path):
        return json.loads(Elements(path.read_text()).scripts[0])


class Page(ReportTest):
    def test_an_evaluation_in_bf16_has_its_own_curve_and_figure(self):
        evals = [{"type": "eval", "step": step, "loss": 3.5, "counted_tokens": 5, "seconds": 1.0, **more}
                 for step, more in ((10, {}), (20, {"loss_bf16": 3.25, "loss_ema": 3.125}))]
        out = self.folder / "run.html"
        self.report(self.long_log(20, more=evals), "--out", out)
        run = self.data(out)["runs"][0]
        self.assertEqual([run["valid"][name] for name in ("loss", "loss_bf16", "loss_ema")],
                         [[3.5, 3.5], [None, 3.25], [None, 3.125]])
        self.assertIn("<td>3.5000, in BF16 3.2500, EMA 3.1250 at step 20", out.read_text())
        self.assertIn("validation loss 3.5000, in BF16 3.2500, EMA 3.1250", [mark["text"] for mark in run["marks"]])

    def test_extremes_survive_and_the_csv_is_whole(self):
        out = self.folder / "run.html"
        self.report(self.long_log(10_007), "--out", out)
        run = self.data(out)["runs"][0]
        self.assertLessEqual(len(run["curves"]["loss"]), 2 * reduce.BUCKETS)
        self.assertEqual(len(run["axes"]["step"]), len(run["curves"]["loss"]))
        self.assertEqual((max(run["curves"]["loss"]), min(run["curves"]["loss"])), (99.0, reduce.short(3 + 1 / 10_007)))
        self.assertEqual((len(run["smooth"]["loss"]), run["smooth_steps"]), (len(run["curves"]["loss"]), 250))
        self.assertEqual(reduce.moving_mean([9.0, 1.0, math.nan, 3.0, 5.0], 3, [(i, i + 1) for i in range(5)]),
                         [9.0, 5.0, 2.0, 4.0, 4.0])
        self.assertEqual(run["axes"]["hours"][-1], reduce.short(10_007 / 3600))
        with open(out.with_suffix(".csv"), newline="") as file:
            self.assertEqual(len(list(csv.DictReader(file))), 10_007)
        self.assertLess(out.stat().st_size, 3e6)

    def test_heat_map_is_bounded_and_keeps_the_largest(self):
        names = ["1.qkv.x", "0.qkv.x", "0.qkv.dy"]
        found = reduce.run_data(read_log(self.long_log(1030, names, 2)))["heat"]
        self.assertLessEqual(len(found["columns"]), reduce.COLUMNS)
        self.assertEqual((found["names"], found["groups"]), (["0.qkv.x", "1.qkv.x", "0.qkv.dy"],
                                                             [["qkv.x", 2], ["qkv.dy", 1]]))
        self.assertEqual([found["columns"][0]["first"], found["columns"][-1]["last"]], [2, 1030])
        saturated = base64.b64decode(found["maps"]["saturated"]["data"])[:len(found["columns"])]
        self.assertEqual((found["maps"]["saturated"]["ranges"][0], saturated[0] > 0, max(saturated[1:])),
                         ([1e-3, 1e-3], True, 0))
        self.assertEqual(found["maps"]["amax"]["ranges"][0][1], 1031)

    def test_cells(self):
        """Amaxes of gradients and of activations are ten orders of magnitude apart; a cell still has two digits."""
        lines = [[4.0 * (1 + row / 100 + i / 10) * scale for i in range(3)] for scale in (1, 1e-10) for row in range(4)]
        found = reduce.cells(lines, [4, 4], own_ranges=True)
        cells = base64.b64decode(found["data"])
        for row, line in enumerate(lines):
            low, high = found["ranges"][row // 4]
            for i, value in enumerate(line):
                shown = low * (high / low) ** ((cells[3 * row + i] - 1) / (reduce.LEVELS - 1))
                self.assertLess(abs(shown / value - 1), 0.005)
        odd = base64.b64decode(reduce.cells([[0.0, math.nan, math.inf, 1.0, 8.0]], [1], False)["data"])
        self.assertEqual(list(odd), [0, 255, 254, 1, 254])

    def test_tensors_are_ordered_by_layer_number(self):
        self.assertEqual(reduce.tensor_order(["10.up.x", "2.up.x", "lm_head.x", "0.up.dy"]),
                         [("up.x", ["2.up.x", "10.up.x"]), ("lm_head.x", ["lm_head.x"]), ("up.dy", ["0.up.dy"])])

    def test_what_the_tables_say(self):
        plan = {"type": "plan", "step": 20, "predicted_ms": 110.0, "measured_ms": 100.0, "planned_bytes": 1 << 40,
                "used_bytes": (1 << 40) + 1, "predicted_parts_ms": {"norms": 10.0, "matmuls, forward": 30.0}}
        text = report([read_log(self.long_log(
            30, more=[plan], arena_bytes=3 << 30, purpose_bytes={"weights": 2 << 30, "scratch": 1 << 30, "none": 0},
            communication=[{"collective": "all-gather", "bytes": 10}]))])
        for part in ("+10.0 %", "<th scope=row>weights</th><td>2.00 GiB", "30.0 ms", "all-gather", "gpt2-tiny"):
            self.assertIn(part, text)
        self.assertNotIn("-0.0 %", text)
        self.assertNotIn(">none</th><td>0", text)

    def test_tensors_that_change_from_record_to_record(self):
        one, two = fp8_record(1, ["a", "b"]), fp8_record(2, ["b", "c"], amax="inf", flushed="nan")
        found = reduce.heat(read_log(self.long_log(3, more=[one, two, fp8_record(3, [])])).fp8)
        self.assertEqual(found["names"], ["a", "b", "c"])
        self.assertEqual(list(base64.b64decode(found["maps"]["amax"]["data"])), [127, 255, 255, 127, 254, 255, 255,
                                                                                  254, 255])

    def test_the_load_of_experts_is_relative_to_the_mean_of_their_layer(self):
        more = [{"type": "experts", "step": step, "load": load}
                for step, load in ((2, [1, 3, 2, 6, 0, 0]), (3, [2, 2, 2, 0, 0, 12]))]
        path = self.long_log(3, more=more, config={"num-experts": 3})
        found = reduce.heat(reduce.loads(read_log(path)))
        self.assertEqual(found["groups"], [["layer 0", 3], ["layer 1", 3]])
        self.assertEqual(found["columns"], [{"first": 2, "last": 2}, {"first": 3, "last": 3}])
        self.assertEqual(found["maps"]["load"]["ranges"], [[0.5, 3], [0.5, 3]])
        levels = list(base64.b64decode(found["maps"]["load"]["data"]))
        middle = 1 + round(253 * math.log(2) / math.log(6))
        self.assertEqual(levels, [1, middle, reduce.level_of(1.5, 0.5, 3), middle, middle, middle, 254, 0, 0, 0, 0,
                                  254])
        with self.assertRaisesRegex(InputError, "with a wrong load"):
            read_log(self.long_log(3, more=[{"type": "experts", "step": 3, "load": ["much"]}]))

    def test_nothing_of_a_log_is_markup(self):
        evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028&\ud800"
        header, step = (dict(next(r for r in records("bf16.jsonl") if r["type"] == kind)) for kind in
                        ("header", "step"))
        header.update(command=evil, commit=evil, config={evil: evil}, device={"name": evil}, fp8_plan=evil,
                      communication=[{evil: evil}])
        lines = [header, step, {"type": "event", "step": 1, "kind": evil, "text": evil},
                 fp8_record(1, [evil], format=evil, flushed="nan"), {"type": "checkpoint", "step": 1, "path": evil}]
        out = self.folder / "evil.html"
        self.report(f"{evil.split('/')[0]}=" + str(self.log(lines)), "--out", out)
        clean = Elements(out.read_text())
        harmless = {**header, "command": "x", "commit": "x", "config": {"x": "x"}, "device": {"name": "x"},
                    "fp8_plan": "x", "communication": [{"x": "x"}]}
        expected = Elements(report([read_log(self.log([harmless, *lines[1:]], "plain"))]))
        self.assertEqual([tag for tag, _ in clean.tags], [tag for tag, _ in expected.tags])
        self.assertFalse([name for _, attributes in clean.tags for name in attributes if name.startswith("on")
                          or name == "src"])
        self.assertNotRegex(clean.scripts[0], "[<>&\u2028]")
        policy = next(attributes["content"] for tag, attributes in clean.tags if "http-equiv" in attributes)
        self.assertIn("default-src 'none'", policy)
        self.assertEqual(re.findall(r"script-src ([^;]*);", policy), [markup.digest(clean.scripts[1])])

    def test_damaged_logs_are_one_line(self):
        for content in (b"", b"<html>\n", b"[" * 100000 + b"\n"):
            done = self.report(self.file("bad.jsonl", content), "--out", self.folder / "x.html", status=2)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        log = self.long_log(20, ["0.qkv.x"], more=[{"type": "step", "step": 21}])
        self.assertIn("damaged line", self.report(log, "--out", self.folder / "x.html", status=2).stderr)
        self.report(log, "--skip-damaged", "--out", self.folder / "x.html")
        self.assertIn("name it .html", self.report(log, "--out", self.folder / "x.pdf", status=2).stderr)

    def test_a_folder_of_runs_has_its_report_in_it(self):
        for name in ("one", "two"):
            self.long_log(20, name=f"runs/{name}/log")
        self.report(self.folder / "runs")
        self.assertEqual([run["name"] for run in self.data(self.folder / "runs/report.html")["runs"]], ["one", "two"])

    def test_gap_to_the_baseline(self):
        runs = [types.SimpleNamespace(name=name, steps={step: {"loss": loss} for step in (*steps, 9)})
                for name, loss, steps in (("bf16", 3.0, (1, 2)), ("bf16", 3.5, (1, 2)), ("fp8", 4.0, (1, 2, 3)))]
        found = reduce.gaps(runs)
        self.assertEqual(found["runs"], [["bf16", [-0.25] * 3], ["bf16", [0.25] * 3], ["fp8", [0.75] * 3]])
        self.assertEqual((found["band"], found["seeds"], found["step"]), ([0.25] * 3, 2, [1, 2, 9]))
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


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Runs behind the page's own script, so that an exception there leaves no result. Every chart and map must have ink, a
# name and a place for the focus; hovering over a curve fills the legend; hovering over a map names the
# tensor, a click draws it; another axis is drawn at once.
ASK_THE_PAGE = """
const all = (what) => [...document.querySelectorAll(what)];
const at = (e, kind) => { const r = e.getBoundingClientRect(); e.dispatchEvent(new MouseEvent(kind, { bubbles: true,
    clientX: r.x + r.width / 2, clientY: r.y + r.height / 2 })); };
const later = (then) => setTimeout(then, 200);   // of virtual time; a busy machine may draw no frame
later(() => {
    const found = { title: document.querySelector("h1").textContent };
    found.top = document.querySelector(".chart").getBoundingClientRect().top;
    found.axes = all(".ends span").map((span) => span.textContent);
    found.paper = getComputedStyle(document.body).backgroundColor;
    const map = document.querySelector(".heats canvas").getContext("2d").getImageData(0, 0, 1, 1).data;
    found.lowest = map[0];   // of the red of the cell of the smallest value
    found.ink = all("canvas").map((canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
        .data.some((value, i, data) => value !== data[0] && value !== 255));
    found.unnamed = all(".chart, .heats canvas").filter((e) => e.tabIndex !== 0 || (e.getAttribute("aria-label") ?? "")
        .length < 10).length;
    found.loss = document.querySelector(".chart").getAttribute("aria-label");
    const second = all(".chart")[1];
    at(second.querySelector(".u-over"), "mousemove");
    at(all(".heats canvas")[0], "mousemove");
    found.reading = document.querySelector(".reading").textContent;
    at(all(".heats canvas")[0], "click");
    found.tensor = all("#tensor .chart").length;
    later(() => {
        found.legend = second.querySelector(".u-value").textContent;
        document.querySelector("input[value=tokens]").click();
        found.axis = document.querySelector(".chart .u-label").textContent;
        found.width = document.documentElement.scrollWidth;
        document.body.setAttribute("data-found", JSON.stringify(found));
    });
});
"""


@unittest.skipUnless(CHROMIUM, "needs chromium")
class InBrowser(ReportTest):
    measures_time = True   # the page has seconds to draw itself

    def opened(self, page, *flags):
        """The page's elements after its script has run, in headless Chromium without a network."""
        path = self.file("page.html", page)
        done = run_command([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                            f"--user-data-dir={self.folder / 'profile'}", "--window-size=1280,900",
                            "--virtual-time-budget=5000", *flags, "--dump-dom", f"file://{path}"], None)
        return Elements(done.stdout)

    def test_panels_draw_and_answer(self):
        names = [f"{layer}.{linear}.{role}" for layer in range(4) for linear in ("qkv", "down")
                 for role in ("x", "weight", "dy")]
        load = [{"type": "experts", "step": step, "load": [1, 3, 2, 6]} for step in (100, 200, 300)]
        config = {**records("bf16.jsonl")[0]["config"], "num-experts": 2}
        runs = [read_log(self.long_log(300, name="a", more=load, config=config), "<b>bf16"),
                read_log(self.long_log(300, names, name="b"), "fp8")]
        whole = markup.page
        with unittest.mock.patch("llmfp8.report.page.page", lambda title, body, script, data: whole(
                title, body.replace("<main>", "<main><script>document.title = 'owned'</script>"),   # not allowed
                script + ASK_THE_PAGE, data)):
            text = report(runs)
        for flags, paper, lowest in (((), "rgb(255, 255, 255)", 255),
                                     (("--blink-settings=preferredColorScheme=0",), "rgb(20, 23, 28)", 0)):
            page = self.opened(text, *flags)
            self.assertFalse(any("owned" in text for text in page.titles), page.titles)
            found = json.loads(dict(page.tags)["body"]["data-found"])
            self.assertTrue(all(found["ink"]) and len(found["ink"]) > 10, found)
            self.assertEqual(found["paper"], paper)
            self.assertLess(abs(found["lowest"] - lowest), 10)
        self.assertIn("<b>bf16, fp8 (", found["title"])
        self.assertLess(found["top"], 200)   # the loss is the first that a reader sees
        self.assertEqual(found["axes"][:4], ["layer 0", "3", "step 10", "300"])
        self.assertEqual((found["unnamed"], found["axis"]), (0, "tokens"))
        self.assertRegex(found["legend"], r"^\d+$")
        self.assertIn("largest 99", found["loss"])
        self.assertIn("expert 0", found["axes"])
        self.assertRegex(found["reading"], r"^\d\.qkv\.x \(e4m3\), step")
        self.assertGreater(found["tensor"], 2)
        self.assertLessEqual(found["width"], 1280)
