"""Samples clocks, power, temperature and throttle reasons of the GPUs during a run, with nvidia-smi."""
import csv
import math
import os
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path

from ..run_log import InputError, RunLog
from ..support import no_follow

INTERVAL_MS = 500
# The last field had another name before driver 535.
QUERIES = [["index", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", reasons + ".active"]
           for reasons in ("clocks_event_reasons", "clocks_throttle_reasons")]
COLUMNS = ["unix_time", "step", "gpu", "sm_mhz", "memory_mhz", "power_w", "celsius", "reasons"]
# Bits of NVML's throttle reasons, without bit 0, an idle GPU.
REASONS = {0x2: "clocks set by the user", 0x4: "power cap", 0x8: "slowdown by hardware", 0x10: "sync boost",
           0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake", 0x100: "display clocks"}
NO_TOOL = "no nvidia-smi"


def samples_path(log):
    """The samples that belong to a log."""
    return Path(log).with_suffix(".gpu.csv")


def visible():
    """Arguments of nvidia-smi that select the GPUs of the run."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", chosen] if chosen else []


def working_query():
    """(fields, None), or (None, the reason why nvidia-smi does not work)."""
    if not shutil.which("nvidia-smi"):
        return None, NO_TOOL
    said = ""
    for fields in QUERIES:
        done = subprocess.run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits",
                               *visible()], text=True, capture_output=True)
        if done.returncode == 0:
            return fields, None
        said = " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"
    return None, f"nvidia-smi failed: {said[:200]}"


class Sampler:
    """Context manager that writes samples next to a log during its run, each with the number of steps done."""

    def __init__(self, log):
        self.log = RunLog(log, skip_damaged=True)
        self.path = samples_path(log)
        self.process = None

    def __enter__(self):
        fields, reason = working_query()
        anew = not self.path.exists()
        self.file = open(self.path, "a", encoding="utf-8", opener=no_follow)
        if anew:
            print(*COLUMNS, sep=",", file=self.file)
        if reason:
            print(f"# {reason}", file=self.file, flush=True)
            return self
        self.process = subprocess.Popen(
            ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits",
             f"--loop-ms={INTERVAL_MS}", *visible()], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def _read(self):
        for line in self.process.stdout:
            try:
                self.log.poll()
            except (OSError, InputError):   # not there yet
                pass
            begin = self.log.headers[-1]["step"] if self.log.headers else ""
            step = max([*self.log.steps, begin]) if self.log.headers else ""
            values = [value.strip() for value in line.split(",")]
            print(f"{time.time():.3f}", step, *values, sep=",", file=self.file, flush=True)

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.thread.join()
        self.file.close()


def number(text):
    try:
        return float(text)
    except ValueError:   # [N/A]
        return math.nan


class Clocks:
    """What the samples of a configuration say about its timed steps; `reason` where there are none."""

    def __init__(self, configuration):
        self.reason, self.samples = "", []
        for run in configuration.runs:
            self._read(run, {record["step"] for timed in configuration.rounds for record in timed}, configuration.world)
        self.throttled = self._throttled()

    def _read(self, run, timed, world):
        path = samples_path(run.path)
        if not path.exists():
            on_cpu = run.headers[0]["device"]["name"] == "CPU"
            self.reason = self.reason or ("no GPU" if on_cpu else "not sampled")
            return
        gpus = {}   # the first of those visible, one a rank
        with open(path, newline="", encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
        self.reason = self.reason or next((line[1:].strip() for line in lines if line.startswith("#")), "")
        for sample in csv.DictReader(line for line in lines if not line.startswith("#")):
            if set(sample) != set(COLUMNS) or None in sample.values():
                raise InputError(f"{path}: a line without the columns {','.join(COLUMNS)}: delete the file to do "
                                 "without clocks")
            gpus.setdefault(sample["gpu"], len(gpus))
            # The sample was taken in the step after those that were done by then.
            if gpus[sample["gpu"]] < world and sample["step"].isdigit() and int(sample["step"]) + 1 in timed:
                self.samples.append(sample)
        if not self.samples:
            self.reason = self.reason or "no sample in the timed steps"

    def values(self, column):
        return [value for value in (number(sample[column]) for sample in self.samples) if not math.isnan(value)]

    def median(self, column):
        values = self.values(column)
        return statistics.median(values) if values else math.nan

    def _throttled(self):
        """{reason: share of the samples}."""
        shares = {}
        for sample in self.samples:
            try:
                bits = int(sample["reasons"], 16)
            except ValueError:   # [N/A]
                continue
            for bit in (1 << i for i in range(1, bits.bit_length()) if bits >> i & 1):   # bit 0: idle
                name = REASONS.get(bit, hex(bit))
                shares[name] = shares.get(name, 0) + 1 / len(self.samples)
        return shares
