"""The comparison as a web page in the look of scripts/report: the tables, speed as bars, curves of the runs."""
import re

from ..report.drawing import bars
from ..report.markup import HERE, page, table, text
from ..report.reduce import gaps, run_data
from ..report.stream import StreamedLog


def inline(line):
    """HTML of a line: **bold** is all that a comparison uses."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text(line.replace("\\|", "|")))


def cells(line):
    return [part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def html_of(markdown):
    """HTML of what report.markdown writes: headings, tables, items, blocks of code, lines."""
    out, lines = [], markdown.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("```"):
            code = []
            while lines and not lines[0].startswith("```"):
                code.append(lines.pop(0))
            lines[:1] = []
            out.append(f"<pre tabindex=0>{text(chr(10).join(code))}</pre>\n")
        elif line.startswith("|"):
            rows = []
            while lines and lines[0].startswith("|"):
                rows.append(cells(lines.pop(0)))
            out.append(table(cells(line), rows[1:]))   # without the line of dashes
        elif line.startswith("#"):
            level = min(2, len(line) - len(line.lstrip("#")))
            out.append(f"<h{level}>{inline(line.lstrip('# '))}</h{level}>\n")
        elif line.startswith("* "):
            out.append(f"<li>{inline(line[2:])}</li>\n")
        elif line.strip():
            out.append(f"<p>{inline(line.strip())}</p>\n")
    return re.sub(r"((?:<li>.*</li>\n)+)", r"<ul>\n\1</ul>\n", "".join(out))


def curves_of(comparison):
    """(data of each log, gap to the first configuration): the gap is None if they cannot be compared, and synthetic
    data has no losses."""
    found = []
    for configuration in comparison.configurations:
        for run in configuration.runs:
            streamed = StreamedLog(run.path, configuration.name, skip_damaged=True)
            streamed.poll()
            found.append(run_data(streamed))
    comparable = all(row.is_base or row.verdict.comparable for row in comparison.rows)
    gap = gaps(found) if comparable and not comparison.synthetic else None
    for data in found:
        del data["means"]
        if comparison.synthetic:
            data["curves"].pop("loss", None)
            data["valid"] = {name: [] for name in data["valid"]}
    return found, gap


def comparison_page(comparison, heading, markdown):
    title, _, rest = html_of(markdown).partition("</h1>\n")
    speed = bars("Speed, tokens/s of a GPU", [(row.name, row.tokens_per_gpu.median) for row in comparison.rows],
                 lambda value: f"{value:,.0f} tokens/s/GPU", whole=0)
    runs, gap = curves_of(comparison)
    body = (f"<header>{title}</h1></header>\n<main>\n<h2>Speed</h2>\n{speed}{rest}<div id=panels><noscript>The curves "
            "need JavaScript; the tables do not.</noscript></div>\n</main>\n")
    return page(heading, body, (HERE / "page.js").read_text(), {"runs": runs, "gap": gap})
