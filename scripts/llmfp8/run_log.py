"""Reads the JSONL log of a run (llmc/train/log/run_log.h has its fields), whole or while the run goes on.

Standard library only."""
import math
import os
import signal
import sys
import time
from pathlib import Path

from .support import InputError, count_text, parse_json, require_regular

LOG_FORMAT = 1
ENDS = ("stop", "diverged", "failed")   # kinds of the last event of a run that was not killed
MOST_OF_A_LINE = 1 << 26   # bytes; a file without line ends is no log
BY_STEP = {"step": "steps", "eval": "evals", "hellaswag": "hellaswag"}
NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
BLOCK_SCALES = ("min", "median", "max", "at_ends", "zeros")
END_OF_ANOTHER_S = 60   # an end that is older when a script starts to follow is of an earlier process of the run
QUIET_S = 10   # without a record after SIGTERM, until a log is not followed any more


def is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2 ** 63


def is_number(value):
    return isinstance(value, float) or is_whole(value) or isinstance(value, str) and value in NOT_IN_JSON


def is_text(value):
    return isinstance(value, str)


def is_object(value):
    return isinstance(value, dict)


def or_null(check):
    return lambda value: value is None or check(value)


def objects(check=is_object):
    """A check of lists of objects."""
    return lambda value: isinstance(value, list) and all(is_object(entry) and check(entry) for entry in value)


def named_numbers(needed, others=()):
    """A check of an object with a name, numbers, and numbers that may be missing."""
    return lambda entry: (is_text(entry.get("name")) and all(is_number(entry.get(field)) for field in needed)
                          and all(is_number(entry.get(field, 0)) for field in others))


def is_tensor(entry):
    blocks = entry.get("block_scales", dict.fromkeys(BLOCK_SCALES, 0))
    return (named_numbers(("flushed", "saturated", "nonfinite"), ("amax", "quant_mul"))(entry) and is_object(blocks)
            and all(is_number(blocks.get(name)) for name in BLOCK_SCALES))


are_contents = objects(lambda entry: is_text(entry.get("fingerprint")) and is_whole(entry.get("tokens", 0)))


def fields(names, check):
    return dict.fromkeys(names.split(), check)


# The fields that readers of a log need, with a check of each; a record may have more.
FIELDS = {
    "header": {**fields("command commit", is_text), **fields("device config", is_object),
               **fields("unix_time flops_per_token", is_number), "world": lambda value: is_whole(value) and value > 0},
    "step": {**fields("train_iters samples tokens counted_tokens", is_whole), "skipped": lambda value: value in (0, 1),
             **fields("loss grad_norm grad_mul lr step_seconds tokens_per_second samples_per_second", is_number),
             **fields("mfu memory_gib eta_seconds", or_null(is_number))},
    "eval": {"loss": is_number, "counted_tokens": is_whole},
    "hellaswag": {"accuracy": is_number, "examples": is_whole},
    "fp8": {"tensors": objects(is_tensor)},
    "experts": {"load": lambda value: isinstance(value, list) and all(map(is_number, value))},
    "grad_wire": {"gradients": objects(named_numbers(("relative_l2",)))},
    "plan": {},
    "checkpoint": {"path": is_text},
    "event": fields("kind text", is_text),
}
# Fields that a record may have.
OPTIONAL = {
    "header": {"communication": or_null(objects()), "params": is_whole,
               "identity": lambda value: is_object(value) and are_contents([*value.values()])},
    "step": {**fields("gpu_utilization power_w sm_clock_mhz gpu_temperature_c gpu_memory_gib energy_j joules_per_token "
                      "forward_seconds backward_seconds exposed_comm_seconds norm_limit z_loss max_logit "
                      "router_loss router_entropy expert_load rank_load dead_experts",
                      or_null(is_number)),
             "throttled_by": is_text},
    "plan": fields("predicted_ms measured_ms planned_bytes used_bytes", or_null(is_number)),
    **dict.fromkeys(("eval", "hellaswag", "checkpoint"),
                    fields("seconds loss_bf16 accuracy_bf16 loss_ema accuracy_ema loss_ema_bf16 accuracy_ema_bf16",
                           is_number)),
}


def check_record(record):
    """Raises ValueError unless the fields of a record that readers need are there and are what they should be."""
    kind = record["type"]
    for field, check in {"step": is_whole, **FIELDS[kind]}.items():
        if field not in record:
            raise ValueError(f"a record of type {kind} without {field}")
        if not check(record[field]):
            raise ValueError(f"a record of type {kind} with a wrong {field}")
    for field, check in OPTIONAL.get(kind, {}).items():
        if field in record and not check(record[field]):
            raise ValueError(f"a record of type {kind} with a wrong {field}")


def numbers(record):
    """The record with "nan", "inf" and "-inf" as floats. Its keys are shared with other records, which saves memory."""
    return {sys.intern(key): NOT_IN_JSON.get(value, value) if isinstance(value, str) else value
            for key, value in record.items()}


def evaluation_text(record, field, form):
    """A result as the run trained, with --eval-bf16 that of the weights that it exports, which are in BF16, and with
    --ema that of the averaged weights."""
    more = {title: record[field + suffix] for title, suffix in
            ((", in BF16 ", "_bf16"), (", EMA ", "_ema"), (", EMA in BF16 ", "_ema_bf16"))
            if field + suffix in record}
    return format(record[field], form) + "".join(f"{title}{value:{form}}" for title, value in more.items())


def bf16_loss(header, record):
    """The validation loss of the weights that a run exports, None if an FP8 run did not evaluate it."""
    config = header["config"]
    fp8 = config.get("fp8-recipe", "none") != "none" or config.get("fp8-attention")
    return record.get("loss_bf16", None if fp8 else record["loss"])


