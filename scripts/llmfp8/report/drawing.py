"""Pictures without a script: bars and maps as SVG. Shades differ in lightness, so that they can be read in grey."""
import math

from .markup import text

WIDTH, NAME, NUMBER, ROW = 1080, 330, 170, 22
SHADES = ("#1a3f7a", "#9db7de", "#55789f", "#d8e2f0")


def known(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def percent(part, whole):
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""


def picture(height, label, parts):
    return (f'<svg class=picture role=img aria-label="{text(label)}" viewBox="0 0 {WIDTH} {height}" '
            f'preserveAspectRatio="xMinYMin meet">\n{"".join(parts)}</svg>\n')


def word(x, y, content, anchor="start", fill="#15181d"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text(content)}</text>'


def box(x, y, width, height, fill, title):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{fill}">'
            f"<title>{text(title)}</title></rect>")


def bars(title, rows, form, floors=None, whole=None):
    """A bar for each (name, value), in their order, with its share of `whole` (default: of the sum; 0: no shares).
    `floors`: {name: value} drawn into it as a line."""
    rows = [(name, value) for name, value in rows if known(value)]
    most = max([value for _, value in rows] + list((floors or {}).values()), default=0)
    if most <= 0:
        return ""
    room, parts = WIDTH - NAME - NUMBER, []
    whole = whole if known(whole) else sum(value for _, value in rows)
    for i, (name, value) in enumerate(rows):
        y = i * ROW
        said = ", ".join(filter(None, [form(value), percent(value, whole)]))
        floor = (floors or {}).get(name)
        end = max(value, floor if known(floor) else 0, 0)
        name = str(name)
        parts += [word(NAME - 8, y + 15, name if len(name) < 42 else name[:40] + "\u2026", "end"),
                  box(NAME, y + 3, room * max(value, 0) / most, ROW - 6, SHADES[0], f"{name}: {said}"),
                  word(NAME + room * end / most + 6, y + 15, said)]
        if known(floor):
            x = NAME + room * floor / most
            parts.append(f'<path d="M{x:.1f} {y + 1}V{y + ROW - 1}" stroke="#c2570c" stroke-width="2.5"/>')
    label = f"{title}: " + "; ".join(f"{name} {form(value)}" for name, value in rows[:20])
    return picture(ROW * len(rows) + 4, label, parts)


def strip(title, rows, whole, form, rest="free"):
    """A strip that is `whole` wide, with the (name, value) one after the other; numbers name them in the list below."""
    rows = [(name, value) for name, value in rows if known(value) and value > 0]
    whole = max(whole if known(whole) else 0, sum(value for _, value in rows))
    if whole <= 0 or not rows:
        return ""
    if whole > sum(value for _, value in rows):
        rows = [*rows, (rest, whole - sum(value for _, value in rows))]
    parts, x = [], 0.0
    for i, (name, value) in enumerate(rows):
        width = WIDTH * value / whole
        shade = "#fff" if name == rest else SHADES[i % len(SHADES)]
        parts.append(box(x, 1, width, 40, shade, f"{name}: {form(value)}, {percent(value, whole)}"))
        if width > 16:
            parts.append(word(x + width / 2, 26, str(i + 1), "middle", "#fff" if i % 4 in (0, 2) and name != rest
                              else "#15181d"))
        x += width
    parts.append(f'<rect x="0.5" y="1" width="{WIDTH - 1}" height="40" fill="none" stroke="#15181d"/>')
    listed = "".join(f"<li>{text(name)}: {text(form(value))}, {percent(value, whole)}</li>"
                     for name, value in rows)
    label = f"{title}: " + "; ".join(f"{name} {form(value)}" for name, value in rows)
    return picture(43, label, parts) + f"<ol class=key>{listed}</ol>\n"
