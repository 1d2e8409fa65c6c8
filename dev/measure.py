"""Measures the rows that docs/ and README.md publish, on the GPUs of this machine.

    dev/measure.sh [GPUS [FOLDER]]     all GPUs of the machine, unless GPUS says 1, 4 or 8
    MINUTES=9 dev/measure.sh 4         starts no row that would end later than that; the default is 25

Every row is a row of a table of scripts/compare, one process on synthetic tokens, the most important ones first. It is
added to FOLDER/rows.csv when it is done, and FOLDER/README.md is written again. A further call continues with the rows
that are missing or failed. Without FOLDER it is the newest one in dev/results for this card, this number of GPUs and
these sources of llmc/, or dev/results/DATE-CARD-xGPUS. dev/measured.py puts the rows into the documents. Needs make
before; standard library only.
"""
import csv
import hashlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from datetime import datetime, timezone
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.comparison.launch import error_of  # noqa: E402
from llmfp8.comparison.report import csv_row, table, write_text  # noqa: E402
from llmfp8.comparison.results import Comparison  # noqa: E402
from llmfp8.comparison.runs import Configuration  # noqa: E402
from llmfp8.comparison.tables import TABLES, commands, title  # noqa: E402
from llmfp8.run_log import InputError, read_log  # noqa: E402
from llmfp8.support import replacement, run_main  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "dev" / "results"
LOGS = ROOT / "logs" / "measure"   # of the rows: one log and one file with what was printed
# What is published, most important first: card, GPUs, table of scripts/compare, its rows (None: all).
PUBLISHED = [
    ("h200", 4, "llama3-8b", None), ("h200", 4, "70b", ("delayed",)), ("h200", 4, "context", ("131072",
     "131072-fp8-attention")), ("h200", 4, "70b", None), ("h200", 4, "zero", None), ("h200", 4, "context", None),
    ("h200", 4, "muon", None),
    ("h200", 4, "experts", ("bf16-capacity", "blockwise-capacity")), ("h200", 4, "experts", None),
    ("h100", 4, "muon", None), ("h100", 4, "8b-h100", None),
    ("h200", 1, "llama3-8b", None), ("h200", 1, "gpt2-recipes", None), ("h200", 1, "llama3-small", None),
    ("h200", 1, "gpt2-1558M", None), ("h200", 1, "long", None), ("h200", 1, "finetune", ("bf16", "fp8")),
    ("h200", 1, "gpt2", None), ("h200", 1, "formats", ("bf16", "fp8-e4m3", "fp8-hybrid")),
    ("h200", 1, "modern-gpt2", None),
    ("h100", 1, "llama3-small", None), ("h100", 1, "gpt2-recipes", None),
    ("h200", 8, "llama3-8b", None), ("h200", 8, "70b-resident", None),
    ("h200", 8, "experts", ("bf16-capacity", "blockwise-capacity")),
    ("h200", 8, "context", ("131072-fp8-attention", "262144-fp8-attention")), ("h200", 8, "zero", ("zero-2", "zero-3")),
    ("h200", 8, "gpt2-recipes", ("bf16", "delayed"))]
# Columns of rows.csv. Those that compare.csv has, too, have its names and meaning; pinned_gib is of the whole host.
COLUMNS = ("table row failed commit llmc_tree command gpu gpus driver toolkit matmul_library nccl environment params "
           "seq_length micro_batch_size warmup_steps timed_steps s_per_it_median s_per_it_min s_per_it_max "
           "tokens_per_step tokens_per_s_per_gpu tflops_per_gpu mfu_bf16_peak memory_gib pinned_gib "
           "gpu_power_w_median sm_clock_mhz_median celsius_max joules_per_token forward_seconds_median "
           "backward_seconds_median first_step_s predicted_s_per_it unix_time").split()
# What a start takes besides its steps: launch, weights and search; and pinning of host memory.
START_S, PINNING_S_PER_GIB = 20, 0.4
KILL_S = 30   # from SIGTERM to SIGKILL
GIB = 1 << 30

Machine = namedtuple("Machine", "gpu gpus driver nccl tree")


def git_object(kind, content):
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).digest()


