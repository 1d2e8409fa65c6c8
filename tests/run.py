#!/usr/bin/env python3
"""Runs the Python tests side by side. Most of them wait for others, so there are more processes than cores.

    tests/run.py [--jobs N] [NAME...]

NAME is a part of a test's name (tests.python.test_lint.LintRules.test_links); without one all of tests/*/test_*.py run.
Each test runs in a separate process, long ones first; a class with a setUpClass runs as one test. Classes with
`measures_time` keep their priority, and all others run with a lower one (nice). If a test of such a class fails, other
tests may have taken the time that it measures: it runs once more when all others have ended, and only that counts. The
output of a failed test is shown whole, and a line says why a test was skipped. The last lines are those of unittest.
Standard library only.
"""
import argparse
import contextlib
import glob
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MEMORY, MEMORY_BYTES = "/dev/shm", 2 << 30   # free, at least
LIMIT_S = 900   # of a process; a longer one counts as hanging
# The longest tests, which begin first; --times names candidates.
LONG = ("test_every_collective_gives_what_it_must", "test_watch.WatchTest", "test_other_configurations_get_no_ratio",
        "test_pasted_commands", "test_walkthrough", "test_troubleshooting", "test_doctor",
        "test_a_library_that_does_not_serve", "test_golden_losses", "test_ranks", "test_comm", "test_train",
        "test_compare", "test_import_config")


def all_tests():
    """Every test by its name, in the order of files and lines."""
    def flat(suite):
        for test in suite:
            yield from flat(test) if isinstance(test, unittest.TestSuite) else [test]
    names = [os.path.relpath(path, ROOT)[:-len(".py")].replace(os.sep, ".")
             for path in sorted(glob.glob(os.path.join(ROOT, "tests", "*", "test_*.py")))]
    # A module that cannot be loaded counts as a failed test.
    return list(flat(unittest.defaultTestLoader.loadTestsFromNames(names)))


def in_processes(tests):
    """Lists of tests, one for each process, the longest first."""
    units = {}
    for test in tests:
        whole = type(test).setUpClass.__func__ is not unittest.TestCase.setUpClass.__func__
        units.setdefault(type(test) if whole else test, []).append(test)
    place = {part: i for i, part in enumerate(LONG)}
    return sorted(units.values(), key=lambda unit: min((i for part, i in place.items() if part in unit[0].id()),
                                                       default=len(LONG)))


def measures_time(tests):
    return getattr(tests[0], "measures_time", False)


class Process:
    """A process that runs tests; their output goes to a file."""

    def __init__(self, tests):
        self.tests, self.begin = tests, time.monotonic()
        self.file = tempfile.TemporaryFile("w+")
        self.pipe, sender = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            self.run(sender)
        sender.close()

    def run(self, sender):
        os.setsid()   # with everything it starts, so that it can be ended as a whole
        if not measures_time(self.tests):
            os.nice(10)
        os.dup2(self.file.fileno(), 1)
        os.dup2(self.file.fileno(), 2)
        result = unittest.TestResult()
        result.buffer = True
        unittest.TestSuite(self.tests).run(result)
        sender.send({"run": result.testsRun,
                     "failures": [(str(test), text) for test, text in result.failures]
                     + [(str(test), "unexpected success\n") for test in result.unexpectedSuccesses],
                     "errors": [(str(test), text) for test, text in result.errors],
                     "skipped": [(test.id(), why) for test, why in result.skipped]})
        sys.stdout.flush()
        os._exit(0)

    def end(self):
        """The report of the process, when it has ended or was killed."""
        late = time.monotonic() - self.begin >= LIMIT_S
        try:
            report = None if late else self.pipe.recv()
        except EOFError:
            report = None
        if report is None:
            self.kill()
        _, status, used = os.wait4(self.pid, 0)
        if report is None:
            why = f"no end after {LIMIT_S} s" if late else f"the process ended with {status}"
            report = {"run": len(self.tests), "failures": [], "skipped": [],
                      "errors": [(str(test), why + "\n") for test in self.tests]}
        self.file.seek(0)
        report.update(printed=self.file.read(), seconds=time.monotonic() - self.begin,
                      cpu_seconds=used.ru_utime + used.ru_stime)
        self.file.close()
        self.pipe.close()
        return report

    def kill(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:   # it has not become a group leader yet
            os.kill(self.pid, signal.SIGKILL)


def show(report):
    for kind in ("failures", "errors"):
        for name, text in report[kind]:
            print("=" * 70 + f"\n{kind.upper()[:-1]}: {name}\n" + "-" * 70 + f"\n{text}")
    if report["printed"] and failed(report):
        print(f"printed by its processes:\n{report['printed']}")
    sys.stdout.flush()


def failed(report):
    return report["failures"] or report["errors"]


def run_all(units, jobs):
    """The reports of all processes. What measures time and failed beside others is repeated alone."""
    reports = run(units, jobs)
    for i, report in enumerate(reports):
        if failed(report) and measures_time(report["tests"]):
            print(f"{report['name']} measures time and failed beside other tests: it is repeated alone", flush=True)
            reports[i], = run([report["tests"]], 1)
    return reports


def run(units, jobs):
    """The reports of all processes in the order of their ends."""
    waiting, running, reports = list(units), {}, []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                process = Process(waiting.pop(0))
                running[process.pipe] = process
            ready = multiprocessing.connection.wait(list(running), timeout=1)
            late = [pipe for pipe, process in running.items() if time.monotonic() - process.begin >= LIMIT_S]
            for pipe in {*ready, *late}:
                process = running.pop(pipe)
                reports.append({"name": process.tests[0].id(), "tests": process.tests, **process.end()})
                show(reports[-1])
    finally:
        for process in running.values():
            process.kill()
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(16, 3 * len(os.sched_getaffinity(0))),
                        help="processes at a time (default %(default)s)")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="name the N longest (default %(default)s)")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    os.chdir(ROOT)
    sleeping = os.path.join(os.environ.get("LLMC_BUILD", ""), "fake", "sleeping_yield.so")
    if os.path.exists(sleeping):   # for the ranks alone
        os.environ.setdefault("OMPI_MCA_mca_base_env_list", f"LD_PRELOAD={sleeping}")
    with temporary_folder():
        return run_named(options)


@contextlib.contextmanager
def temporary_folder():
    """The folder of temporary files: in memory if there is room, because what is saved is synced, and that waits for
    the disk."""
    try:
        memory = MEMORY if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES else None
    except OSError:
        memory = None
    with tempfile.TemporaryDirectory(prefix="llmc-tests-", dir=memory, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield


def run_named(options):
    begin = time.monotonic()
    tests = [test for test in all_tests() if not options.names or any(name in test.id() for name in options.names)]
    reports = run_all(in_processes(tests), options.jobs)
    counts = {kind: sum(len(report[kind]) for report in reports) for kind in ("failures", "errors", "skipped")}
    for report in sorted(reports, key=lambda report: -report["seconds"])[:options.times]:
        print(f"{report['seconds']:6.1f} s, {report['cpu_seconds']:5.1f} s of CPU: {report['name']}")
    for name, why in sorted(pair for report in reports for pair in report["skipped"]):
        print(f"skipped {name}: {why}")
    said = ", ".join(f"{kind}={count}" for kind, count in counts.items() if count)
    print("-" * 70 + f"\nRan {sum(report['run'] for report in reports)} tests in {time.monotonic() - begin:.3f}s\n")
    print(("FAILED" if failed(counts) else "OK") + (f" ({said})" if said else ""))
    return 1 if failed(counts) else 0


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    sys.exit(main())
