"""Pages of plan, doctor, bench and scripts/compare, and what the report of a run takes from them."""
import copy
import json
import subprocess
import sys
import unittest

from llmfp8.comparison.page import html_of
from llmfp8.report import document, drawing
from tests.python.test_report import Elements, ReportTest
from tests.support import browser
from tests.support.log_tools import LOGS, ROOT

PLAN = {"type": "plan", "config": {"model": "llama3-8B", "fp8-recipe": "delayed"},
        "gpu": {"name": "H200", "rates": "rates measured on it"}, "params": 8030261248, "ranks": 8,
        "tokens_per_step": 65536, "train_iters": 100,
        "memory": {"arena_bytes": 3 << 30, "purpose_bytes": {"weights": 2 << 30, "offload buffers": 0,
                                                             "scratch": 1 << 30},
                   "gpu_bytes": 4 << 30, "fits": True},
        "time": {"step_ms": 40.0, "parts_ms": {"matmuls, forward": 30.0, "norms": 10.0, "embedding": 0.0},
                 "tokens_per_second": 1e5, "mfu": 0.5, "hours": 2.0},
        "communication": {"collectives": [{"collective": "all-gather", "dtype": "bf16", "ranks": 8, "calls": 67,
                                           "bytes": 10, "sent_bytes": 9}]},
        "linears": [{"name": f"{layer}.qkv", "out": 6, "in": 4, "fp8": layer > 0, "bf16_ms": 2.0, "fp8_ms": 1.0,
                     "gain": 2.0} for layer in range(4)],
        "matmuls": [{"pass": "forward", "M": 1, "N": 2, "K": 3, "in": "e4m3", "out": "bf16", "count": 4,
                     "tflop": 0.125}], "notes": ["a note"], "checkpoint": {"bytes": 5 << 30}}
DOCTOR = {"type": "doctor", "commit": "abc", "device": "cuda", "host": "node7", "ranks": 2, "verdict": "failed",
          "counts": {"ok": 1, "failed": 1}, "items": [
              {"name": "build", "checks": "c", "verdict": "ok", "text": "t", "advice": ""},
              {"name": "GPU", "checks": "c", "verdict": "failed", "text": "no GPU", "advice": "buy one"}]}
BENCH = {"type": "bench", "config": {"model": "llama3-8B"}, "recipe": "delayed", "device": "NVIDIA H200", "ranks": 1,
         "step_ms": 40.0, "tokens_per_second": 1e5, "mfu": None, "ceilings": {"copy_bytes_per_s": 4e12},
         "clocks": {"samples": 0},
         "rows": [{"name": "attention_backward", "class": "attention", "calls": 32, "ms": 30.0, "floor_ms": 20.0},
                  {"name": "rmsnorm_forward", "class": "norms", "calls": 64, "ms": 10.0, "floor_ms": 9.0}],
         "totals": {"attention": {"ms": 30.0, "floor_ms": 20.0}, "norms": {"ms": 10.0, "floor_ms": 9.0},
                    "gaps": {"ms": -0.1, "floor_ms": 0}}}
EVIL = "</title><script>alert(1)</script>\"'&\u2028"


def everywhere(value, hostile):
    """The value with every text, also that of keys that are not ours, replaced."""
    if isinstance(value, dict):
        return {key: entry if key == "type" else everywhere(entry, hostile) for key, entry in value.items()}
    if isinstance(value, list):
        return [everywhere(entry, hostile) for entry in value]
    return hostile if isinstance(value, str) else value


