"""Logs with fields of wrong types, or malformed in other ways, are read and exported, or refused with the line; there
is never a traceback."""
import io
import json

from tests.python.test_hostile_imports import check_mutations, mutated
from tests.support.folder import FolderTest

from llmfp8.alerts import WatchedLog, message
from llmfp8.live_view import WatchedRun, frame
from llmfp8.report.page import report
from llmfp8.run_export import TEXT_FORMATS
from llmfp8.run_log import read_log
from llmfp8.support import InputError
from tests.support.log_tools import LOGS

VALUES = [None, True, -1, 0, 1e308, "nan", "inf", "x", [], {}, [1], {"a": 1}, 2 ** 70, "1", 0.5, float("nan")]


def with_other_fields(chance, text):
    """Some records lose a field or get another value in it, also in nested fields."""
    lines = text.split(b"\n")
    for _ in range(chance.choice([1, 2, 5])):
        at = chance.randrange(len(lines))
        try:
            inner = record = json.loads(lines[at])
            key = chance.choice(list(record))
        except (ValueError, IndexError):   # no fields
            continue
        while chance.random() < 0.7 and inner[key]:
            below = chance.choice(inner[key]) if isinstance(inner[key], list) else inner[key]
            if not isinstance(below, dict) or not below:
                break
            inner, key = below, chance.choice(list(below))
        if chance.random() < 0.2:
            del inner[key]
        else:
            inner[key] = chance.choice(VALUES)
        lines[at] = json.dumps(record).encode()
    return b"\n".join(lines)


def watched(path):
    """scripts/watch shows something of any file."""
    run = WatchedRun(path, None, True)
    run.look()
    frame([run], 80, 24, getattr(run, "written", 0) + 100)


def alerted(path):
    """scripts/alerts takes any log."""
    log = WatchedLog(path)
    log.known_s = -1e308
    try:
        log.poll()
    except InputError:   # no log
        return
    log.look(last=True)
    for alert in log.alerts:
        message(alert, 1, str(path))


class HostileLogs(FolderTest):
    def test_mutations(self):
        """LLMC_LOGS sets the number of logs, and LLMC_SEED the first number."""
        seeds = []
        for path in sorted(LOGS.glob("*.jsonl")):
            lines = path.read_bytes().split(b"\n")
            seeds.append(b"\n".join(lines[:1] + [line for line in lines[1:] if len(line) < 3000][:40]) + b"\n")
        path = self.folder / "log.jsonl"

        def accept(number, chance):
            text = chance.choice(seeds)
            text = mutated(chance, text, seeds) if chance.random() < 0.4 else with_other_fields(chance, text)
            path.write_bytes(text)
            watched(path)
            alerted(path)
            run = read_log(path, "\x1b<run>", number % 2 == 0)
            for step in list(run.steps)[:3]:
                run.tokens_at(step - 1)
            run.warnings()
            for export in TEXT_FORMATS.values():
                export(run, io.StringIO())
            self.assertTrue(number % 4 or report([run]).endswith("</html>\n"))

        check_mutations(self, "LLMC_LOGS", accept)
