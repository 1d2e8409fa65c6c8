"""Shared by all checks: runs commands and the trainer, keeps their output, and collects failures."""
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.comparison.tables import RECIPES  # noqa: E402,F401  (for the checks)

ROOT = Path(__file__).resolve().parents[2]
TEXT_ENDINGS = (".cpp", ".h", ".py", ".cu", ".cuh")


class Check:
    def __init__(self, options):
        self.options, self.failed = options, []
        self.out, self.build = Path(options.out).resolve(), Path(options.build)
        self.mpirun = shlex.split(options.mpirun)
        self.out.mkdir(parents=True, exist_ok=True)

    def fail(self, text):
        self.failed.append(text)

    def make(self, *targets):
        if self.options.no_build:
            return
        with open(self.out / "build.txt", "w") as text:
            if subprocess.call(["make", f"-j{self.options.jobs}", "DEVICE=cuda", *targets], cwd=ROOT, stdout=text,
                               stderr=subprocess.STDOUT):
                sys.exit("".join((self.out / "build.txt").read_text().splitlines(True)[-20:]))

    def run_parts(self, parts):
        """Runs those that --parts names, or all."""
        for part in self.options.parts or parts:
            print(f"=== {part}", flush=True)
            parts[part](self)

    def describe_gpus(self):
        self.run("gpus", ["nvidia-smi", "--query-gpu=index,name,pci.bus_id,power.limit,driver_version",
                          "--format=csv,noheader"], expect=None)

    def run(self, name, command, expect=0, timeout=None, **environment):
        """Runs a command from the repository's root; returns its output, which is also OUT/NAME.txt. An exit code
        other than `expect` (None: any) is a failure."""
        path = self.out / f"{name}.txt"
        with open(path, "w") as text:
            try:
                code = subprocess.run([str(word) for word in command], cwd=ROOT, stdout=text, stderr=subprocess.STDOUT,
                                      env={**os.environ, **environment}, timeout=timeout).returncode
            except subprocess.TimeoutExpired:
                code = f"none within {timeout} s"
            except OSError as error:
                code = f"none: {error}"
        output = path.read_text(errors="replace")
        if expect is not None and code != expect:
            self.fail(f"{name} (exit {code}, not {expect})")
            print("".join(output.splitlines(True)[-3:]), end="")
        return output

    def ranks(self, name, count, command, **how):
        """Like run(), on `count` ranks."""
        launcher = [*self.mpirun, "-np", str(count)] if count > 1 else []
        return self.run(name, [*launcher, *command], timeout=300, **how)

    def train(self, name, ranks, binary, *options, **environment):
        """Runs the trainer; returns the path of its log, OUT/NAME.jsonl."""
        log = self.out / f"{name}.jsonl"
        log.unlink(missing_ok=True)
        self.ranks(name, ranks, [self.build / binary, "--train-data", self.shards(), "--log-file", log, *options,
                                 *shlex.split(self.options.options)], **environment)
        return log

    def shards(self):
        """The glob of token shards to train on: --shards, or this repository's own text as bytes."""
        if not self.options.shards:
            folder = self.out / "data"
            shutil.rmtree(folder, ignore_errors=True)
            text = sorted(path for part in ("llmc", "tests", "data", "dev", "scripts")
                          for path in (ROOT / part).rglob("*") if path.name.endswith(TEXT_ENDINGS))
            subprocess.run([sys.executable, ROOT / "data" / "prepare_text.py", "--tokenizer", "bytes", "--out", folder,
                            "--valid-fraction", "0.05", "--quiet", *text], check=True)
            self.options.shards = f"{folder}/train_*.bin"
        return self.options.shards

    def must_say(self, name, text):
        if text not in (self.out / f"{name}.txt").read_text(errors="replace"):
            self.fail(f"{name} (does not say: {text})")


def show(output, *texts):
    """Prints the lines that contain one of the texts."""
    print("\n".join(line for line in output.splitlines() if any(text in line for text in texts)), flush=True)
