"""The pictures of dev/measured.py: their data from the measured and published rows, their words, and SVG by plain text.

Every picture has its own background and the colours of light and dark mode, so that it does not depend on the page."""
import math
from html import escape

COLORS = {"light": ("#ffffff", "#1f2328", "#d1d9e0", ["#1a7f6b", "#8a6d9b", "#a8702a"]),   # back, text, lines, marks
          "dark": ("#0d1117", "#e6edf3", "#3d444d", ["#2fa58c", "#a98bbb", "#cc9549"])}
WIDTH, LABELS, VALUES, BAR = 780, 370, 90, 20
OURS, PEERS, FP8_ATTENTION = 0, 1, 2   # colours
# Bars of our own: rows with their labels, and cards with the machine and table that they are of.
RECIPES_SHOWN = (("bf16", "BF16"), ("tensorwise", "FP8 tensorwise"), ("delayed", "FP8 delayed"),
                 ("delayed-head-attention", "FP8 delayed + head + attention"))
MACHINES = (("H100", "h100-x4", "8b-h100"), ("H200", "h200-x4", "llama3-8b"))


class Missing(Exception):
    """A row that is not measured."""


def rate(row):
    return float(row["tokens_per_s_per_gpu"])


def peer_label(row):
    return f"{row['trainer']}, {row['gpus']} {row['card'].split(' ')[0]}: {row['precision']}"


def of_peers(published, model, **columns):
    return [row for row in published if model in row["model"] and row["tokens_per_s_per_gpu"]
            and all(row[key] == str(value) for key, value in columns.items())]


# ---- the 8B beside other trainers: bars ----

def trainers(rows):
    """[(title, [(colour, label, tokens/s a GPU)])]; peers that were measured with us only where they are there."""
    groups = []
    for card, machine, table in MACHINES:
        mine = [(OURS, f"llm.fp8, 4 {card}: {label}", rate(rows.row(machine, table, name)))
                for name, label in RECIPES_SHOWN]
        peers = [(PEERS, peer_label(row), rate(row)) for row in of_peers(rows.published, "-8B", seq_length=8192)
                 if row["card"].startswith(card) and int(row["gpus"]) > 1]
        groups.append((f"{card}, beside published results", mine + peers))
    try:
        precisions, measured = peers_of(rows)
    except Missing:
        return groups
    bars = [(OURS, f"llm.fp8: {precision(name)}", 8192e3 / whole) for name, (_, whole) in precisions.items()]
    bars += [(PEERS, f"{trainer}: {precision(name)}", 8192e3 / ms) for trainer, found in measured.items()
             for name, ms in found.items()]
    return [*groups, ("One H200, measured on one host (peers without an optimizer)", bars)]


def precision(name):
    return "BF16" if name == "bf16" else f"FP8 {name}"


def peers_of(rows):
    """({precision: (ms of a micro-batch of ours, ms with its part of the optimizer)}, {trainer: {precision: ms}}).
    Peers have no optimizer: the first of ours is the same work as theirs."""
    ours, others = {}, {}
    for name in rows.names("h200-x1", "peers"):
        row = rows.row("h200-x1", "peers", name)
        others.setdefault(f"{row['trainer']} {row['version']}", {})[row["precision"]] = float(row["ms_per_micro_batch"])
    for name in ("bf16", "delayed", "tensorwise", "blockwise"):
        row = rows.row("h200-x1", "llama3-8b", name)
        work = sum(float(row[f"{part}_seconds_median"]) for part in ("forward", "backward"))
        ours[name] = 1000 * work, 8192e3 / rate(row)
    return ours, others


def trainers_words(rows):
    return "Llama-3-8B, T 8192, tokens/s per GPU. " + " ".join(
        f"{title}: " + "; ".join(f"{label} {value:,.0f}" for _, label, value in bars) + "."
        for title, bars in trainers(rows))


def draw_trainers(rows):
    groups, body, y = trainers(rows), [], 24
    scale = (WIDTH - LABELS - VALUES) / max(value for _, bars in groups for _, _, value in bars)
    body.append(text(20, y + 10, "Llama-3-8B, T 8192: tokens/s per GPU (longer is faster)", "head"))
    y += 34
    for title, bars in groups:
        body.append(text(20, y + 10, title, "head"))
        y += 22
        for colour, label, value in bars:
            width = round(value * scale, 1)
            body += [text(LABELS - 12, y + 14, label, anchor="end"),
                     f'<rect class="m{colour}" x="{LABELS}" y="{y}" width="{width}" height="{BAR - 4}" rx="2"/>',
                     text(round(LABELS + width + 8, 1), y + 13, f"{value:,.0f}")]
            y += BAR
        y += 14
    return svg(y, trainers_words(rows), body)


