"""Pages of plan --json, doctor --json and bench --json, in the look of the report of a run."""
from .drawing import bars, known, percent, strip
from .markup import page, table, text

TYPES = ("plan", "doctor", "bench")


def gib(value):
    if not known(value):
        return "unknown"
    unit, name = next(((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")) if value >= unit / 10),
                      (1 << 10, "KiB"))
    return f"{value / unit:.2f} {name}"


def ms(value):
    return f"{value:,.2f} ms" if known(value) else "unknown"


def count(value):
    return f"{value:,}" if known(value) else str(value)


def per_second(data):
    """Speed and MFU of a plan or bench."""
    speed, mfu = data.get("tokens_per_second"), data.get("mfu")
    said = [form(value) for value, form in ((speed, "{:,.0f} tokens/s".format), (mfu, "MFU {:.1%}".format))
            if known(value)]
    return ", ".join(said) or "unknown"


def part(data, name):
    """data[name] if it is an object, else an empty one."""
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def entries(data, name):
    """The objects of the list data[name]."""
    found = data.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def rest_of(name):
    return f"<details><summary>{text(name)}</summary>"


def memory_map(purposes, arena, capacity=None, title="Memory by purpose"):
    """The arena as a strip that is drawn to scale, in a GPU of `capacity` bytes if that is known."""
    rows = [(name, size) for name, size in purposes.items() if known(size) and size > 0]
    drawn = strip(title, rows, capacity if known(capacity) else arena, gib)
    if not drawn:
        return ""
    of = f", of {gib(capacity)} of the GPU" if known(capacity) and capacity > 0 else ""
    return (f"<h2>{text(title)}</h2>\n<p class=soft>The arena: {text(gib(arena))}{text(of)}. Nothing is allocated "
            f"after the first step.</p>\n{drawn}")


def plan_page(plan):
    memory, time, gpu, config = (part(plan, name) for name in ("memory", "time", "gpu", "config"))
    fits = memory.get("fits") is True
    verdict = (f"{'fits' if fits else 'DOES NOT FIT'}: {gib(memory.get('arena_bytes'))} of "
               f"{gib(memory.get('gpu_bytes'))} on {gpu.get('name')}")
    what = [("model", config.get("model", "")), ("FP8 recipe", config.get("fp8-recipe", "none")),
            ("parameters", count(plan.get("params"))), ("ranks", count(plan.get("ranks"))),
            ("tokens of a step", count(plan.get("tokens_per_step"))), ("steps", count(plan.get("train_iters"))),
            ("time of a step", f"{ms(time.get('step_ms'))}, predicted for {gpu.get('name')}; {gpu.get('rates')}"
             if time else "not predicted for this --dtype"),
            ("speed", per_second(time)),
            ("length of the run", f"{time['hours']:.2f} hours" if known(time.get("hours")) else "unknown"),
            ("a checkpoint", gib(part(plan, "checkpoint").get("bytes")))]
    body = [f"<p class=verdict>{text(verdict)}</p>\n", table(["", "planned"], what, "What would run")]
    changes = [[c.get("options"), gib(c.get("arena_bytes")), "fits" if c.get("fits") else "does not fit"]
               for c in entries(memory, "changes")]
    if changes:
        body.append(table(["with", "memory", ""], changes, "What would make it fit"))
    body.append(memory_map(part(memory, "purpose_bytes"), memory.get("arena_bytes"), memory.get("gpu_bytes")))
    parts = [(name, value) for name, value in part(time, "parts_ms").items() if known(value) and value > 0]
    if parts:
        body.append("<h2>Time of a step, predicted</h2>\n" + bars("Predicted time of a step", parts, ms))
    body.append(linears(entries(plan, "linears")))
    collectives = entries(part(plan, "communication"), "collectives")
    if collectives:
        names = ["collective", "dtype", "ranks", "calls", "bytes", "sent_bytes"]
        body.append("<h2>Collectives of a step</h2>\n" + table(names, [[count(c.get(name)) for name in names]
                                                                     for c in collectives]))
    matmuls = entries(plan, "matmuls")
    if matmuls:
        names = ["pass", "M", "N", "K", "in", "out", "count", "tflop"]
        rows = [[f"{m[name]:.4g}" if isinstance(m.get(name), float) else m.get(name) for name in names]
                for m in matmuls]
        body.append(rest_of("Matmuls of a step") + table(names, rows) + "</details>\n")
    found = plan.get("notes")
    notes = [note for note in found if isinstance(note, str)] if isinstance(found, list) else []
    if notes:
        body.append("<ul class=notes>" + "".join(f"<li>{text(note)}</li>" for note in notes) + "</ul>\n")
    return f"Plan: {config.get('model', '')}", body + options(config)


def linears(found):
    """A row for each kind of linear layer, with its speedup as bars."""
    kinds = {}
    for linear in found:
        name = str(linear.get("name")).split(".", 1)[-1]
        kinds.setdefault((name, linear.get("out"), linear.get("in")), []).append(linear)
    if not kinds:
        return ""
    rows, shown = [], []
    for (name, out, inner), layers in kinds.items():
        in_fp8 = [layer for layer in layers if layer.get("fp8")]
        first = (in_fp8 or layers)[0]
        rows.append([name, f"{out} x {inner}", f"{len(in_fp8)} of {len(layers)}", ms(first.get("bf16_ms")),
                     ms(first.get("fp8_ms"))])
        if known(first.get("gain")) and first["gain"] > 0:
            shown.append((name if in_fp8 else f"{name} (stays BF16)", first["gain"]))
    drawn = bars("Predicted speedup of FP8", shown, lambda value: f"{value:.2f} times BF16", whole=0)
    return ("<h2>Linear layers: predicted speedup of FP8</h2>\n" + drawn
            + table(["linear", "out x in", "layers in FP8", "BF16", "FP8"], rows))


def doctor_page(report):
    order = {"failed": 0, "warning": 1, "ok": 2, "not checked": 3}
    items = sorted(entries(report, "items"), key=lambda item: order.get(item.get("verdict"), 1))
    counts = ", ".join(f"{number} {name}" for name, number in part(report, "counts").items())
    rows = [[item.get("name"), item.get("verdict"), item.get("text"), item.get("advice"), item.get("checks")]
            for item in items]
    body = [f"<p class=verdict>{text(report.get('verdict'))}: {text(counts)}</p>\n",
            table(["", "what was examined"], [("host", report.get("host")), ("ranks", report.get("ranks")),
                                              ("device", report.get("device")), ("commit", report.get("commit"))]),
            "<div class=items>", table(["item", "verdict", "found", "what to do", "checks"], rows, "Items"), "</div>\n"]
    return f"Doctor: {report.get('host')}", body


def step_by_operation(bench):
    """Time of a step by class of operations and by operation, from bench."""
    totals = {name: part(part(bench, "totals"), name) for name in part(bench, "totals")}
    classes = sorted(((name, total.get("ms")) for name, total in totals.items() if known(total.get("ms"))),
                     key=lambda row: -row[1])
    floors = {name: total.get("floor_ms") for name, total in totals.items() if known(total.get("floor_ms"))
              and total["floor_ms"] > 0}
    rows = sorted(entries(bench, "rows"), key=lambda row: -(row["ms"] if known(row.get("ms")) else 0))
    step = bench.get("step_ms")
    body = [f"<h2>Time of a step by operation</h2>\n<p class=soft>Measured by bench on {text(bench.get('device'))}, "
            f"{text(bench.get('recipe'))}: {text(ms(step))} a step. The line in a bar is the floor: bytes at the rate "
            "of a copy, FLOPs at the rate of a matmul.</p>\n",
            bars("Time by class of operations", classes, ms, floors, step),
            bars("Time by operation", [(row.get("name"), row.get("ms")) for row in rows[:24]], ms,
                 {row.get("name"): row.get("floor_ms") for row in rows[:24] if known(row.get("floor_ms"))
                  and row["floor_ms"] > 0}, step),
            rest_of("All operations"),
            table(["operation", "class", "calls", "time", "floor", "share of the step"],
                  [[row.get("name"), row.get("class"), row.get("calls"), ms(row.get("ms")), ms(row.get("floor_ms")),
                    percent(row["ms"], step) if known(row.get("ms")) and known(step) else ""] for row in rows]),
            "</details>\n"]
    return body


def bench_page(bench):
    clocks, ceilings = part(bench, "clocks"), part(bench, "ceilings")
    what = [("device", bench.get("device")), ("matmul library", bench.get("matmul_library")),
            ("recipe", bench.get("recipe")), ("ranks", bench.get("ranks")), ("commit", bench.get("commit")),
            ("step", ms(bench.get("step_ms"))), ("forward of a micro-batch", ms(bench.get("forward_ms"))),
            ("loss and backward", ms(bench.get("backward_ms"))),
            ("speed", per_second(bench)),
            ("copy rate", f"{ceilings['copy_bytes_per_s'] / 1e9:,.0f} GB/s"
             if known(ceilings.get("copy_bytes_per_s")) else "unknown"),
            ("clock", f"{clocks.get('sm_mhz')} MHz, {clocks.get('watts')} W, held back by {clocks.get('throttled_by')}"
             if clocks.get("samples") else "not sampled")]
    config = part(bench, "config")
    return (f"Bench: {config.get('model', '')}", [table(["", "measured"], what, "What was measured"),
                                                  *step_by_operation(bench), *options(config)])


def options(config):
    return [rest_of("All options"), table(["option", "value"], list(config.items())), "</details>\n"] if config else []


def document(data):
    """The page of a JSON object with one of TYPES."""
    title, body = {"plan": plan_page, "doctor": doctor_page, "bench": bench_page}[data["type"]](data)
    return page(title, f"<header><h1>{text(title)}</h1></header>\n<main>\n" + "".join(body) + "</main>\n")
