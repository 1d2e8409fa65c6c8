"""Reads the JSONL log of a run (llmc/train/log/run_log.h has its fields), whole or while the run goes on.

Standard library only."""
import math
import os
from pathlib import Path

from .support import InputError, count_text, parse_json, require_regular

LOG_FORMAT = 1
ENDS = ("stop", "diverged", "failed")   # kinds of the last event of a run that was not killed
MOST_OF_A_LINE = 1 << 26   # bytes; a file without line ends is no log
# Fields that readers of a log need; a record may have more.
FIELDS = {
    "header": ("step", "unix_time", "command", "commit", "device", "world", "flops_per_token", "config"),
    "step": ("step", "train_iters", "loss", "grad_norm", "grad_mul", "lr", "step_seconds",
             "tokens_per_second", "samples_per_second", "mfu", "memory_gib", "eta_seconds", "samples", "tokens",
             "counted_tokens", "skipped"),
    "eval": ("step", "loss", "counted_tokens"),
    "hellaswag": ("step", "accuracy", "examples"),
    "fp8": ("step", "tensors"),
    "exponents": ("step", "tensors"),
    "grad_wire": ("step", "gradients"),
    "checkpoint": ("step", "path"),
    "event": ("step", "kind", "text"),
}
# Fields that a record may have.
OPTIONAL = {
    "header": ("communication",),
    "step": ("gpu_utilization", "power_w", "sm_clock_mhz", "gpu_temperature_c", "gpu_memory_gib", "energy_j",
             "joules_per_token"),
}
# Types of these fields; every other field of the table is a number, and may be "nan", "inf" or "-inf".
KINDS = {"command": str, "commit": str, "path": str, "kind": str, "text": str, "device": dict, "config": object,
         "tensors": list, "gradients": list, "communication": (list, type(None)), "skipped": (bool, int)}
WHOLE = ("step", "train_iters", "samples", "tokens", "counted_tokens", "examples", "world")
MAY_BE_NULL = ("mfu", "eta_seconds", "memory_gib")
ENTRIES = {"tensors": ("flushed", "saturated", "nonfinite"), "gradients": ("relative_l2",)}
EXPONENTS = ("amax", "scale")   # numbers of a tensor in a record of type exponents
# Numbers that such a tensor may also have.
SHARES = ("tensorwise_flushed", "delayed_saturated", "delayed_flushed", "blockwise_flushed_at_most")
BLOCK_SCALES = ("min", "median", "max", "at_ends", "zeros")
NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) or (isinstance(value, str)
                                                                               and value in NOT_IN_JSON)


def has_scales(tensor):
    """Whether a tensor's block_scales, if it has any, are valid."""
    blocks = tensor.get("block_scales", dict.fromkeys(BLOCK_SCALES, 0))
    return isinstance(blocks, dict) and all(is_number(blocks.get(name)) for name in BLOCK_SCALES)


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2 ** 63


def has_exponents(tensor):
    """Whether an entry is a tensor's histogram of exponents."""
    counts, first = tensor.get("counts"), tensor.get("first")
    return (isinstance(tensor.get("name"), str) and all(is_number(tensor.get(name)) for name in EXPONENTS)
            and all(is_number(tensor.get(name, 0)) for name in SHARES)
            and is_count(tensor.get("zeros")) and is_count(tensor.get("nonfinite"))
            and isinstance(first, int) and not isinstance(first, bool) and abs(first) < 200
            and isinstance(counts, list) and len(counts) < 256 and all(map(is_count, counts)))


def field_error(record, field):
    """Describes what is wrong with a field of a record; "" if nothing is."""
    value = record[field]
    if field in KINDS:
        if not isinstance(value, KINDS[field]):
            return f"whose {field} is something else"
        if record["type"] == "exponents" and field == "tensors":
            right = all(isinstance(tensor, dict) and has_exponents(tensor) for tensor in value)
            return "" if right else "whose tensors are not histograms"
        if field in ENTRIES and not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) and all(
                is_number(entry.get(name)) for name in ENTRIES[field]) for entry in value):
            return f"whose {field} are not entries with a name and numbers"
        if field == "communication" and not all(isinstance(entry, dict) for entry in value or ()):
            return "whose communication is something else"
        if field == "tensors" and not all(map(has_scales, value)):
            return "whose block_scales are not numbers"
        return ""
    if field in WHOLE:
        right = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2 ** 63
        return "" if right and (field != "world" or value > 0) else f"whose {field} is not a number"
    return "" if is_number(value) or value is None and field in MAY_BE_NULL else f"whose {field} is not a number"


