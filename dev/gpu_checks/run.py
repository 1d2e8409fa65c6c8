#!/usr/bin/env python3
"""Checks for a machine with GPUs, to run after a change. All outputs are in one folder, and failures are listed at the
end.

    dev/gpu_checks/run.py WHAT OUT [OPTION...]

WHAT: kernels, offload (1 GPU), comm (all GPUs there are), zero, context, experts, watch (2 or more), resume (2, 4
or 8); `WHAT --help` says what it does. Exit status: 0 all passed, 1 something failed. Standard library only.
"""
import argparse
import os
import subprocess
import sys

import comm
import context
import experts
import kernels
import offload
import resume
import watch
import zero
from check import Check

SUBJECTS = {"kernels": kernels, "offload": offload, "comm": comm, "zero": zero, "context": context, "experts": experts,
            "resume": resume, "watch": watch}
# Option, default, help; those that begin with the name of a subject are for it alone.
OPTIONS = (
    ("--shards", "", "glob of token shards, quoted; without it the text of this repository, as bytes"),
    ("--build", "build/cuda", "folder of the executables"),
    ("--jobs", os.cpu_count(), "of make"),
    ("--mpirun", "mpirun --allow-run-as-root --oversubscribe --bind-to none", "the launcher"),
    ("--options", "", "added to every run of the trainer, quoted"),
    ("--model", "", "zero: the model of the table; resume, watch: options of the model, quoted"),
    ("--micro", 1, "zero: micro-batch of the table"),
    ("--save", "", "resume: folder of the checkpoints (OUT/saved)"),
    ("--timeout", 10, "watch: --comm-timeout"),
    ("--ranks", 0, "number of ranks (zero, context, experts, watch: 2; resume: all GPUs)"),
    ("--steps", 0, "offload, zero, context: steps of a timed run (8, 10, 10); resume: between checkpoints (4)"),
)


def gpu_count():
    try:
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    except OSError:
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, module in SUBJECTS.items():
        subject = subjects.add_parser(name, description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter)
        subject.add_argument("out", metavar="OUT")
        for option, default, text in OPTIONS:
            subject.add_argument(option, default=default, type=type(default), help=f"{text} (default: {default!r})")
        subject.add_argument("--no-build", action="store_true", help="take the executables as they are")
        subject.add_argument("--parts", nargs="*", choices=getattr(module, "PARTS", None), help="only these")
        subject.add_argument("--recipes", nargs="*", default=["bf16", "delayed"], help="resume: (bf16 delayed)")
    options = parser.parse_args()
    options.gpus = gpu_count()
    check = Check(options)
    if options.what in ("zero", "context", "experts"):
        options.ranks = options.ranks or 2
    try:
        SUBJECTS[options.what].run(check)
    except (OSError, ValueError, KeyError) as error:
        check.fail(f"{type(error).__name__}: {error}")
    for failure in check.failed:
        print(f"{options.what}: failed: {failure}", file=sys.stderr)
    if not check.failed:
        print(f"{options.what}: all passed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
