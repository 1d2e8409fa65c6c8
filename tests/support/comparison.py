"""Shared by the tests of scripts/compare: invented logs of runs, and calls of the script."""
import copy
import csv
import json
import os
from pathlib import Path
from unittest import mock

from llmfp8.comparison.main import main
from tests.support.folder import FolderTest, call_main
from tests.support.train import BUILD

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "compare"
COMPARE = ROOT / "scripts" / "compare"
H200 = json.loads((ROOT / "tests" / "fixtures" / "logs" / "h200.jsonl").read_text().splitlines()[0])
H200["device"].update(peak_flops_fp8=1978.9e12, peak_flops_fp32=66.9e12)
H200["command"], H200["synthetic_data"] = "./train_llama --model llama3-small", False
H200["config"].update({"train-data": ["tok/train_*.bin"], "valid-data": ["tok/valid_*.bin"], "log-file": "a.jsonl"})
TOKENS = 131072   # of a step
DELAYED = {"fp8-recipe": "delayed", "fp8-format": "hybrid", "fp8-min-speedup": 1.0, "fp8-amax-history-len": 1024}


def step_record(step, seconds, loss, world=1):
    rate = TOKENS / seconds
    return {"type": "step", "step": step, "train_iters": 8, "loss": loss, "grad_norm": 1.0, "grad_mul": 1.0, "lr": 1e-4,
            "step_seconds": seconds, "exposed_comm_seconds": None, "tokens_per_second": rate,
            "samples_per_second": rate / 2048, "mfu": 0.5, "memory_gib": 32.5, "eta_seconds": 0.0, "samples": 64 * step,
            "tokens": TOKENS * step, "counted_tokens": TOKENS, "skipped": False, "skips": 0}


def a_log(seconds, losses, config=None, device=None, evals=(), **header):
    """Records of a run: seconds and losses of its steps; evals {step: loss}."""
    first = {**copy.deepcopy(H200), **header}
    first["config"].update(config or {})
    first["device"].update(device or {})
    records = [first, {"type": "event", "step": 0, "kind": "note", "text": "attention: tensor cores (mma.sync)"}]
    for step, (took, loss) in enumerate(zip(seconds, losses), 1):
        records.append(step_record(step, took, loss))
        if step in evals:
            records.append({"type": "eval", "step": step, "loss": evals[step], "counted_tokens": 4096, "seconds": 1.0})
    return [*records, {"type": "event", "step": len(seconds), "kind": "stop", "text": f"finished {len(seconds)} steps"}]


def losses_of(count, shift=0.0):
    return [10 / (1 + 0.25 * step) + shift * step for step in range(count)]


BF16 = a_log([6.0, 1.3, 1.25, 1.219, 1.218, 1.226, 1.22, 1.221], losses_of(8), evals={4: 5.5, 8: 3.4})
BF16_AGAIN = a_log([5.9, 1.3, 1.25, 1.223, 1.221, 1.23, 1.224, 1.222], losses_of(8), evals={4: 5.5, 8: 3.4})
FP8 = a_log([7.0, 1.0, 0.95, 0.943, 0.941, 0.946, 0.944, 0.942], losses_of(8, 0.001), DELAYED, evals={4: 5.6, 8: 3.5},
            fp8_plan="FP8   delayed\n  layers 0-11      up down in FP8\n", unix_time=1795287100.0)
FP8_AGAIN = a_log([7.0, 1.0, 0.95, 0.944, 0.942, 0.947, 0.945, 0.943], losses_of(8, 0.0011), DELAYED,
                  evals={4: 5.6, 8: 3.5}, unix_time=1795287100.0)
BIG = a_log([7.0, 1.2, 1.2, 1.19, 1.2], losses_of(5), {"micro-batch-size": 16}, unix_time=1795287300.0)
OTHER_GPU = a_log([7.0, 1.2, 1.2, 1.6, 1.7, 1.65], losses_of(6), device={"name": "NVIDIA H100 PCIe",
                  "peak_flops_bf16": 756.5e12, "peak_flops_fp8": None}, unix_time=1795287400.0)


class CompareTest(FolderTest):
    def write(self, name, records):
        self.file(name, records if isinstance(records, str) else "".join(json.dumps(r) + "\n" for r in records))
        return name

    def call(self, *arguments, code=0):
        variables = {name: value for name, value in os.environ.items() if name not in ("DATA", "RANKS")}
        variables.update(OMP_NUM_THREADS="1", LLMC_BUILD=str(BUILD))
        with mock.patch.dict(os.environ, variables, clear=True):
            done = call_main(main, "compare", *arguments, cwd=self.folder)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def rows(self, out="out"):
        """The rows of compare.csv by configuration."""
        with open(self.folder / out / "compare.csv", newline="") as file:
            return {row["configuration"]: row for row in csv.DictReader(file)}

    def golden(self, name, text, besides=""):
        """besides: another golden file, whose lines are left out."""
        if besides:
            known = (GOLDEN / besides).read_text().splitlines()
            text = "".join(f"{line}\n" for line in text.splitlines() if line not in known)
        if os.environ.get("UPDATE_GOLDEN"):
            GOLDEN.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text)
        self.assertEqual(text, (GOLDEN / name).read_text())

    def recorded(self):
        """Arguments of the comparison of all runs above."""
        files = {"bf16": [BF16, BF16_AGAIN], "delayed": [FP8, FP8_AGAIN], "big": [BIG], "h100": [OTHER_GPU]}
        for name, logs in files.items():
            for i, log in enumerate(logs, 1):
                self.write(f"{name}.{i}.jsonl", log)
        return [f"{name}={name}.{i}.jsonl" for name, logs in files.items() for i in range(1, len(logs) + 1)]
