"""The Makefile's detection of the machine and of the commit, what git and docker leave out, and the names of tests in
dev/ci. Standard library only."""
import fnmatch
import glob
import os
import re
import runpy
import shutil
import subprocess
import tempfile
import unittest

from tests.support.run_command import run_command

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADERS = ("nlohmann/json.hpp", "xxhash.h", "doctest/doctest.h")


def make(*words, cwd=ROOT, **variables):
    """make, without the variables of a make that runs the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return run_command(["make", *words], None, cwd=cwd, env={**env, **variables})


def planned(flags):
    """`make -n` with only the headers that `flags` name."""
    return make("-n", "DEVICE=cpu", "all", f"CPPFLAGS=-nostdinc {flags}")


@unittest.skipUnless(shutil.which("git"), "needs git")
class GitTest(unittest.TestCase):
    def test_the_commit_is_this_folders_or_given_and_never_that_of_a_repository_around_it(self):
        with tempfile.TemporaryDirectory(prefix="llmc-build-") as folder:
            def git(*words):
                identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
                subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)
            git("init")
            git("commit", "--allow-empty", "-m", "around")
            inner = os.path.join(folder, "inner")
            os.mkdir(inner)
            for name in ("Makefile", "llmc", "dev", "tests"):
                os.symlink(os.path.join(ROOT, name), os.path.join(inner, name))

            def commit(**variables):
                done = make("-n", "DEVICE=cpu", "TABLE=0", "all", cwd=inner, **variables)
                self.assertEqual(done.returncode, 0, done.stderr)
                with open(os.path.join(inner, "build/cpu/version.cpp"), encoding="utf-8") as version:
                    return re.search(r'= "(.*)"', version.read())[1]
            self.assertEqual(commit(), "unknown")
            self.assertEqual(commit(LLMC_COMMIT="0123456789ab"), "0123456789ab")
            os.rename(os.path.join(folder, ".git"), os.path.join(inner, ".git"))
            self.assertRegex(commit(LLMC_COMMIT="unused"), "^[0-9a-f]{12}$")

    def test_git_and_docker_ignore_what_documented_commands_write(self):
        words = []
        for path in glob.glob("**/*.md", root_dir=ROOT, recursive=True):
            if not path.startswith(("dev", "build", "tests", ".")):
                with open(os.path.join(ROOT, path), encoding="utf-8") as text:
                    words += re.findall(r"--(?:out|save) ([a-z]\w*)(?=[ /`\n])", text.read())
        folders = {"logs", *words} - {"and", "of", "places"}   # the recipes write to logs
        self.assertGreaterEqual(folders, {"shards", "out", "runs"})
        with open(os.path.join(ROOT, ".gitignore"), encoding="utf-8") as git:
            self.assertEqual({f"/{name}/" for name in folders} - set(git.read().split()), set())
        with open(os.path.join(ROOT, ".dockerignore"), encoding="utf-8") as docker:
            self.assertEqual(folders - set(docker.read().split()), set())


@unittest.skipIf(os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi"), "there is a GPU")
class NoGpuTest(unittest.TestCase):
    def test_test_gpu_says_so_before_it_installs_or_compiles(self):
        done = make("test-gpu")
        self.assertEqual(done.returncode, 2)
        self.assertIn("make test-gpu: no GPU is found", done.stderr)
        self.assertEqual(done.stdout, "")


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

    def test_each_planted_fault_has_one_place(self):
        for name, path, text, _ in runpy.run_path(os.path.join(ROOT, "dev/ci/planted_faults.py"))["FAULTS"]:
            with open(os.path.join(ROOT, path), encoding="utf-8") as source:
                self.assertEqual(source.read().count(text), 1, name)
