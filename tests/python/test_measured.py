"""dev/measured.py: the documents and pictures show the measured rows; whatever differs from its rows is found."""
import csv
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

from llmfp8.comparison import tables
from tests.support.folder import FolderTest

ROOT = Path(__file__).resolve().parents[2]
with mock.patch.object(sys, "path", [str(ROOT / "dev"), *sys.path]):
    import measure
    import measured
    import measured_blocks
    import measured_pictures
SVG = "{http://www.w3.org/2000/svg}"
MACHINES = {"h200-x1": ("NVIDIA H200", 1), "h200-x4": ("NVIDIA H200", 4), "h200-x8": ("NVIDIA H200", 8),
            "h100-x4": ("NVIDIA H100 80GB HBM3", 4), "h100-x1": ("NVIDIA H100 80GB HBM3", 1)}
PEER = "trainer,version,precision,ms_per_micro_batch,gpu,cudnn,torch"
NOT_YET = "\nNot measured yet.\n"
TREE, OTHER_TREE = "a" * 40, "b" * 40


def invented(machine, tree=TREE, at=1000, factor=1.0):
    """A row of rows.csv for each that is published for a machine, with numbers that differ from row to row."""
    gpu, gpus = MACHINES[machine]
    wanted = measure.published(measure.Machine(gpu, gpus, "580", "", tree))
    for number, (table, name) in enumerate(wanted, 1):
        words = tables.TABLES[table].rows[name]
        length = words[words.index("--seq-length") + 1] if "--seq-length" in words else "8192"
        s_per_it = (1 + number / 7) * factor
        yield {**dict.fromkeys(measure.COLUMNS, ""), "table": table, "row": name, "commit": f"{tree[0] * 12}",
               "llmc_tree": tree, "gpu": gpu, "gpus": gpus, "params": 1e8 * number, "seq_length": length,
               "s_per_it_median": s_per_it, "s_per_it_min": s_per_it - 0.01, "s_per_it_max": s_per_it + 0.01,
               "tokens_per_s_per_gpu": 131072 / s_per_it / gpus, "mfu_bf16_peak": 0.5, "memory_gib": 70 + number,
               "joules_per_token": 0.01, "predicted_s_per_it": s_per_it * 1.01, "forward_seconds_median": 0.02,
               "backward_seconds_median": 0.07 + number / 1000, "unix_time": at}