def tree_of(folder):
    """Git's hash of a folder, as `git rev-parse HEAD:FOLDER` prints it, but of the files that are there; b"" for a
    folder without files, which git does not know."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            found = tree_of(path)
            if found:
                entries.append((path.name + "/", b"40000 ", found))
        elif path.is_symlink():
            entries.append((path.name, b"120000 ", git_object("blob", os.readlink(path).encode())))
        else:
            mode = b"100755 " if path.stat().st_mode & stat.S_IXUSR else b"100644 "
            entries.append((path.name, mode, git_object("blob", path.read_bytes())))
    entries.sort(key=lambda entry: entry[0].encode())   # git sorts folders as if their names ended with /
    content = b"".join(mode + name.rstrip("/").encode() + b"\0" + found for name, mode, found in entries)
    return git_object("tree", content) if content else b""


def printed(words, **more):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **more)


def this_machine(gpus):
    """gpus: so many of its GPUs, or None: all."""
    try:
        lines = printed(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).stdout.splitlines()
    except OSError as error:
        raise InputError(f"nvidia-smi: {error.strerror}: rows are measured on GPUs") from None
    found = {tuple(line.split(", ")) for line in lines}
    if len(found) != 1 or len(lines) < (gpus or 1):
        raise InputError(f"{gpus or 1} equal GPUs are needed; nvidia-smi has: {'; '.join(lines)}")
    (gpu, driver), = found
    executable = Path(os.environ.get("LLMC_BUILD", ROOT)) / "train_llama"
    if not executable.exists():
        raise InputError(f"{executable}: missing: run make")
    version = printed([executable, "--version"]).stdout
    if "commit unknown" in version and "LLMC_COMMIT" not in os.environ:
        raise InputError(f"{executable}: its commit is unknown: set LLMC_COMMIT to it")
    nccl = re.search(r"NCCL ([\d.]+)", version)
    return Machine(gpu, gpus or len(lines), driver, nccl[1] if nccl else "", tree_of(ROOT / "llmc").hex())


def card_of(gpu):
    """h200 of NVIDIA H200, h100 of NVIDIA H100 80GB HBM3, h200-nvl of NVIDIA H200 NVL."""
    words = gpu.lower().removeprefix("nvidia ").split(" ")
    return "-".join(words[:2] if words[1:2] in (["nvl"], ["pcie"]) else words[:1])


def published(machine):
    """[(table, row)] for this machine, each once."""
    found = [(name, row) for card, gpus, name, rows in PUBLISHED
             if (card, gpus) == (card_of(machine.gpu), machine.gpus) for row in rows or TABLES[name].rows]
    if not found:
        raise InputError(f"no row is published for {machine.gpus} {machine.gpu}; dev/measure.py has the list")
    return list(dict.fromkeys(found))


def read_csv(path):
    """The rows of a file; [] if there is none."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def read_rows(folder):
    return read_csv(folder / "rows.csv")


def chosen_folder(named, machine):
    if named:
        folder = Path(named)
    else:
        begin = f"-{card_of(machine.gpu)}-x{machine.gpus}"
        there = sorted(path for path in RESULTS.glob(f"*{begin}*") if
                       any(row["llmc_tree"] == machine.tree for row in read_rows(path)))
        folder = there[-1] if there else RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}{begin}"
        if not there and folder.exists():   # of other sources, on the same day
            folder = folder.with_name(f"{folder.name}-{machine.tree[:7]}")
    other = {(row["gpu"], row["gpus"], row["llmc_tree"]) for row in read_rows(folder)} - {
        (machine.gpu, str(machine.gpus), machine.tree)}
    for gpu, gpus, tree in other:
        raise InputError(f"{folder}: has rows of {gpus} {gpu} and llmc/ {tree[:12]}, these are {machine.gpus} "
                         f"{machine.gpu} and {machine.tree[:12]}: name another folder")
    return folder


