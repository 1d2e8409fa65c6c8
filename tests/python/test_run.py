"""tests/run.py: what it makes of tests that fail."""
import contextlib
import io
import os
import tempfile
import unittest

from tests import run


class FailsAtFirst:   # no TestCase, so that it is not run as a test of its own
    marker = ""

    def runTest(self):
        if not os.path.exists(self.marker):
            with open(self.marker, "w"):
                self.fail("at first")


class FailsAlways:
    measures_time = True

    def runTest(self):
        self.fail("always")


class Repeated(unittest.TestCase):
    def reports(self, test, **attributes):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as shown:
            attributes["marker"] = os.path.join(folder, "marker")
            kind = type(test.__name__, (test, unittest.TestCase), attributes)
            return run.run_all([[kind()]], 2), shown.getvalue()

    def test_what_measures_time_is_repeated_once(self):
        (report,), shown = self.reports(FailsAtFirst, measures_time=True)
        self.assertEqual((report["run"], report["failures"]), (1, []))
        self.assertIn("at first", shown)
        self.assertIn("FailsAtFirst.runTest measures time and failed beside other tests: it is repeated alone", shown)
        (report,), shown = self.reports(FailsAlways)
        self.assertEqual(len(report["failures"]), 1)
        self.assertEqual(shown.count("AssertionError: always"), 2)

    def test_no_other_test_is_repeated(self):
        (report,), shown = self.reports(FailsAtFirst)
        self.assertEqual(len(report["failures"]), 1)
        self.assertNotIn("repeated", shown)
