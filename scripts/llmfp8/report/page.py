"""The HTML file of scripts/report: the page of runs, and the CSV of each beside it."""
import json
import math
import re
import statistics

from ..comparison.differences import contents, run_differences
from ..run_export import write_csv
from ..run_log import last_text
from ..support import replacement
from .markup import HERE, page, table, text
from .reduce import gaps, run_data


def option_rows(runs):
    """[(option, value of each run)], a dash where a header does not have it."""
    configs = [{name: value if isinstance(value, str) else json.dumps(value)
                for name, value in run.headers[-1]["config"].items()} for run in runs]
    return [[name, *(config.get(name, "–") for config in configs)]
            for name in dict.fromkeys(name for config in configs for name in config)]


def differing_table(runs, differences):
    """What differs between the runs; "" if nothing does."""
    rows = {}
    for run, found in differences.items():
        for difference in found:
            row = rows.setdefault(difference.key, {other: difference.base for other in runs})
            row[run] = difference.other
    return table(["", *(run.name for run in runs)], [[key, *row.values()] for key, row in rows.items()],
                 "What differs") if rows else ""


def gib(value):
    return f"{value / (1 << 30):.2f} GiB" if isinstance(value, (int, float)) and value > 0 else "unknown"


def ms(value):
    return f"{value:,.1f} ms" if isinstance(value, (int, float)) and value > 0 else "no prediction"


def what_ran(runs):
    """The table at the top: a column per run."""
    def option(name):
        return lambda run: run.headers[-1]["config"].get(name, "")

    def data(run):
        return "synthetic: the losses mean nothing" if run.synthetic else contents(run.headers[-1], "train-data")[1]

    def median(field, form):
        def value(run):
            values = [record.get(field) for record in run.step_list()[len(run.steps) // 10:]]
            values = [value for value in values if value is not None and math.isfinite(value)]
            return form.format(statistics.median(values)) if values else "unknown"
        return value
    rows = [("model", option("model")), ("FP8 recipe", option("fp8-recipe")),
            ("device", lambda run: run.headers[-1]["device"].get("name", "unknown")),
            ("ranks", lambda run: run.headers[-1]["world"]), ("commit", lambda run: run.headers[-1]["commit"]),
            ("parameters", lambda run: f"{run.headers[-1].get('params', 0):,}"),
            ("training loss", lambda run: last_text(run.steps) if run.steps else "no step yet"),
            ("validation loss", lambda run: last_text(run.evals) if run.evals else "none"),
            ("median step time", median("step_seconds", "{:.4g} s")),
            ("median speed", median("tokens_per_second", "{:,.0f} tokens/s")),
            ("median energy", median("joules_per_token", "{:.4g} J/token")),
            ("data", data), ("state", lambda run: run.events[-1]["text"] if run.finished else "running, or killed")]
    return table(["", *(run.name for run in runs)], [[name, *(value(run) for run in runs)] for name, value in rows],
                 "What ran")


def numbers_of(value):
    """The numbers above zero of an object, by name; nothing if it is no object."""
    return {name: entry for name, entry in value.items() if isinstance(entry, (int, float)) and entry > 0} \
        if isinstance(value, dict) else {}


def memory_table(runs):
    """The bytes of the arena by purpose, largest first."""
    purposes = [numbers_of(run.headers[-1].get("purpose_bytes")) for run in runs]
    names = sorted(dict.fromkeys(name for found in purposes for name in found),
                   key=lambda name: -max(found.get(name, 0) for found in purposes))
    rows = [["the arena", *(gib(run.headers[-1].get("arena_bytes")) for run in runs)],
            *([name, *(gib(found.get(name)) if name in found else "" for found in purposes)] for name in names)]
    return table(["purpose", *(run.name for run in runs)], rows, "Memory by purpose") if names else ""


def plan_table(runs):
    """Predicted against measured, and the parts of the prediction; "" if no log has it."""
    rows = []
    for run in runs:
        for plan in run.plans[-1:]:
            for what, before, after, form in (("step time", "predicted_ms", "measured_ms", ms),
                                              ("device memory", "planned_bytes", "used_bytes", gib)):
                pair = numbers_of({name: plan.get(name) for name in (before, after)})
                rows.append([run.name, what, form(plan.get(before)), form(plan.get(after)),
                             f"{round(100 * (pair[before] / pair[after] - 1), 1) + 0.0:+.1f} %" if len(pair) == 2
                             else ""])
            rows += [[run.name, name, ms(value), "", ""]
                     for name, value in numbers_of(plan.get("predicted_parts_ms")).items()]
    return table(["run", "what", "predicted", "measured", "predicted against measured"], rows,
                 "Predicted and measured") if rows else ""


def communication_table(runs):
    found = [(run.name, entry) for run in runs for entry in run.headers[-1].get("communication") or []]
    names = dict.fromkeys(name for _, entry in found for name in entry)
    rows = [[run, *(entry.get(name, "") for name in names)] for run, entry in found]
    return table(["run", *names], rows[:100], "Collectives of a step") if rows else ""


def report(runs):
    """The page of RunLogs that have a header."""
    differences = {run: run_differences(runs[0].headers[-1], run.headers[-1]) for run in runs}
    of_data = {run: [f"{run.name}: {d.key} {d.other}, {runs[0].name} has {d.base}: their losses are not compared"
                     for d in found if d.key in ("train-data", "synthetic-data")] for run, found in differences.items()}
    data = {"runs": [run_data(run) for run in runs], "gap": gaps([run for run in runs if not of_data[run]])}
    rows = [*option_rows(runs), ["command", *(run.headers[-1]["command"] for run in runs)]]
    models = {str(run.headers[-1]["config"].get("model", "model unknown")) for run in runs}
    title = ", ".join(run.name for run in runs) + (f" ({models.pop()})" if len(models) == 1 else "")
    notes = "".join(f"<li>{text(line)}</li>" for run in runs for line in [*run.warnings(), *of_data[run]])
    body = [f"<header><h1>{text(title)}</h1></header>\n<main>\n",
            f"<ul class=notes>{notes}</ul>\n" if notes else "", "<div id=controls></div>\n<div id=loss>"
            "<noscript>The curves need JavaScript; the tables do not.</noscript></div>\n", what_ran(runs),
            differing_table(runs, differences), "<details><summary>All options, and the commands</summary>",
            table(["option", *(run.name for run in runs)], rows), "</details>\n<div id=panels></div>\n",
            plan_table(runs), memory_table(runs), communication_table(runs),
            *(f"<h2>Linears in FP8: {text(run.name)}</h2>\n<pre tabindex=0>{text(run.headers[-1]['fp8_plan'])}</pre>\n"
              for run in runs if run.headers[-1].get("fp8_plan")), "</main>\n"]
    return page(title, "".join(body), (HERE / "page.js").read_text(), data)


def csv_paths(runs, out):
    """A file for each run; names that are equal or no file names get a number."""
    if len(runs) == 1:
        return [out.with_suffix(".csv")]
    names = [re.sub(r"[^\w.-]", "_", run.name)[:80] for run in runs]
    names = [name if names.count(name) == 1 else f"{name}.{i + 1}" for i, name in enumerate(names)]
    return [out.with_suffix(f".{name}.csv") for name in names]


def write_report(runs, out):
    """Writes the page, and a CSV of each run beside it."""
    for run, path in zip(runs, csv_paths(runs, out)):
        with replacement(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            write_csv(run, file)
    with replacement(out) as temporary:
        temporary.write_text(report(runs), encoding="utf-8", errors="replace")
