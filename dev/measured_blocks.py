"""What dev/measured.py writes into the documents: a function of the measured rows (Rows) for each block."""
import re
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.comparison.tables import TABLES  # noqa: E402

from measure import PUBLISHED  # noqa: E402
from measured_pictures import (Missing, cost_words, draw_cost, draw_trainers, of_peers, peers_of,  # noqa: E402
                               rate, trainers_words)

LABELS = {"bf16": "BF16", "fp8": "FP8", "int8-forward": "INT8 in the forward pass",
          "tensorwise-1F1L": "tensorwise, first and last layer BF16",
          "bf16-capacity": "BF16, capacity 1.25", "blockwise-capacity": "blockwise, capacity 1.25",
          "delayed-head": "delayed, head in FP8", "delayed-head-attention": "delayed, head and attention in FP8"}
PLACES = {"h200-x1": "one H200", "h200-x4": "four H200", "h100-x4": "four H100"}
PICTURES = {"docs/trainers.svg": (draw_trainers, trainers_words), "docs/cost.svg": (draw_cost, cost_words)}


def label(name):
    name = re.sub(r"^\d+", lambda length: f"{int(length[0]):,}", name.removeprefix("zero-"))
    return LABELS.get(name, name.replace("-fp8-attention", ", attention in FP8"))


def lines(headings, rows):
    """A table of Markdown, with a line end before and after it."""
    rows = [headings, ["---"] * len(headings), *rows]
    return "\n".join(["", *(f"| {' | '.join(map(str, cells))} |" for cells in rows), ""])


def seconds(row, which="median"):
    return f"{float(row[f's_per_it_{which}']):#.4g}"


def link(rows, machine, table, words=None):
    folder = rows.folder(machine, table)
    return f"[{words or folder}]({rows.up}dev/results/{folder}/README.md)"


def source(rows, machine, table):
    """The line below a table: folder, commit and command."""
    commit = rows.row(machine, table, rows.names(machine, table)[0])["commit"]
    gpus = machine.split("x")[1]
    ranks = "" if gpus == str(TABLES[table].gpus) else f" with `RANKS={gpus}`"
    return f"\nFrom {link(rows, machine, table)}, commit {commit[:7]}; the table is `--table {table}`{ranks}.\n"


def steps(machine, table, first="recipe", names=None):
    """A block with these rows of a table of scripts/compare, or all."""
    def text(rows):
        found = [(name, rows.row(machine, table, name)) for name in names or TABLES[table].rows]
        base = {row["seq_length"]: row for _, row in reversed(found)}   # the first row of each length
        heading = f"against {label(found[0][0])}" if len(base) == 1 else "against the first of this T"
        columns = [(first, lambda name, row: label(name)),
                   ("s/it (least to most)", lambda _, row: f"{seconds(row)} ({seconds(row, 'min')} to "
                                                           f"{seconds(row, 'max')})"),
                   ("tokens/s a GPU", lambda _, row: f"{rate(row):,.0f}"),
                   (heading, lambda _, row: f"{rate(row) / rate(base[row['seq_length']]):.2f}"),
                   ("MFU", lambda _, row: percent(row["mfu_bf16_peak"])),
                   ("GiB a GPU", lambda _, row: f"{float(row['memory_gib']):.1f}"),
                   ("J/token", lambda _, row: row["joules_per_token"] and f"{float(row['joules_per_token']):#.3g}"),
                   ("prediction of `plan`", lambda _, row: row["predicted_s_per_it"] and
                    f"{float(row['predicted_s_per_it']) / float(row['s_per_it_median']) - 1:+.1%}".replace("%", " %"))]
        return lines([heading for heading, _ in columns],
                     [[cell(*pair) for _, cell in columns] for pair in found]) + source(rows, machine, table)
    return text


def eight(rows):
    """All that eight GPUs are measured with."""
    return "\n".join(f"\n{TABLES[table].about.format(gpus='eight H200')}:\n"
                     f"{steps('h200-x8', table, names=names)(rows)}"
                     for card, gpus, table, names in PUBLISHED if (card, gpus) == ("h200", 8))


def percent(text):
    return f"{float(text):.1%}".replace("%", " %") if text else ""


# ---- docs/measured.md ----