class Documents(ReportTest):
    def page_of(self, data):
        out = self.folder / "page.html"
        self.report(self.file("data.json", json.dumps(data, indent=1)), "--out", out)
        return out.read_text()

    def test_plan(self):
        text = self.page_of(PLAN)
        for part in ("fits: 3.00 GiB of 4.00 GiB on H200", "8,030,261,248", "weights: 2.00 GiB, 50.0 %",
                     "free: 1.00 GiB, 25.0 %", "30.00 ms, 75.0 %", "qkv", "3 of 4", "2.00 times BF16", "all-gather",
                     "2.00 hours", "a note"):
            self.assertIn(part, text)
        self.assertNotIn("embedding", text)
        self.assertNotIn("2.00 times BF16, ", text)   # speedups have no sum
        small = copy.deepcopy(PLAN)
        small["memory"].update(gpu_bytes=1 << 30, fits=False, changes=[
            {"options": "--zero 2", "arena_bytes": 1 << 29, "fits": True}])
        text = self.page_of(small)
        self.assertIn("DOES NOT FIT", text)
        self.assertIn("--zero 2", text)
        self.assertNotIn("free:", text)

    def test_doctor(self):
        text = self.page_of(DOCTOR)
        self.assertIn("failed: 1 ok, 1 failed", text)
        self.assertLess(text.index("no GPU"), text.index(">build<"))   # what failed comes first

    def test_bench(self):
        text = self.page_of(BENCH)
        self.assertIn("attention_backward", text)
        self.assertIn("75.0 %", text)
        self.assertEqual(text.count('stroke="#c2570c"'), 4)   # the floors of two classes and two operations

    def test_from_standard_input(self):
        out = self.folder / "d.html"
        done = subprocess.run([sys.executable, ROOT / "scripts/report", "-", "--out", out], input=json.dumps(DOCTOR),
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("node7", out.read_text())
        for data in ("", "{", "[]", '{"type": "other"}', "[" * 100000):
            done = subprocess.run([sys.executable, ROOT / "scripts/report", "-", "--out", out], input=data,
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)

    def test_beside_a_log(self):
        bench, plan = self.file("bench.json", json.dumps(BENCH, indent=1)), self.file("plan.json", json.dumps(PLAN))
        out = self.folder / "run.html"
        self.report(self.long_log(20), bench, "--out", out)
        self.assertIn("Time of a step by operation", out.read_text())
        self.assertIn("attention_backward", out.read_text())
        self.assertIn("a page of its own", self.report(self.long_log(20), plan, "--out", out, status=2).stderr)
        self.assertIn("a page of its own", self.report(bench, plan, "--out", out, status=2).stderr)

    def test_memory_and_predicted_parts_of_a_log(self):
        log = self.long_log(20)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines[0].update(arena_bytes=3 << 30, purpose_bytes={"weights": 2 << 30, "scratch": 1 << 30},
                        device={"name": "NVIDIA H200", "sm": 90, "memory_bytes": 4 << 30})
        lines.append({"type": "plan", "step": 20, "predicted_ms": 40.0, "measured_ms": 41.0, "planned_bytes": 1,
                      "used_bytes": 1, "predicted_parts_ms": {"norms": 10.0, "matmuls, forward": 30.0}})
        out = self.folder / "run.html"
        self.report(self.log(lines), "--out", out)
        text = out.read_text()
        for part in ("weights: 2.00 GiB, 50.0 %", "free: 1.00 GiB", "30.00 ms, 75.0 %",
                     "predicted 40.00 ms, measured 41.00 ms"):
            self.assertIn(part, text)

    def test_hostile_documents(self):
        for data in (PLAN, DOCTOR, BENCH):
            plain, evil = Elements(self.page_of(everywhere(data, "x"))), Elements(self.page_of(everywhere(data, EVIL)))
            self.assertEqual([tag for tag, _ in plain.tags], [tag for tag, _ in evil.tags])
            self.assertEqual(evil.scripts, [])
        for data in (PLAN, DOCTOR, BENCH):   # whatever the values are, a page or one line
            for key in data:
                for value in (None, 3, "x", [], {}, [3], {"a": 3}, float("nan")):
                    if key != "type":
                        self.assertIn("</html>", document.document({**data, key: value}))
                    for inner in data[key] if isinstance(data[key], dict) else ():
                        changed = {**data, key: {**data[key], inner: value}}
                        self.assertIn("</html>", document.document(changed))

    def test_sizes(self):
        self.assertEqual([document.gib(value) for value in (3 << 30, 1 << 26, 1 << 30 >> 3, 46336, None)],
                         ["3.00 GiB", "64.00 MiB", "0.12 GiB", "45.25 KiB", "unknown"])

    def test_a_strip_is_drawn_to_scale(self):
        text = drawing.strip("m", [("a", 1), ("b", 2), ("none", 0)], 4, str)
        widths = [float(attributes["width"]) for tag, attributes in Elements(text).tags if tag == "rect"]
        self.assertEqual(widths, [270.0, 540.0, 270.0, 1079.0])   # the last is the frame
        self.assertEqual(drawing.strip("m", [], 4, str), "")

    def test_markdown_of_a_comparison(self):
        text = html_of("# A <b>\n\n| a | b |\n| --- | --- |\n| 1 \\| 2 | **x** |\n\n* item\n* other\n\n```\n"
                       "| code |\n```\nlast")
        for part in ("<h1>A &lt;b&gt;</h1>", "<td>**x**</td>", ">1 | 2<", "<ul>\n<li>item</li>\n<li>other</li>\n</ul>",
                     "<pre tabindex=0>| code |</pre>", "<p>last</p>"):
            self.assertIn(part, text)
        self.assertEqual(text.count("<table>"), 1)

    def compared(self):
        logs = [f"a={LOGS / 'killed.jsonl'}", f"b={LOGS / 'bf16.jsonl'}"]
        subprocess.run([sys.executable, ROOT / "scripts/compare", *logs, "--out", self.folder / "out", "--no-plots",
                        "--warmup", "1"], check=True, capture_output=True)
        return self.folder / "out/compare.html"

    def test_compare_writes_a_page(self):
        text = self.compared().read_text()
        self.assertIn("tokens/s/GPU", text)
        self.assertIsNone(json.loads(Elements(text).scripts[0])["gap"])   # the options differ in more than precision

    @unittest.skipUnless(browser.CHROMIUM, "needs chromium")
    def test_in_a_browser(self):
        pages = [self.compared()]
        for data in (PLAN, DOCTOR, BENCH):
            self.page_of(data)
            pages.append(self.folder / f"{data['type']}.html")
            (self.folder / "page.html").rename(pages[-1])
        with browser.Browser() as chromium:
            for path in pages:
                chromium.open(path)
                self.assertEqual((chromium.errors, chromium.requests), ([], [f"file://{path}"]))
                self.assertEqual(chromium.run("""[...document.querySelectorAll("svg.picture")].filter((e) =>
                    e.getBoundingClientRect().width < 300 || (e.getAttribute("aria-label") ?? "").length < 10
                    ).length"""), 0)
                self.assertLessEqual(chromium.run("document.documentElement.scrollWidth"), 1280)
            chromium.open(pages[0])
            self.assertGreater(chromium.run("document.querySelectorAll('.chart canvas').length"), 3)


if __name__ == "__main__":
    unittest.main()