class MeasuredTest(FolderTest):
    def setUp(self):
        super().setUp()
        for name in (*measured.DOCUMENTS, "dev/peers/published.csv"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name in measured.DOCUMENTS:   # as before the first measurement
            self.file(name, measured.BLOCK.sub(
                lambda match: f"<!-- measured: {match[1]} -->{match[3] if match[1] == 'recipes' else ''}{NOT_YET}"
                "<!-- end -->", self.text(name)))

    def rows(self, folder, rows):
        path = self.folder / "dev" / "results" / folder / "rows.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, measure.COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        return path

    def measure_all(self, **more):
        for machine in MACHINES:
            self.rows(f"2026-12-01-{machine}", list(invented(machine, **more)))
        self.file("dev/results/2026-12-01-h200-x1/peers.csv",
                  f"{PEER}\nTransformer Engine,2.20,delayed,515.6,NVIDIA H200,9.19,2.11\n"
                  f"{PEER}\ntorchao,0.17,rowwise,700,NVIDIA H200,9.19,2.11\n")

    def documents(self):
        return measured.Documents(self.folder)

    def text(self, name):
        return (self.folder / name).read_text()

    def block(self, name):
        return next(match for document in measured.DOCUMENTS
                    for match in measured.BLOCK.finditer(self.text(document)) if match[1] == name)

    def change(self, name, old, new):
        text = self.text(name)
        self.assertIn(old, text)
        (self.folder / name).write_text(text.replace(old, new, 1))

    # ---- the repository ----

    def test_the_documents_show_the_rows(self):
        self.assertEqual(list(measured.Documents(ROOT).differences()), [])

    def test_every_published_row_is_in_a_block(self):
        """What is measured is shown."""
        self.measure_all()
        asked = set()
        row = measured.Rows.row

        def ask(rows, *key):
            asked.add(key)
            return row(rows, *key)
        with mock.patch.object(measured.Rows, "row", ask):
            self.documents()
        for card, gpus, table, names in measure.PUBLISHED:
            for name in names or tables.TABLES[table].rows:
                self.assertIn((f"{card}-x{gpus}", table, name), asked)

    # ---- invented rows ----

    def test_one_run_writes_every_block_and_picture(self):
        self.measure_all()
        documents = self.documents()
        self.assertEqual(documents.kept, [])
        self.assertGreater(len(list(documents.differences())), 4)
        documents.write()
        self.assertEqual(list(self.documents().differences()), [])
        readme, measured_md = self.text("README.md"), self.text("docs/measured.md")
        for picture in measured_blocks.PICTURES:
            self.assertRegex(readme, rf"!\[[^]]+\]\({picture}\)")
        self.assertLessEqual(len(readme.split("\n")), 120)   # as tests/python/test_documents.py wants it
        self.assertEqual([line for line in readme.split("\n") if len(line) > 120 and line[0] not in "|!"], [])
        self.assertNotIn("Not measured yet", measured_md)
        first = next(invented("h200-x4"))
        self.assertIn(f"| BF16 | {first['s_per_it_median']:#.4g} (", measured_md)
        self.assertIn("prediction of `plan` |\n", measured_md)
        self.assertIn("| +1.0 % |", measured_md)
        self.assertIn("[2026-12-01-h200-x4](../dev/results/2026-12-01-h200-x4/README.md), commit aaaaaaa; the table is "
                      "`--table llama3-8b` with `RANKS=4`.", measured_md)
        self.assertIn(f" | Llama-3-8B, T 8192: BF16 | 8 | 1,048,576 | 1,000 | {first['s_per_it_median']:.4g} | 0.3 |",
                      self.text("scripts/README.md"))
        row = next(row for row in invented("h200-x1") if (row["table"], row["row"]) == ("llama3-8b", "delayed"))
        work = 1000 * (row["forward_seconds_median"] + row["backward_seconds_median"])
        whole = 8192e3 / row["tokens_per_s_per_gpu"]
        self.assertIn("llm.fp8, with AdamW's part | Transformer Engine 2.20 | torchao 0.17 |", measured_md)
        self.assertIn(f"| delayed | {work:.1f} | {whole:.1f} | 515.6 ({515.6 / work:.2f}, {515.6 / whole:.2f}) |  |",
                      measured_md)
        self.assertIn("| rowwise |  |  |  | 700.0 |", measured_md)
        self.assertIn("PyTorch 2.11, attention of cuDNN 9.19", measured_md)
        # Links of a document lead from its folder.
        for name in measured.DOCUMENTS:
            for link in re.findall(r"\]\(([^)#]*2026-12-01[^)#]*)\)", self.text(name)):
                self.assertTrue((self.folder / name).parent.joinpath(link).parent.exists(), link)

    def test_a_number_that_differs_is_found(self):
        self.measure_all()
        self.documents().write()
        number = f"{next(invented('h200-x1'))['s_per_it_median']:#.4g}"
        self.change("docs/measured.md", f"| BF16 | {number} (", "| BF16 | 9.999 (")
        self.change("README.md", "times as fast<!-- end -->", "times faster<!-- end -->")
        found = list(self.documents().differences())
        self.assertEqual(found, ["README.md: speed is not what the rows say: run dev/measured.py",
                                 "docs/measured.md: 8b-1 is not what the rows say: run dev/measured.py"])
        self.documents().write()
        self.change("docs/cost.svg", "circle", "rect")
        self.assertEqual(list(self.documents().differences()),
                         ["docs/cost.svg: the picture is not what the rows say: run dev/measured.py"])
        # And so is a row that was changed.
        self.documents().write()
        rows = list(invented("h100-x4"))
        rows[0]["s_per_it_median"] *= 1.01
        self.rows("2026-12-01-h100-x4", rows)
        self.assertEqual(list(self.documents().differences()),
                         ["docs/measured.md: muon-h100 is not what the rows say: run dev/measured.py"])

    def test_rows_of_one_version_are_used(self):
        self.measure_all()
        self.documents().write()
        # One machine measured a later version: its blocks change, those that need others keep the text of the first.
        self.rows("2026-12-02-h200-x1", list(invented("h200-x1", OTHER_TREE, 2000, 1.1)))
        documents = self.documents()
        self.assertIn("8b-4: h200-x4 llama3-8b bf16 is not measured", documents.kept)
        documents.write()
        self.assertEqual(list(self.documents().differences()), [])
        self.assertEqual((self.block("8b-1")[2], self.block("8b-4")[2]),
                         (" of 2026-12-02-h200-x1", " of 2026-12-01-h200-x4"))
        self.assertEqual(self.block("guide-megatron")[2], " of 2026-12-01-h200-x1 of 2026-12-01-h200-x4")
        self.assertIn("commit bbbbbbb", self.block("8b-1")[3])
        # A block that leaves out what is not measured loses no row that it had.
        self.assertIn("beside: h100-x4 8b-h100 bf16 is not measured", documents.kept)
        self.assertIn(" of 2026-12-01-h100-x4", self.block("beside")[2])
        # The text that was kept is still checked against its rows.
        self.change("docs/guides.md", self.block("guide-megatron")[3], self.block("guide-megatron")[3] + "\n")
        self.assertIn("guide-megatron", "".join(self.documents().differences()))
        self.rows("2026-12-03-h200-x1", [*invented("h200-x1"), *invented("h200-x1", OTHER_TREE)])
        with self.assertRaisesRegex(measured.InputError, "rows of 2 versions of llmc/"):
            self.documents()
        shutil.rmtree(self.folder / "dev" / "results")
        self.measure_all()
        self.change("dev/results/2026-12-01-h200-x1/peers.csv", "NVIDIA H200", "NVIDIA H100")
        with self.assertRaisesRegex(measured.InputError, "peers.csv: measured on NVIDIA H100, rows.csv on NVIDIA H200"):
            self.documents()

    def test_a_text_without_rows_says_of_which_commit_it_is(self):
        rows = [row for row in invented("h200-x4") if row["table"] == "zero"]
        rows[1]["failed"] = "exit code 6"
        self.rows("2026-12-01-h200-x4", rows)
        self.assertIn("zero: h200-x4 zero zero-2 is not measured", self.documents().kept)
        self.documents().write()
        self.assertEqual(self.block("zero")[3], NOT_YET)
        self.change("docs/measured.md", self.block("zero")[0], "<!-- measured: zero -->\nFast.\n<!-- end -->")
        with self.assertRaisesRegex(measured.InputError, "zero: h200-x4 zero zero-2 is not measured, and the text "):
            self.documents()

    def test_blocks_that_are_not_whole_are_named(self):
        for old, new, said in (("<!-- measured: speed -->", "<!-- measured: sped -->", "README.md: sped: no block"),
                               ("<!-- measured: speed -->", "", "blocks of the documents"),
                               ("<!-- end --> as in", " as in", "README.md: a block without its end")):
            text = self.text("README.md")
            self.change("README.md", old, new)
            with self.assertRaisesRegex(measured.InputError, said):
                self.documents()
            self.file("README.md", text)

    # ---- pictures ----

    def pictures(self):
        self.measure_all()
        self.documents().write()
        return {name: ElementTree.fromstring(self.text(name)) for name in measured_blocks.PICTURES}

    def test_texts_stay_inside_the_pictures(self):
        for name, root in self.pictures().items():
            width, height = float(root.get("width")), float(root.get("height"))
            for text in root.iter(SVG + "text"):   # 0.56 of the size per letter is a wide font
                long, x = 0.56 * 13 * len(text.text), float(text.get("x"))
                left = {"end": x - long, "middle": x - long / 2}.get(text.get("text-anchor"), x)
                self.assertTrue(0 <= left and left + long <= width, f"{name}: {text.text}")
                self.assertLess(float(text.get("y")), height)

    def test_bars_are_as_long_as_their_numbers(self):
        root = self.pictures()["docs/trainers.svg"]
        bars = [float(rect.get("width")) for rect in root.iter(SVG + "rect") if rect.get("class") != "back"]
        values = [float(text.text.replace(",", "")) for text in root.iter(SVG + "text")
                  if re.fullmatch(r"[\d,]+", text.text)]
        self.assertEqual(len(bars), len(values))
        for bar, value in zip(bars, values):
            self.assertAlmostEqual(bar / max(bars), value / max(values), delta=0.002)
        labels = [text.text for text in root.iter(SVG + "text")]
        for label in ("llm.fp8, 4 H100: BF16", "Megatron-Bridge, 8 H100: FP8 tensorwise",
                      "torchtitan, 32 H200: FP8 tensorwise", "Transformer Engine 2.20: FP8 delayed"):
            self.assertIn(label, labels)

    def test_points_are_where_their_numbers_are(self):
        root = self.pictures()["docs/cost.svg"]
        rows = measured.Rows(measured.newest(self.folder), measure.read_csv(self.folder / "dev/peers/published.csv"))
        lines = [series for _, _, group in measured_pictures.costs(rows) for series in group]
        points = [(x, y) for *_, series in lines for x, y in series]
        drawn = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(SVG + "circle")]
        self.assertEqual(len(points), len(drawn))
        half = sum(len(series[3]) for series in lines[:3])
        for part in (slice(0, half), slice(half, None)):   # larger numbers are further to the right, and higher
            for axis, sign in ((0, 1), (1, -1)):
                order = sorted(range(len(points[part])), key=lambda i: points[part][i][axis])
                places = [sign * drawn[part][i][axis] for i in order]
                self.assertEqual(places, sorted(places))
