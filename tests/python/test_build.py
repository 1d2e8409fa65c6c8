"""The Makefile's detection of the machine, and the names of tests in dev/ci. Standard library only."""
import fnmatch
import glob
import os
import re
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADERS = ("nlohmann/json.hpp", "xxhash.h", "doctest/doctest.h")


def planned(flags):
    """`make -n` with only the headers that `flags` name, and without the variables of a make that runs the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-n", "DEVICE=cpu", "all", f"CPPFLAGS=-nostdinc {flags}"], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=120, check=False)


class HeadersTest(unittest.TestCase):
    def test_each_missing_header_is_named(self):
        with tempfile.TemporaryDirectory(prefix="llmc-build-") as folder:
            for header in HEADERS:
                path = os.path.join(folder, header)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8"):
                    pass
            self.assertEqual(planned(f"-I{folder}").returncode, 0)
            for header, name in ("xxhash.h", "xxhash"), ("nlohmann/json.hpp", "nlohmann/json"):
                os.rename(os.path.join(folder, header), os.path.join(folder, "away"))
                done = planned(f"-I{folder}")
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(f"missing: {name};", done.stderr)
                os.rename(os.path.join(folder, "away"), os.path.join(folder, header))


class TestFullTest(unittest.TestCase):
    def test_each_pattern_of_a_part_matches_a_test_case(self):
        with open(os.path.join(ROOT, "dev/ci/test_full.sh"), encoding="utf-8") as script:
            patterns = re.findall(r'"([^"]*)"', re.search(r"cases=\((.*?)\)\n", script.read(), re.S)[1])
        self.assertGreater(len(patterns), 3)
        names = []
        for path in glob.glob(os.path.join(ROOT, "tests/*/test_*.cpp")):
            with open(path, encoding="utf-8") as source:
                names += re.findall(r'TEST_CASE\("([^"]*)"', source.read())
        unknown = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        self.assertEqual(unknown, [])