# What, machine, table, and its rows in words; the first one's rate is what the others are relative to.
SUMMARY = [
    ("Llama-3-8B, T 8192", "h200-x1", "llama3-8b", ("bf16", "delayed", "tensorwise", "blockwise",
                                                    "delayed-head-attention")),
    ("GPT-2 124M", "h200-x1", "gpt2-recipes", ("bf16", "delayed", "delayed-head")),
    ("GPT-2 1558M", "h200-x1", "gpt2-1558M", ("bf16", "delayed")),
    ("llama3-small", "h200-x1", "llama3-small", ("bf16", "delayed")),
    ("Llama-3.1-8B's shape, fine-tuning", "h200-x1", "finetune", ("bf16", "fp8")),
    ("Llama-3-8B, T 8192", "h200-x4", "llama3-8b", ("bf16", "delayed", "delayed-head-attention")),
    ("Llama-3-8B, long sequences", "h200-x4", "context", ("131072", "131072-fp8-attention", "262144")),
    ("Llama-3.1-70B", "h200-x4", "70b", ("delayed", "delayed-head-attention")),
    ("Qwen3-30B-A3B, T 4096", "h200-x4", "experts", ("bf16-capacity", "blockwise-capacity")),
    ("Llama-3-8B, T 8192", "h100-x4", "8b-h100", ("bf16", "delayed", "delayed-head-attention")),
]


def summary(rows):
    def words(machine, table, names):
        found = [(label(name), rate(rows.row(machine, table, name))) for name in names]
        return "; ".join(f"{name} {value:,.0f}" + (f" ({value / found[0][1]:.2f} times)" if i else "")
                         for i, (name, value) in enumerate(found))
    return lines(["what", "on", "tokens/s a GPU"], [
        [link(rows, machine, table, what), PLACES[machine], words(machine, table, names)]
        for what, machine, table, names in SUMMARY])


# Subject, published rows, and ours beside them: machine, table, row. Rows of ours that are not measured are left out.
BESIDE = [
    ("8B, T 8192", dict(model="-8B", seq_length=8192), [
        (machine, table, name) for machine, table in (("h100-x4", "8b-h100"), ("h200-x4", "llama3-8b"),
                                                      ("h200-x1", "llama3-8b"))
        for name in ("bf16", "tensorwise", "delayed", "delayed-head-attention")]),
    ("8B, T 131,072", dict(model="-8B", seq_length=131072), [
        (machine, table, f"131072{suffix}") for machine, table in (("h100-x4", "8b-h100"), ("h200-x4", "context"))
        for suffix in ("", "-fp8-attention")]),
    ("8B, T 262,144", dict(model="-8B", seq_length=262144), [
        ("h200-x4", "context", f"262144{suffix}") for suffix in ("", "-fp8-attention")]),
    ("70B", dict(model="-70B"), [("h200-x4", "70b", name) for name in ("delayed", "delayed-head-attention")]),
    ("Qwen3-30B-A3B, T 4096", dict(model="Qwen3-30B-A3B"), [("h200-x4", "experts", f"{name}-capacity")
                                                            for name in ("bf16", "blockwise")]),
    ("GPT-2 124M", dict(model="124M"), [("h200-x1", "gpt2-recipes", name)
                                        for name in ("bf16", "delayed", "delayed-head")]),
    ("GPT-2 1558M", dict(model="1558M"), [("h200-x1", "gpt2-1558M", name) for name in ("bf16", "delayed")]),
]


def beside(rows):
    table = []
    for subject, chosen, ours in BESIDE:
        for machine, its, name in ours:
            try:
                row = rows.row(machine, its, name)
            except Missing:
                continue
            recipe = re.sub(r"^[\d,]*\d(, )?", "delayed, ", label(name)).removesuffix(", ")
            table.append([subject, "**llm.fp8**", PLACES[machine], recipe, f"{rate(row):,.0f}",
                          link(rows, machine, its)])
        for row in of_peers(rows.published, **chosen):
            where = f"[{row['source']}]({row['url']})" if row["url"] else row["source"]
            table.append([subject, row["trainer"], f"{row['gpus']} {row['card']}".strip(), row["precision"],
                          f"{rate(row):,.0f}", f"{where}, {row['date']}"])
    return lines(["", "trainer", "GPUs", "precision", "tokens/s a GPU", "source"], table)


def peers(rows):
    ours, others = peers_of(rows)
    table = []
    for name in dict.fromkeys([*ours, *(name for found in others.values() for name in found)]):
        work, whole = ours.get(name, (0, 0))
        cells = [f"{found[name]:.1f}" + (f" ({found[name] / work:.2f}, {found[name] / whole:.2f})" if work else "")
                 if name in found else "" for found in others.values()]
        table.append([label(name), *(f"{ms:.1f}" if ms else "" for ms in (work, whole)), *cells])
    versions = rows.row("h200-x1", "peers", rows.names("h200-x1", "peers")[0])
    headings = ["ms per micro-batch", "llm.fp8, forward and backward", "llm.fp8, with AdamW's part", *others]
    return lines(headings, table) + (
        f"\nFrom {link(rows, 'h200-x1', 'peers')}; PyTorch {versions['torch']}, attention of cuDNN "
        f"{versions['cudnn']}. The peers ran no optimizer.\nIn parentheses: how many times as fast as they llm.fp8 is "
        "in the same work, and with its optimizer.\n")


