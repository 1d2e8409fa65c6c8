"""The HTML file of scripts/report: the page of runs."""
import json
import math

from .document import gib, memory_map, ms, part, step_by_operation
from .drawing import bars, known
from .markup import HERE, page, table, text
from .reduce import gaps, run_data


def option_rows(runs):
    """[(option, value of each run)], a dash where a header does not have it."""
    configs = [run.headers[-1]["config"] for run in runs]
    configs = [config if isinstance(config, dict) else {} for config in configs]
    names = dict.fromkeys(name for config in configs for name in config)

    def shown(config, name):
        value = config.get(name, "–")
        return value if isinstance(value, str) else json.dumps(value)
    return [[name, *(shown(config, name) for config in configs)] for name in names]


def what_ran(runs):
    """The table at the top: a column per run."""
    def device(run):
        found = run.headers[-1]["device"]
        return str(found.get("name", "unknown"))

    def option(name):
        def value(run):
            found = part(run.headers[-1], "config").get(name, "")
            return " ".join(map(str, found)) if isinstance(found, list) else found
        return value

    def data(run):
        return "synthetic: the losses mean nothing" if run.synthetic else option("train-data")(run)

    def parameters(run):
        count = run.headers[-1].get("params", "unknown")
        return f"{count:,}" if isinstance(count, int) else str(count)

    def changed(run):
        found = run.headers[-1].get("changed")
        return " ".join(map(str, found)) if isinstance(found, list) else "not in this log"

    def losses(run):
        last = run.step_list()[-1:] if len(run.steps) < 2 else [run.steps[run.steps.at[-1]]]
        return f"{last[0]['loss']:.4f} at step {last[0]['step']}" if last else "no step yet"

    def valid(run):
        return f"{run.evals[max(run.evals)]['loss']:.4f} at step {max(run.evals)}" if run.evals else "none"

    def last(run, field, form):
        values = [value for value in run.steps.columns[field][len(run.steps) // 10:] if math.isfinite(value)]
        return form.format(sorted(values)[len(values) // 2]) if values else "unknown"
    rows = [("model", option("model")), ("FP8 recipe", option("fp8-recipe")), ("device", device),
            ("ranks", lambda run: run.headers[-1]["world"]), ("commit", lambda run: run.headers[-1]["commit"]),
            ("parameters", parameters),
            ("memory of the arena", lambda run: gib(run.headers[-1].get("arena_bytes"))),
            ("training loss", losses), ("validation loss", valid),
            ("median step time", lambda run: last(run, "step_seconds", "{:.4g} s")),
            ("median speed", lambda run: last(run, "tokens_per_second", "{:,.0f} tokens/s")),
            ("median energy", lambda run: last(run, "joules_per_token", "{:.4g} J/token")),
            ("data", data), ("differences from the preset", changed),
            ("state", lambda run: run.events[-1]["text"] if run.finished else "running, or killed"),
            ("command", lambda run: run.headers[-1]["command"])]
    return table(["", *(run.name for run in runs)], [[name, *(value(run) for run in runs)] for name, value in rows],
                 "What ran")


def plan_table(runs):
    """Predicted against measured, as on the screen of the run; "" if no log has it."""
    def cell(value, form):
        return form(value) if isinstance(value, (int, float)) and value > 0 else "no prediction"
    rows = []
    for run in runs:
        for plan in run.plans[-1:]:
            pairs = [("step time", "predicted_ms", "measured_ms", lambda ms: f"{ms:,.1f} ms"),
                     ("device memory", "planned_bytes", "used_bytes", gib)]
            for what, before, after, form in pairs:
                a, b = plan.get(before), plan.get(after)
                both = all(isinstance(value, (int, float)) and value > 0 for value in (a, b))
                rows.append([run.name, what, cell(a, form), cell(b, form),
                             f"{round(100 * (a / b - 1), 1) + 0.0:+.1f} %" if both else ""])
    return ("<h2>Predicted and measured</h2>\n" + table(
        ["run", "what", "predicted", "measured", "predicted against measured"], rows) if rows else "")


def memory_maps(runs):
    """The arena of each run that says what it is for."""
    return "".join(memory_map(part(header, "purpose_bytes"), header.get("arena_bytes"), device_bytes(header),
                              "Memory by purpose" + (f": {run.name}" if len(runs) > 1 else ""))
                   for run in runs for header in [run.headers[-1]])


def device_bytes(header):
    """The memory of a GPU; that of the CPU belongs to others, too."""
    device = part(header, "device")
    return device.get("memory_bytes") if device.get("sm") else None


def predicted_parts(runs):
    """The predicted time of a step by its parts, and what was measured."""
    shown = []
    for run in runs:
        plan = run.plans[-1] if run.plans else {}
        parts = [row for row in part(plan, "predicted_parts_ms").items() if known(row[1]) and row[1] > 0]
        if parts:
            of = f": {run.name}" if len(runs) > 1 else ""
            shown.append(f"<h2>Time of a step, predicted{text(of)}</h2>\n<p class=soft>The whole: predicted "
                         f"{text(ms(plan.get('predicted_ms')))}, measured {text(ms(plan.get('measured_ms')))}. What "
                         "bench --json writes, given to scripts/report beside the log, adds the measured time of every "
                         f"operation.</p>\n{bars('Predicted time of a step', parts, ms)}")
    return "".join(shown)


def communication_table(runs):
    rows = [[run.name, *(entry.get(name, "") for name in names)]
            for run in runs for names in [list(communication_fields(runs))]
            for entry in run.headers[-1].get("communication") or [] if isinstance(entry, dict)]
    return ("<h2>Collectives of a step</h2>\n" + table(["run", *communication_fields(runs)], rows[:100])
            if rows else "")


def communication_fields(runs):
    return dict.fromkeys(name for run in runs for entry in run.headers[-1].get("communication") or []
                         if isinstance(entry, dict) for name in entry)


def report(runs, benches=()):
    """The page of StreamedLogs that have a header; `benches`: what bench --json has written of such runs."""
    datas = [run_data(run) for run in runs]
    gap = gaps(datas)
    for data in datas:
        del data["means"]
    rows = option_rows(runs)
    differ = [row for row in rows if len(set(row[1:])) > 1]
    models = {str(part(run.headers[-1], "config").get("model", "model unknown")) for run in runs}
    title = "Training report: " + ", ".join(run.name for run in runs) + (
        f" ({models.pop()})" if len(models) == 1 else "")
    notes = "".join(f"<li>{text(line)}</li>" for run in runs for line in run.warnings())
    body = [f"<header><h1>{text(title)}</h1></header>\n<main>\n",
            f"<ul class=notes>{notes}</ul>\n" if notes else "", what_ran(runs)]
    if differ:
        body.append(table(["option", *(run.name for run in runs)], differ, "Options that differ"))
    body += ["<details><summary>All options</summary>",
             table(["option", *(run.name for run in runs)], rows), "</details>\n",
             "<div id=panels><noscript>The curves need JavaScript; the tables do not.</noscript></div>\n",
             plan_table(runs), predicted_parts(runs),
             *(piece for bench in benches for piece in step_by_operation(bench)),
             memory_maps(runs), communication_table(runs)]
    for run in runs:
        if isinstance(run.headers[-1].get("fp8_plan"), str) and run.headers[-1]["fp8_plan"]:
            body.append(f"<h2>Linears in FP8: {text(run.name)}</h2>\n<pre tabindex=0>"
                        f"{text(run.headers[-1]['fp8_plan'])}</pre>\n")
    body.append("</main>\n")
    return page(title, "".join(body), (HERE / "page.js").read_text(), {"runs": datas, "gap": gap})