def plan_of(words):
    """(seconds of a step or None, pinned GiB of all ranks) by the trainer's plan; InputError if it refuses."""
    done = printed([*words, "--dry-run", "--json"])
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"type":"plan"')]
    if not lines:
        raise InputError(error_of(done.stdout))
    plan = json.loads(lines[-1])
    memory = plan["memory"]
    if not memory["fits"]:
        raise InputError(f"does not fit: {memory['arena_bytes'] / GIB:.1f} of {memory['gpu_bytes'] / GIB:.1f} GiB")
    return plan.get("time", {}).get("step_ms", 0) / 1000 or None, memory["pinned_host_bytes"] * plan["ranks"] / GIB


def run_to_end(words, text, limit_s):
    """Runs a command, with its output in a file. Returns its error, or ""; prints the end of its output then."""
    with open(text, "w", encoding="utf-8") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"not done after {limit_s:.0f} s"
        finally:
            if process.poll() is None:   # too long, or this script is stopped
                process.terminate()   # mpirun ends its ranks
                try:
                    process.wait(KILL_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if not code:
        return ""
    said = Path(text).read_text(encoding="utf-8", errors="replace")
    say("\n".join(said.splitlines()[-15:]))   # logs may not leave the machine
    return f"{code if isinstance(code, str) else f'exit code {code}'}: {error_of(said)}"


def row_of_log(log, warmup):
    """The columns that a log has."""
    run = read_log(log)
    configuration = Configuration(run.name, [run], warmup)
    comparison = Comparison([configuration])
    header, row = configuration.header, csv_row(comparison, comparison.base_row)
    first = [re.match(r"first step done after ([\d.]+) s", event["text"]) for event in run.events]
    return {**{name: row[name] for name in COLUMNS if name in row}, "params": header.get("params"),
            "commit": header["commit"] if header["commit"] != "unknown" else os.environ.get("LLMC_COMMIT", "unknown"),
            "seq_length": header["config"]["seq-length"], "micro_batch_size": header["config"]["micro-batch-size"],
            "tokens_per_step": run.step_list()[-1]["tokens"] // len(run.steps),
            "first_step_s": next((found[1] for found in first if found), None)}


def without_log(command):
    return re.sub(r" --log-file \S+", "", command)


def measure(name, row, machine, left_s, rows):
    """Runs a row; returns its columns, or None if it would take longer than left_s. A row with the command of one of
    `rows` has its numbers."""
    os.environ["RANKS"] = str(machine.gpus)
    words = [*commands(name, [row])[row], "--synthetic-data"]
    warmup, timed = TABLES[name].steps
    log = LOGS / f"{name}.{row}.jsonl"
    words += ["--train-iters", str(warmup + timed), "--log-file", str(log)]
    found = {"table": name, "row": row, "llmc_tree": machine.tree, "gpu": machine.gpu, "gpus": machine.gpus,
             "command": f"RANKS={machine.gpus} {shlex.join(words)}".replace(f"{ROOT}/", "")}
    for old in rows:
        if without_log(old["command"]) == without_log(found["command"]) and not old["failed"]:
            return {**old, "table": name, "row": row}
    try:
        predicted, pinned = plan_of(words)
        expected_s = START_S + PINNING_S_PER_GIB * pinned + (predicted or 0) * (warmup + timed + 1)
        if expected_s > left_s:
            say(f"{name} {row}: would take {expected_s:.0f} s, {left_s:.0f} s are left")
            return None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        said = run_to_end(words, log.with_suffix(".txt"), 2 * expected_s + 60)
        if said:
            raise InputError(said)
        found = {**row_of_log(log, warmup), "pinned_gib": pinned or None, "predicted_s_per_it": predicted, **found}
    except InputError as error:
        found["failed"] = " ".join(str(error).split())
    environment = (f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_"))
    return {**found, "driver": machine.driver, "nccl": machine.nccl if machine.gpus > 1 else "",
            "environment": " ".join(environment), "unix_time": int(time.time())}


def figure(row, column, form):
    """A number of rows.csv as text, "" if the row does not have it."""
    return format(float(row[column]), form) if row[column] else ""


def spread(row):
    median, low, high = (figure(row, f"s_per_it_{which}", ".4g") for which in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


README_COLUMNS = [
    ("row", lambda row: row["row"]), ("s/it (min to max)", spread),
    ("steps", lambda row: f"{row['warmup_steps']} + {row['timed_steps']}"),
    ("predicted", lambda row: figure(row, "predicted_s_per_it", ".4g")),
    ("tokens/s a GPU", lambda row: figure(row, "tokens_per_s_per_gpu", ",.0f")),
    ("TFLOP/s a GPU", lambda row: figure(row, "tflops_per_gpu", ".4g")),
    ("MFU of BF16 peak", lambda row: figure(row, "mfu_bf16_peak", ".1%")),
    ("GiB", lambda row: figure(row, "memory_gib", ".2f")),
    ("pinned GiB of the host", lambda row: figure(row, "pinned_gib", ".0f")),
    ("W", lambda row: figure(row, "gpu_power_w_median", ".0f")),
    ("SM MHz", lambda row: figure(row, "sm_clock_mhz_median", ".0f")),
    ("C", lambda row: figure(row, "celsius_max", ".0f")),
    ("J/token", lambda row: figure(row, "joules_per_token", ".4g")),
    ("first step done after s", lambda row: figure(row, "first_step_s", ".4g"))]


def each(rows, column):
    """The values of a column, each once."""
    return ", ".join(dict.fromkeys(row[column] for row in rows if row[column])) or "none"


def readme(rows):
    """The text of README.md, from rows as rows.csv has them."""
    first, done = rows[0], [row for row in rows if not row["failed"]]
    when = datetime.fromtimestamp(int(first["unix_time"]), timezone.utc)
    text = (f"Commit {each(done, 'commit')}; `llmc/` is the git tree {first['llmc_tree'][:12]}. Driver "
            f"{each(rows, 'driver')}, CUDA {each(done, 'toolkit')}, {each(done, 'matmul_library')}, NCCL "
            f"{each(rows, 'nccl')}, with {each(rows, 'environment')} set. Each row is one process on synthetic tokens, "
            "with deterministic attention; s/it is the median of the timed steps, which follow those of warm-up. "
            "All digits are in [rows.csv](rows.csv). "
            f"`dev/measure.sh {first['gpus']}` made this folder and continues it.")
    lines = [f"# {first['gpus']} x {first['gpu']}, {when:%Y-%m-%d}", "", *textwrap.wrap(text, 120), ""]
    os.environ["RANKS"] = first["gpus"]   # for the titles
    for name in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == name]
        good = [row for row in mine if not row["failed"]]
        lines += [f"## {title(name)}", "", *(table(README_COLUMNS, good) if good else []), ""]
        lines += [f"* {row['row']}: failed: {row['failed']}\n" for row in mine if row["failed"]]
        lines += ["```sh", *(row["command"] for row in mine), "```", ""]
    return "\n".join(lines)


def write(folder, rows):
    """Writes rows.csv and README.md, each at once: a call that is cut off leaves the rows before."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacement(folder / "rows.csv") as aside, open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    rows = read_rows(folder)
    write_text(folder / "README.md", readme(rows))
    return rows


def say(text):
    print(text, flush=True)


def stop(*_):
    raise KeyboardInterrupt


def main():
    words = sys.argv[1:]
    minutes = os.environ.get("MINUTES", "25")
    if "--help" in words or len(words) > 2 or (words and not words[0].isdecimal()) or not minutes.isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    end = time.monotonic() + 60 * int(minutes)
    machine = this_machine(int(words[0]) if words else None)
    wanted = published(machine)
    folder = chosen_folder(words[1] if len(words) > 1 else None, machine)
    rows = read_rows(folder)
    done = {(row["table"], row["row"]) for row in rows if not row["failed"]}
    say(f"{folder}: {len(done)} of {len(wanted)} rows are there")
    missing = 0
    for name, row in wanted:
        if (name, row) in done:
            continue
        found = measure(name, row, machine, end - time.monotonic(), rows)
        missing += found is None or bool(found.get("failed"))
        if found is None:
            continue
        rows = write(folder, [*(old for old in rows if (old["table"], old["row"]) != (name, row)), found])
        failed = found.get("failed")
        say(f"{name} {row}: {f'FAILED: {failed}' if failed else spread(rows[-1]) + ' s/it'}")
    say(f"{folder}: {missing} of {len(wanted)} rows are missing" + "; the same command continues" * bool(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    run_main(main)