# ---- docs/guides.md ----

def against(rows, machine, table, base, *names):
    """Texts of the rows' rates relative to that of `base`."""
    return [f"{rate(rows.row(machine, table, name)) / rate(rows.row(machine, table, base)):.2f}" for name in names]


def guide_finetune(rows):
    ours = [seconds(rows.row("h200-x1", "finetune", name)) for name in ("bf16", "fp8")]
    return lines(["", "BF16, s/it", "FP8, s/it", "FP8 against BF16"], [
        ["the guides, as found", "8.15", "16.29", "0.50"],
        ["the guides, expected after their corrections (a projection)", "8.15", "5.4", "1.51"],
        [f"here, {link(rows, 'h200-x1', 'finetune', 'one H200')}", *ours,
         *against(rows, "h200-x1", "finetune", "bf16", "fp8")]])


def guide_megatron(rows):
    names = ("bf16", "delayed", "tensorwise", "tensorwise-1F1L", "blockwise")
    table = [["the guide, s/it", "12.9", "9.5", "9.5", "9.5", "12.4"],
             ["against BF16", "1", "1.36", "1.36", "1.36", "1.04"]]
    for machine in ("h200-x4", "h200-x1"):
        table += [[f"here, {link(rows, machine, 'llama3-8b', PLACES[machine])}, s/it",
                   *(seconds(rows.row(machine, "llama3-8b", name)) for name in names)],
                  ["against BF16", "1", *against(rows, machine, "llama3-8b", "bf16", *names[1:])]]
    return lines(["", *map(label, names)], table)


def guide_formats(rows):
    def ours(name, words):
        row = rows.row("h200-x1", "formats", name)
        forward, backward = (float(row[f"{part}_seconds_median"]) * 1000 for part in ("forward", "backward"))
        bf16 = rows.row("h200-x1", "formats", "bf16")
        whole = sum(float(bf16[f"{part}_seconds_median"]) * 1000 for part in ("forward", "backward"))
        return [f"here, {link(rows, 'h200-x1', 'formats', 'one H200')}: {words}", f"{forward:.2f}", f"{backward:.2f}",
                f"{forward + backward:.2f}", f"{whole / (forward + backward):.2f}"]
    return lines(["", "forward, ms", "backward, ms", "together, ms", "against BF16"], [
        ["the guide, H100: BF16", "4.40", "9.51", "13.91", "1"],
        ["the guide: FP8, all E4M3", "4.01", "7.60", "11.61", "1.20"],
        ["the guide: FP8, hybrid", "4.00", "7.61", "11.61", "1.20"],
        ours("bf16", "BF16"), ours("fp8-e4m3", "delayed, all E4M3"), ours("fp8-hybrid", "delayed, hybrid")])


def guide_gpt2(rows):
    def ours(name, words, batch, accumulation):
        row = rows.row("h200-x1", "gpt2", name)
        hours = 2 * 9.04e9 / rate(row) / 3600
        return [words, batch, accumulation, seconds(row), f"{rate(row) / 1024:.1f}",
                f"{float(row['memory_gib']):.1f} GiB", f"{hours:.1f} h"]
    here = f"here, {link(rows, 'h200-x1', 'gpt2', 'one H200')}: "
    headings = "", "micro-batch", "accumulation steps", "s per step", "samples/s", "memory", "2 epochs of OpenWebText"
    return lines(headings, [
        ["the guide (expected, not measured): BF16", 32, "", "3.5", "9.1", "45 GB", ""],
        ["BF16", 64, 8, "2.8 to 3.2", "22.9", "68 GB", "2.8 h"],
        ["FP8", 128, 4, "1.5 to 1.7", "85.3", "85 GB", "1.5 h"],
        ours("bf16-32", here + "BF16", 32, 16), ours("bf16-64", "BF16", 64, 8), ours("fp8-64", "delayed", 64, 8),
        ours("fp8-128", "delayed", 128, 4)])


def guide_modern(rows):
    names = ("rmsnorm", "rope", "gqa", "qk-norm", "swiglu", "all")
    times = {name: seconds(rows.row("h200-x1", "modern-gpt2", f"{name}-bf16")) for name in ("gpt2", *names)}
    gains = sorted(against(rows, "h200-x1", "modern-gpt2", f"{name}-bf16", f"{name}-fp8")[0] for name in times)
    return (f"Against a step of GPT-2 124M in BF16, {times['gpt2']} s, they take {times['rmsnorm']}, {times['rope']}, "
            f"{times['gqa']}\n  (4 key heads), {times['qk-norm']}, {times['swiglu']} and together {times['all']} s; "
            f"FP8 makes each {gains[0]} to {gains[-1]} times as fast\n"
            f"  ({link(rows, 'h200-x1', 'modern-gpt2', 'measured')})")