def last_text(evaluations):
    return f"{evaluation_text(evaluations[max(evaluations)], 'loss', '.4f')} at step {max(evaluations)}"


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
        self.name = name or names_of([path])[0]
        self._file = None   # device and inode of the file that was read
        self._forget()

    def _forget(self):
        self._offset = self._line = 0
        self._begin = b""   # the first bytes of the file, which contain the time of its first header
        self.headers, self.events, self.checkpoints, self.plans = [], [], [], []
        self.steps, self.evals, self.hellaswag, self.fp8, self.wire, self.experts = {}, {}, {}, {}, {}, {}   # by step
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
            if not self.headers and kind != "header":
                raise self._not_a_log()
            if kind in FIELDS:   # others, such as samples, are not needed
                check_record(record)
                self._keep(kind, record)
                self.taken(record)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            if not self.headers:
                raise self._not_a_log() from None
            reason = str(error) if "a record of type" in str(error) else "not a record of a log"
            where = f"{self.path}:{self._line}: damaged line: {reason}"
            if not self.skip_damaged:
                raise InputError(where) from None
            self.damaged.append(where)

    def taken(self, record):
        """For subclasses: called with each record that is right, as it is in the file."""

    def _not_a_log(self):
        return InputError(f"{self.path}:{self._line}: not the log of a run, which begins with a header")

    def _take_header(self, record):
        if record.get("format") != LOG_FORMAT:
            raise InputError(f"{self.path}:{self._line}: a log of format {record.get('format')}; this reads format "
                             f"{LOG_FORMAT}")
        begin = record["step"]
        self.redone += sum(step > begin for step in self.steps)
        for records in (self.steps, self.evals, self.hellaswag, self.fp8, self.wire, self.experts):
            for step in [step for step in records if step > begin]:
                del records[step]
        self.events = [event for event in self.events if event["step"] <= begin]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint["step"] <= begin]
        self.headers.append(numbers(record))

    def _keep(self, kind, record):
        if kind == "header":
            self._take_header(record)
        elif kind in BY_STEP:
            getattr(self, BY_STEP[kind])[record["step"]] = numbers(record)
        elif kind == "fp8":
            self.fp8[record["step"]] = {tensor["name"]: with_block_scales(numbers(tensor))
                                        for tensor in record["tensors"]}
        elif kind == "experts":
            self.experts[record["step"]] = record["load"]
        elif kind == "grad_wire":
            self.wire[record["step"]] = {entry["name"]: numbers(entry) for entry in record["gradients"]}
        else:
            {"plan": self.plans, "checkpoint": self.checkpoints, "event": self.events}[kind].append(
                numbers(record) if kind == "plan" else record)

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
    """The logs that a path names: itself, those in a folder, or else those in the folders of a folder of runs."""
    if not os.path.isdir(path):
        return [str(path)]
    found = sorted(map(str, Path(path).glob("*.jsonl"))) or sorted(map(str, Path(path).glob("*/*.jsonl")))
    if not found:
        raise InputError(f"{path}: no log (*.jsonl) in this folder or its folders; --log-file of a run writes one")
    return found


def names_of(paths):
    """A name for each log: that of its folder for log.jsonl, else that of its file, with as many more folders before it
    as tell the logs apart."""
    parts = [Path(os.path.abspath(path)).with_suffix("").parts[1:] for path in paths]
    parts = [part[:-1] if part[-1] == "log" and len(part) > 1 else part for part in parts]
    names = ["/".join(part[-1:]) for part in parts]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        names = [name if names.count(name) == 1 else "/".join(part[-depth:]) for name, part in zip(names, parts)]
    return names


def named_logs(arguments):
    """[(path, name)] of NAME=LOG or LOG, or of the logs in a folder."""
    pairs = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        path, name = (argument, None) if not equals or os.path.exists(argument) else (path, name)
        if name == "":
            raise InputError(f"{argument}: no name before the =")
        logs = logs_in(path)
        if name and len(logs) > 1:
            raise InputError(f"{argument}: one name for {len(logs)} logs in this folder; leave the name out")
        pairs += [(log, name) for log in logs]
    unnamed = [path for path, name in pairs if not name]
    names = dict(zip(unnamed, names_of(unnamed)))
    return [(path, name or names[path]) for path, name in pairs]


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


def follow(runs, every, act):
    """Reads the logs again and again and calls act(whether one has grown), until all runs have ended or Ctrl-C is
    pressed. After SIGTERM, with which a job script ends this, it goes on until no record has come for QUIET_S. A log
    may not be there yet. If a run had ended long before, this waits for the process that resumes it. Returns whether
    it was not interrupted."""
    earlier = {}   # run -> start of the process whose end was there already, or None
    begin, grew, told = time.time(), time.monotonic(), []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    try:
        while True:
            changed = False
            for run in runs:
                try:
                    changed |= run.poll()
                    old = run.finished and os.stat(run.path).st_mtime < begin - END_OF_ANOTHER_S
                except FileNotFoundError:
                    continue
                if old and run not in earlier:
                    print(f"note: {run.path}: this run had ended; waiting until it is resumed", file=sys.stderr)
                earlier.setdefault(run, run.headers[-1]["unix_time"] if old else None)
            act(changed)
            if all(run.finished and run.headers[-1]["unix_time"] != earlier[run] for run in runs):
                return True
            grew = time.monotonic() if changed else grew
            if told and time.monotonic() - grew > QUIET_S:
                return True
            time.sleep(min(every, 1) if told else every)
    except KeyboardInterrupt:
        return False