# ---- how cost grows: lines ----

def costs(rows):
    """[(title, x's unit, [(colour, dashed, label, [(x, tokens/s a GPU)])])]"""
    def context(suffix):
        return [(length, rate(rows.row("h200-x4", "context", f"{length}{suffix}"))) for length in (131072, 262144)]

    def size(machine, table, name):
        row = rows.row(machine, table, name)
        return float(row["params"]), rate(row)
    torchtitan = [(int(row["seq_length"]), rate(row)) for row in of_peers(
        rows.published, "-8B", trainer="torchtitan", gpus=8, precision="FP8 tensorwise")]
    eight = rate(rows.row("h200-x4", "llama3-8b", "delayed"))
    models = [("h200-x1", "gpt2-recipes"), ("h200-x1", "llama3-small"), ("h200-x1", "gpt2-1558M"),
              ("h200-x4", "llama3-8b")]
    return [("Llama-3-8B by T, in tokens", "tokens", [
                (OURS, "", "4 H200, FP8 delayed", [(8192, eight), *context("")]),
                (FP8_ATTENTION, "", "also attention in FP8", context("-fp8-attention")),
                (PEERS, "4 3", "torchtitan, 8 H100, FP8", torchtitan)]),
            ("by parameters", "parameters", [
                (OURS, "", "FP8 delayed", [*(size(*model, "delayed") for model in models),
                                           size("h200-x4", "70b", "delayed")]),
                (PEERS, "", "BF16", [size(*model, "bf16") for model in models])])]


def short(value):
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def cost_words(rows):
    return "Tokens/s per GPU. " + " ".join(
        f"{title}: " + "; ".join(f"{label} " + ", ".join(f"{short(y)} at {short(x)} {unit}" for x, y in points)
                                 for _, _, label, points in series) + "." for title, unit, series in costs(rows))


def draw_cost(rows):
    body, height, width, top = [], 240, WIDTH / 2 - 90, 60
    for number, (title, unit, series) in enumerate(costs(rows)):
        left = 64 + number * WIDTH / 2
        xs, ys = zip(*(point for *_, points in series for point in points))
        low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))

        def at(x, y, xs=xs, left=left, low=low, high=high):
            return (round(left + width * math.log(x / min(xs)) / math.log(max(xs) / min(xs)), 1),
                    round(top + height * (1 - math.log(y / low) / math.log(high / low)), 1))
        body.append(text(left - 44, 28, f"Tokens/s per GPU: {title}", "head"))
        for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
            x, y = at(min(xs), 10 ** power)
            body += [f'<path class="line" d="M{x} {y}h{width}"/>', text(x - 8, y + 5, short(10 ** power), anchor="end")]
        end = -math.inf   # of the label before
        for x in sorted(set(xs)):
            place = at(x, low)[0]
            if place > end + 34:
                body.append(text(place, top + height + 20, f"{x // 1024}k" if unit == "tokens" else short(x), "small",
                                 "middle"))
                end = place
        for i, (colour, dashes, label, points) in enumerate(series):
            path = "M" + "L".join("{} {}".format(*at(*point)) for point in sorted(points))
            body.append(f'<path class="stroke{colour}" stroke-dasharray="{dashes or "none"}" d="{path}"/>')
            body += ['<circle class="m{}" cx="{}" cy="{}" r="4"/>'.format(colour, *at(*point)) for point in points]
            y = top + height + 46 + 20 * i
            body += [f'<rect class="m{colour}" x="{left}" y="{y - 11}" width="14" height="12" rx="2"/>',
                     text(left + 22, y, label)]
    return svg(top + height + 108, cost_words(rows), body)


# ---- SVG ----

def text(x, y, words, style="", anchor="start"):
    return f'<text class="text {style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(height, words, body):
    def rules(back, front, line, marks):
        return f".back{{fill:{back}}}.text{{fill:{front}}}.line{{stroke:{line}}}" + "".join(
            f".m{i}{{fill:{color}}}.stroke{i}{{fill:none;stroke-width:2;stroke:{color}}}"
            for i, color in enumerate(marks))
    style = ("text{font:13px system-ui,sans-serif}text.head{font-weight:600}text.small{font-size:11px}"
             f"{rules(*COLORS['light'])}@media(prefers-color-scheme:dark){{{rules(*COLORS['dark'])}}}")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="words">', f'<desc id="words">{escape(words)}</desc>', f"<style>{style}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>', *body, "</svg>", ""])