def numbers(record):
    """The record with "nan", "inf" and "-inf" as floats."""
    return {key: NOT_IN_JSON.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def with_block_scales(tensor):
    """The tensor with the values of its "block_scales" as additional fields: scale_min, scale_median, ..."""
    blocks = tensor.pop("block_scales", {})
    return {**tensor, **{f"scale_{name}": value for name, value in numbers(blocks).items()}}


class RunLog:
    """One run's log. The header of a resumed process drops the records after its checkpoint, so that for a step
    that was done twice the later record counts.

    poll() reads new records, so that a log can be followed. A last line without its end is not complete yet, or never
    will be: `torn`. Any other malformed line is an error with file and line; with skip_damaged it is left out and
    listed in `damaged`.
    """

    def __init__(self, path, name=None, skip_damaged=False):
        self.path, self.skip_damaged = str(path), skip_damaged
        self.name = name or Path(path).stem
        self._file = None   # device and inode of the file that was read
        self._forget()

    def _forget(self):
        self._offset = self._line = 0
        self._begin = b""   # the first bytes of the file, which contain the time of its first header
        self.headers, self.events, self.checkpoints = [], [], []
        self.steps, self.evals, self.hellaswag, self.fp8, self.wire = {}, {}, {}, {}, {}   # records by step
        self.torn, self.damaged = False, []
        self.redone = 0   # steps that were done again after a resume

    # ---- reading ----

    def poll(self):
        """Reads new lines; returns whether there were any."""
        require_regular(self.path)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            # A resume rewrites the log without the steps that it does again; a new run rewrites it with a header of
            # another time.
            if ((status.st_dev, status.st_ino) != self._file or status.st_size < self._offset
                    or file.read(len(self._begin)) != self._begin):
                self._forget()
                self._file = status.st_dev, status.st_ino
            file.seek(self._offset)
            read = 0
            while line := file.readline(MOST_OF_A_LINE):
                if not line.endswith(b"\n"):
                    if len(line) == MOST_OF_A_LINE:
                        raise self._not_a_log()
                    break
                if self._offset == 0:
                    self._begin = line[:200]
                self._line += 1
                self._offset += len(line)
                read += 1
                self._take(line[:-1])
            self.torn = bool(line)
        return read > 0

    def _take(self, line):
        try:
            record = parse_json(line)
            kind = record["type"]
            for field in FIELDS.get(kind, ()):
                if field not in record:
                    raise ValueError(f"a record of type {kind} without {field}")
            for field in (*FIELDS.get(kind, ()), *(field for field in OPTIONAL.get(kind, ()) if field in record)):
                if error := field_error(record, field):
                    raise ValueError(f"a record of type {kind} {error}")
            if not self.headers and kind != "header":
                raise self._not_a_log()
            take = getattr(self, "_take_" + str(kind), None)
            if take:   # other records, such as samples, are not needed
                take(record)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if not self.headers:
                raise self._not_a_log() from None
            reason = str(error) if "a record of type" in str(error) else "not a record of a log"
            where = f"{self.path}:{self._line}: damaged line: {reason}"
            if not self.skip_damaged:
                raise InputError(f"{where}") from None
            self.damaged.append(where)

    def _not_a_log(self):
        return InputError(f"{self.path}:{self._line}: not the log of a run, which begins with a header")

    def _take_header(self, record):
        if record.get("format") != LOG_FORMAT:
            raise InputError(f"{self.path}:{self._line}: a log of format {record.get('format')}; this reads format "
                             f"{LOG_FORMAT}")
        begin = record["step"]
        self.redone += sum(step > begin for step in self.steps)
        for records in (self.steps, self.evals, self.hellaswag, self.fp8, self.wire):
            for step in [step for step in records if step > begin]:
                del records[step]
        self.events = [event for event in self.events if event["step"] <= begin]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint["step"] <= begin]
        self.headers.append(numbers(record))

    def _take_step(self, record):
        self.steps[record["step"]] = numbers(record)

    def _take_eval(self, record):
        self.evals[record["step"]] = numbers(record)

    def _take_hellaswag(self, record):
        self.hellaswag[record["step"]] = numbers(record)

    def _take_fp8(self, record):
        self.fp8[record["step"]] = {tensor["name"]: with_block_scales(numbers(tensor))
                                    for tensor in record["tensors"]}

    def _take_grad_wire(self, record):
        self.wire[record["step"]] = {kind["name"]: numbers(kind) for kind in record["gradients"]}

    def _take_checkpoint(self, record):
        self.checkpoints.append(record)

    def _take_event(self, record):
        self.events.append(record)

    # ---- the log's content ----

    @property
    def finished(self):
        """Whether the log has the end of the run, which may be an error; the log of a killed run has none."""
        return bool(self.events) and self.events[-1]["kind"] in ENDS

    @property
    def synthetic(self):
        """Whether the run trained on synthetic tokens, so that its losses mean nothing."""
        return any(header.get("synthetic_data") for header in self.headers)

    @property
    def resumed_at(self):
        """Steps of the checkpoints that were resumed."""
        return [header["step"] for header in self.headers if header["step"] > 0]

    def step_list(self):
        return [self.steps[step] for step in sorted(self.steps)]

    def header_at(self, step):
        """The header of the process that did this step (step 0: the first)."""
        begun = [header for header in self.headers if header["step"] < max(step, 1)]
        return begun[-1] if begun else self.headers[0]

    def tokens_at(self, step):
        """Tokens consumed after `step` steps; None if the log does not have it."""
        if step in self.steps:
            return self.steps[step]["tokens"]
        if step == 0:
            return 0
        after = self.steps.get(step + 1)   # a log that begins with a resume
        tokens = after["tokens_per_second"] * after["step_seconds"] if after else math.nan
        return after["tokens"] - round(tokens) if math.isfinite(tokens) else None

    def warnings(self):
        """Lines about damage, synthetic data and repeated steps."""
        lines = list(self.damaged)
        if self.synthetic:
            lines.append(f"{self.path}: synthetic data: the losses mean nothing")
        if self.torn:
            lines.append(f"{self.path}: the last line is cut off and left out")
        if self.redone:
            done = count_text(self.redone, "step was", "steps were")
            lines.append(f"{self.path}: {done} done again after a resume; what came later counts")
        return lines


