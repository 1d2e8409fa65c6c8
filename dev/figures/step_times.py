#!/usr/bin/env python3
"""Draws docs/step_times.svg: seconds per step of BF16 and of the FP8 recipes, from measured tables in dev/results.

Usage: dev/figures/step_times.py    writes the picture and prints the alt text for the README

A table is the CSV of scripts/compare. Another trainer is a further line of SERIES, whose table needs the columns
configuration, gpu, gpus, s_per_it_median and tokens_per_s_per_gpu: it is drawn only if it was measured on the same GPU
with the same tokens per step. Standard library only.
"""
import csv
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = "docs/step_times.svg"
MODEL = "Llama-3-8B"
# Trainer and its measured table; the first one's BF16 row is what speedups are relative to.
SERIES = [("llm.fp8", "dev/results/2026-11-22-h200-tables/8b.csv")]
# Rows of the picture: configuration in the tables, label.
ROWS = [("bf16", "BF16"), ("delayed", "FP8 delayed"), ("tensorwise", "FP8 tensorwise"),
        ("tensorwise-1F1L", "FP8 tensorwise, first/last layer BF16"), ("blockwise", "FP8 blockwise")]
# The colours of text and bars in light and dark mode. The picture has its own background, so that it does not depend
# on the page.
COLORS = {"light": {"back": "#ffffff", "text": "#1f2328", "bars": ["#1a7f6b", "#8a6d9b", "#a8702a"]},
          "dark": {"back": "#0d1117", "text": "#e6edf3", "bars": ["#2fa58c", "#a98bbb", "#cc9549"]}}
WIDTH, LABELS, VALUES, BAR, GAP = 780, 330, 170, 20, 14


class FigureError(Exception):
    pass


def read_series(series=None, root=ROOT):
    """[(trainer, {configuration: seconds per step})], the GPU and the tokens of a step."""
    found, setting = [], None
    for trainer, path in series or SERIES:
        with open(root / path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        times = {}
        for row in rows:
            seconds, gpus = float(row["s_per_it_median"]), int(row["gpus"])
            tokens = round(seconds * gpus * float(row["tokens_per_s_per_gpu"]))
            here = (row["gpu"], gpus, tokens)
            setting = setting or here
            if here != setting:
                raise FigureError(f"{path}: {row['configuration']}: measured on {gpus} {row['gpu']} with {tokens} "
                                  f"tokens per step, the others on {setting[1]} {setting[0]} with {setting[2]}")
            times[row["configuration"]] = seconds
        found.append((trainer, times))
    return found, setting


def bars_of(found):
    """[(label, [(trainer's number, seconds, speedup over the first trainer's BF16)])] of the measured rows."""
    bf16 = found[0][1]["bf16"]
    rows = [(label, [(number, times[name], bf16 / times[name]) for number, (_, times) in enumerate(found)
                     if name in times]) for name, label in ROWS]
    return [(label, bars) for label, bars in rows if bars]


def title_of(setting):
    gpu, gpus, tokens = setting
    return f"{MODEL} on {gpus} {gpu}: seconds per step of {tokens:,} tokens"


def words_of(seconds, speedup, digits, unit=""):
    return f"{seconds:.{digits}f}{unit}" + (f", {speedup:.2f} x as fast" if speedup != 1 else "")


def alt_text(found, setting):
    """The alt text of the picture."""
    rows = [f"{found[number][0] + ' ' if len(found) > 1 else ''}{label} {words_of(seconds, speedup, 2)}"
            for label, bars in bars_of(found) for number, seconds, speedup in bars]
    return title_of(setting) + " (and speed against BF16): " + "; ".join(rows) + "."


def style():
    def rules(colors):
        bars = "".join(f".b{i}{{fill:{color}}}" for i, color in enumerate(colors["bars"]))
        return f".back{{fill:{colors['back']}}}.text{{fill:{colors['text']}}}{bars}"
    return (f"text{{font:14px system-ui,sans-serif}}.head{{font-weight:600}}{rules(COLORS['light'])}"
            f"@media(prefers-color-scheme:dark){{{rules(COLORS['dark'])}}}")


def draw(found, setting):
    """The picture as the text of an SVG file."""
    rows, longest = bars_of(found), max(seconds for _, times in found for seconds in times.values())
    scale = (WIDTH - LABELS - VALUES) / longest
    body, y = [], 20

    def text(x, y, words, style="text", anchor="start"):
        body.append(f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    text(20, y + 14, title_of(setting) + " (shorter is faster)", "text head")
    y += 36
    if len(found) > 1:
        x = LABELS
        for number, (trainer, _) in enumerate(found):
            body.append(f'<rect class="b{number}" x="{x}" y="{y}" width="14" height="14" rx="2"/>')
            text(x + 20, y + 12, trainer)
            x += 40 + 8 * len(trainer)
        y += 28
    for label, bars in rows:
        text(LABELS - 12, y + (BAR * len(bars)) / 2 + 5, label, anchor="end")
        for number, seconds, speedup in bars:
            width = round(seconds * scale, 1)
            body.append(f'<rect class="b{number}" x="{LABELS}" y="{y}" width="{width}" height="{BAR - 2}" rx="2"/>')
            text(round(LABELS + width + 8, 1), y + 14, words_of(seconds, speedup, 3, " s"))
            y += BAR
        y += GAP
    height = y + 8
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title words">',
        f'<title id="title">{escape(title_of(setting))}</title>',
        f'<desc id="words">{escape(alt_text(found, setting))}</desc>',
        f"<style>{style()}</style>", f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>', *body, "</svg>",
        ""])


def main(arguments):
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found, setting = read_series()
    except (FigureError, OSError, KeyError, ValueError) as error:
        print(f"step_times.py: error: {error!r}" if isinstance(error, KeyError) else f"step_times.py: error: {error}",
              file=sys.stderr)
        return 2
    (ROOT / PICTURE).write_text(draw(found, setting), encoding="utf-8")
    print(alt_text(found, setting))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
