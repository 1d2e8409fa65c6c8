"""dev/figures: the committed picture shows the measured tables; rows that were measured in another way are refused."""
import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.support.folder import FolderTest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("step_times", ROOT / "dev" / "figures" / "step_times.py")
step_times = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step_times)
SVG = "{http://www.w3.org/2000/svg}"
HEADER = "configuration,gpu,gpus,s_per_it_median,tokens_per_s_per_gpu\n"


class StepTimes(FolderTest):
    def table(self, name, *rows):
        (self.folder / name).write_text(HEADER + "".join(row + "\n" for row in rows))
        return name

    def test_the_committed_picture_is_that_of_the_tables(self):
        self.assertEqual((ROOT / step_times.PICTURE).read_text(encoding="utf-8"),
                         step_times.draw(*step_times.read_series()), "run dev/figures/step_times.py")

    def test_the_readme_shows_it_with_its_words(self):
        words = step_times.alt_text(*step_times.read_series())
        image = f"![{words}]({step_times.PICTURE})"
        self.assertTrue(image in (ROOT / "README.md").read_text(encoding="utf-8"), f"README.md does not have {image}")

    def test_bars_have_the_lengths_of_their_times(self):
        ours = self.table("a.csv", "bf16,G,1,2.0,500", "delayed,G,1,1.0,1000", "blockwise,G,1,1.6,625")
        peer = self.table("b.csv", "bf16,G,1,4.0,250", "delayed,G,1,3.2,312.5")
        found, setting = step_times.read_series([("ours", ours), ("peer", peer)], self.folder)
        root = ElementTree.fromstring(step_times.draw(found, setting))
        bars = [(float(r.get("width")), r.get("class")) for r in root.iter(SVG + "rect")
                if r.get("height") == str(step_times.BAR - 2)]
        longest = max(width for width, _ in bars)
        # A peer that did not run blockwise has no bar there.
        self.assertEqual([(round(width / longest, 3), name) for width, name in bars],
                         [(0.5, "b0"), (1, "b1"), (0.25, "b0"), (0.8, "b1"), (0.4, "b0")])
        texts = [t.text for t in root.iter(SVG + "text")]
        self.assertTrue({"ours", "peer", "FP8 delayed", "3.200 s, 0.62 x as fast"} <= set(texts), texts)
        self.assertIn("peer FP8 delayed 3.20, 0.62 x as fast", step_times.alt_text(found, setting))

    def test_what_was_measured_otherwise_is_refused(self):
        ours = self.table("a.csv", "bf16,G,1,2.0,500")
        for row in ("bf16,H,1,2.0,500", "bf16,G,2,2.0,250", "bf16,G,1,2.0,600"):
            peer = self.table("b.csv", row)
            with self.assertRaisesRegex(step_times.FigureError, "^b.csv: bf16: measured on "):
                step_times.read_series([("ours", ours), ("peer", peer)], self.folder)

    def test_texts_stay_inside_the_picture(self):
        root = ElementTree.fromstring((ROOT / step_times.PICTURE).read_text(encoding="utf-8"))
        width = float(root.get("width"))
        for text in root.iter(SVG + "text"):   # 0.6 of the size per letter is a wide font
            long, x = 0.6 * 14 * len(text.text), float(text.get("x"))
            left, right = (x - long, x) if text.get("text-anchor") == "end" else (x, x + long)
            self.assertTrue(0 <= left and right <= width, text.text)

    def test_the_sources_are_dated_results_of_the_repository(self):
        for _, path in step_times.SERIES:
            self.assertRegex(path, r"^dev/results/\d{4}-\d\d-\d\d-")
            self.assertTrue(re.search(r"Commit [0-9a-f]{7}", (ROOT / path).parent.joinpath("README.md").read_text()))