def logs_in(path):
    """The logs that a path names: itself, or those in a folder."""
    if not os.path.isdir(path):
        return [str(path)]
    found = sorted(map(str, Path(path).glob("*.jsonl")))
    if not found:
        raise InputError(f"{path}: no log (*.jsonl) in this folder; --log-file of a run writes one")
    return found


def named_logs(arguments):
    """[(path, name)] of NAME=LOG or LOG, or of the logs in a folder; logs of the same file name are told apart by their
    folders."""
    pairs = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        path, name = (argument, None) if not equals or os.path.exists(argument) else (path, name)
        logs = logs_in(path)
        if name and len(logs) > 1:
            raise InputError(f"{argument}: one name for {len(logs)} logs in this folder; leave the name out")
        pairs += [(log, name) for log in logs]
    stems = [Path(path).stem for path, _ in pairs]
    return [(path, name or (stem if stems.count(stem) == 1 else str(Path(path).with_suffix(""))))
            for (path, name), stem in zip(pairs, stems)]


def read_log(path, name=None, skip_damaged=False):
    """Reads a whole log; one without a record is an error."""
    run = RunLog(path, name, skip_damaged)
    try:
        run.poll()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if not run.headers:
        raise InputError(f"{path}: no log of a run: no line is complete")
    return run