def range_of(machine, table):
    """A block with the least and the greatest speed of the FP8 recipes against BF16."""
    def text(rows):
        found = sorted(against(rows, machine, table, "bf16", "delayed", "tensorwise", "tensorwise-1F1L", "blockwise"))
        return f"{found[0]} to {found[-1]} times as fast"
    return text


# ---- README.md, scripts/README.md ----

def pictures(rows):
    shown = [f"![{words(rows)}]({path})" for path, (_, words) in PICTURES.items()]
    commit = rows.row("h200-x4", "llama3-8b", "bf16")["commit"][:7]
    where = ",\n".join(link(rows, machine, table, PLACES[machine]) for machine, table in (
        ("h100-x4", "8b-h100"), ("h200-x4", "llama3-8b"), ("h200-x1", "llama3-8b")))
    return "\n" + "\n\n".join([*shown, f"*Commit {commit}, measured on {where};\n[other trainers' results and their "
                               "sources](docs/measured.md#beside-other-trainers).*"]) + "\n"


# The rows of recipes. The others have predictions of plan, which tests/python/test_recipes.py checks.
RECIPE_ROWS = {
    **{f"train_llama3_8b_h200_{script}": ("h200-x4", "llama3-8b", name) for script, name in (
        ("bf16", "bf16"), ("fp8", "delayed"), ("fp8_cs", "tensorwise"), ("fp8_cs_1F1L", "tensorwise-1F1L"),
        ("fp8_blockwise", "blockwise"))},
    "train_llama31_70b_h200x4_fp8": ("h200-x4", "70b", "delayed"),
    **{f"train_llama_1gpu_{script}_slimpajama": ("h200-x1", "llama3-small", name) for script, name in (
        ("bf16", "bf16"), ("fp8", "delayed"))},
    **{f"train_gpt2_124M_{script}": ("h200-x1", "gpt2-recipes", name) for script, name in (
        ("bf16", "bf16"), ("fp8", "delayed"))},
}


def recipes(rows):
    """The table of recipes as it is, with the measured seconds and the hours that follow."""
    def line(match):
        cells = match[0].split(" | ")
        if match[1] in RECIPE_ROWS:
            took = seconds(rows.row(*RECIPE_ROWS[match[1]]))
            hours = float(took) * int(cells[4].replace(",", "")) / 3600
            cells[5:] = [took, f"{hours:.1f} |"]
        return " | ".join(cells)
    table = re.search(r"(?ms)^\| script .*", rows.text)[0]
    return ("\nSeconds per step in *italics* are predictions (`scripts/recipes/RECIPE.sh --dry-run`). The others are "
            f"measured on\n{link(rows, 'h200-x1', 'llama3-small', 'one H200')}, and those of Llama-3\non "
            f"{link(rows, 'h200-x4', 'llama3-8b', 'four')}, the 8B with half the tokens per step,\nso that each GPU "
            "has as much work as one of eight.\n\n" + re.sub(r"(?m)^\| \[(\w+)\].*", line, table))


BLOCKS = {
    "pictures": pictures, "speed": range_of("h200-x1", "llama3-8b"), "recipes": recipes,
    "summary": summary, "8b-1": steps("h200-x1", "llama3-8b"), "gpt2": steps("h200-x1", "gpt2-recipes"),
    "small": steps("h200-x1", "llama3-small"), "gpt2-1558M": steps("h200-x1", "gpt2-1558M"),
    "long": steps("h200-x1", "long", "T"), "8b-4": steps("h200-x4", "llama3-8b"),
    "zero": steps("h200-x4", "zero", "`--zero`"), "context": steps("h200-x4", "context", "T"),
    "eight": eight, "70b": steps("h200-x4", "70b"), "experts": steps("h200-x4", "experts"),
    "muon": steps("h200-x4", "muon"), "8b-h100": steps("h100-x4", "8b-h100"), "muon-h100": steps("h100-x4", "muon"),
    "h100-gpt2": steps("h100-x1", "gpt2-recipes"), "h100-small": steps("h100-x1", "llama3-small"),
    "beside": beside, "peers": peers,
    "guide-finetune": guide_finetune, "guide-megatron": guide_megatron, "guide-formats": guide_formats,
    "guide-gpt2": guide_gpt2, "guide-modern": guide_modern,
    "guide-small": range_of("h200-x1", "llama3-small"),
}
