"""Shared by the tests of the Python scripts: a folder for each test, and calls of a script in this process."""
import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from llmfp8.support import run_main

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"


def has(package):
    return importlib.util.find_spec(package) is not None


def call_main(main, name, *arguments, cwd=None):
    """Calls the main() of a script, since starting Python takes longer than most tests. Returns what subprocess.run()
    would."""
    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    words = [str(name), *map(str, arguments)]
    os.chdir(cwd or before)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", words):
            run_main(main)
    except SystemExit as end:
        return subprocess.CompletedProcess(words, end.code, out.getvalue(), err.getvalue())
    finally:
        os.chdir(before)
    raise AssertionError("run_main() always ends with SystemExit")


class FolderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="llmc-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def file(self, name, content):
        """Writes a file in the folder; returns its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
