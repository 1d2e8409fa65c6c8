"""Writes a run's log in the formats of other tools, for scripts/export_log."""
import csv
import hashlib
import math
import time
from pathlib import Path

from .run_log import BLOCK_SCALES, InputError
from .support import need

# (tag and column name, unit, field of the step record). TensorBoard and W&B sort by name: train/loss is the first, and
# the tensors in FP8, which are many, are the last.
STEP_COLUMNS = [
    ("train/loss", "nats/token", "loss"), ("train/lr", "", "lr"), ("train/skipped", "0 or 1", "skipped"),
    ("train/z_loss", "nats/token", "z_loss"),
    ("train_gradient/norm", "", "grad_norm"), ("train_gradient/clip_ratio", "", "grad_mul"),
    ("train_attention/max_logit", "", "max_logit"), ("train_experts/load", "times the mean", "expert_load"),
    ("train_experts/dead", "experts", "dead_experts"), ("train_experts/router_entropy", "nats", "router_entropy"),
    ("train_experts/router_loss", "", "router_loss"), ("train_experts/rank_load", "times the mean", "rank_load"),
    ("train_gpu/utilization", "percent", "gpu_utilization"), ("train_gpu/power", "W", "power_w"),
    ("train_gpu/sm_clock", "MHz", "sm_clock_mhz"), ("train_gpu/temperature", "C", "gpu_temperature_c"),
    ("train_gpu/memory", "GiB", "gpu_memory_gib"), ("train_gpu/memory_of_run", "GiB", "memory_gib"),
    ("train_gpu/energy", "J", "energy_j"), ("train_gpu/joules_per_token", "J/token", "joules_per_token"),
    ("train_progress/samples", "samples", "samples"), ("train_progress/tokens", "tokens", "tokens"),
    ("train_progress/counted_tokens", "tokens", "counted_tokens"), ("train_speed/step_time", "s", "step_seconds"),
    ("train_speed/forward", "s", "forward_seconds"),     # of the step's first micro-batch, as the next
    ("train_speed/backward", "s", "backward_seconds"), ("train_speed/exposed_comm", "s", "exposed_comm_seconds"),
    ("train_speed/tokens_per_second", "tokens/s", "tokens_per_second"),
    ("train_speed/samples_per_second", "samples/s", "samples_per_second"),
    ("train_speed/mfu", "share of the BF16 peak", "mfu"),
]
# (tag and column name, unit, records of the log, field).
EVALUATION_COLUMNS = [
    ("valid/loss", "nats/token", "evals", "loss"), ("valid/loss_bf16", "nats/token", "evals", "loss_bf16"),
    ("valid/loss_ema", "nats/token", "evals", "loss_ema"),
    ("valid/loss_ema_bf16", "nats/token", "evals", "loss_ema_bf16"),
    ("valid/counted_tokens", "tokens", "evals", "counted_tokens"),
    ("valid/hellaswag_accuracy", "share of examples", "hellaswag", "accuracy"),
    ("valid/hellaswag_accuracy_bf16", "share of examples", "hellaswag", "accuracy_bf16"),
    ("valid/hellaswag_accuracy_ema", "share of examples", "hellaswag", "accuracy_ema"),
    ("valid/hellaswag_accuracy_ema_bf16", "share of examples", "hellaswag", "accuracy_ema_bf16"),
]
OTHER_COLUMNS = [
    ("train_fp8/largest_flushed", "share of values"), ("train_fp8/largest_saturated", "share of values"),
    ("train_fp8/nonfinite", "values"), ("train_fp8/largest_scales_at_ends", "share of blocks"),
    ("train_gradient/largest_relative_l2", "share of the gradient"),   # of its reduction in FP8
    *((tag, unit) for tag, unit, _, _ in EVALUATION_COLUMNS),
]


def tag_of(run, tag):
    """The tag; that of a loss on synthetic data says so."""
    return tag + "_of_synthetic_data" if run.synthetic and "/loss" in tag else tag


def row_of(run, step):
    """{tag: number} of one step, without tags that have no value."""
    row = {}
    if step in run.steps:
        record = run.steps[step]
        row = {tag: record[field] for tag, _, field in STEP_COLUMNS if field in record}
        row["train/skipped"] = int(row["train/skipped"])
    row |= {tag: getattr(run, kind).get(step, {}).get(field) for tag, _, kind, field in EVALUATION_COLUMNS}
    tensors = run.fp8.get(step, {}).values()
    if tensors:
        row["train_fp8/largest_flushed"] = max(tensor["flushed"] for tensor in tensors)
        row["train_fp8/largest_saturated"] = max(tensor["saturated"] for tensor in tensors)
        row["train_fp8/nonfinite"] = sum(tensor["nonfinite"] for tensor in tensors)
        ends = [tensor["scale_at_ends"] for tensor in tensors if "scale_at_ends" in tensor]
        row["train_fp8/largest_scales_at_ends"] = max(ends, default=None)
    if run.wire.get(step):
        row["train_gradient/largest_relative_l2"] = max(kind["relative_l2"] for kind in run.wire[step].values())
    found = {tag: value for tag, value in row.items() if value is not None}
    return {tag_of(run, tag): value for tag, value in found.items()} if run.synthetic else found


def all_steps(run):
    return sorted({*run.steps, *run.evals, *run.hellaswag, *run.fp8, *run.wire})


def utc(seconds):
    try:
        return time.strftime("[%Y-%m-%d %H:%M:%S] ", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):   # outside the calendar
        return "[time unknown] "


def wall_times(run):
    """{step: Unix time}: the start of the process plus the times of its steps."""
    times, header, now = {}, None, 0.0
    for step in all_steps(run):
        if run.header_at(step) is not header:
            header = run.header_at(step)
            now = header["unix_time"]
        seconds = run.steps.get(step, {}).get("step_seconds")
        now += seconds if seconds is not None and math.isfinite(seconds) else 0
        times[step] = now
    return times


# ---- text ----

def write_csv(run, file):
    """One row per step, at full precision; a missing value is an empty cell."""
    columns = [(tag, unit) for tag, unit, _ in STEP_COLUMNS] + OTHER_COLUMNS
    columns = [(tag_of(run, tag), unit) for tag, unit in columns]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", *(f"{tag} ({unit})" if unit else tag for tag, unit in columns)])
    tags = [tag for tag, _ in columns]
    for step in all_steps(run):   # a writer of CSV writes repr() of a number, and nothing for None
        writer.writerow([step, *map(row_of(run, step).get, tags)])


def write_llmc(run, file):
    """llm.c's main.log, which counts steps from 0: our step 1 is its step 0."""
    for step in sorted({*run.steps, *run.evals, *run.hellaswag}):
        if step in run.steps:
            r = run.steps[step]
            file.write(f"s:{step - 1} trl:{r['loss']:.4f} lr:{r['lr']:.6f} norm:{r['grad_norm']:.2f}\n")
        if step in run.evals:
            file.write(f"s:{step} tel:{run.evals[step]['loss']:.4f}\n")
        if step in run.hellaswag:
            file.write(f"s:{step} eval:{run.hellaswag[step]['accuracy']:.4f}\n")


def megatron_step(run, r, seconds):
    """One line of Megatron-LM's training_log, in which a skipped step has no loss."""
    header = run.header_at(r["step"])
    tflops = header["flops_per_token"] * r["tokens_per_second"] / header["world"] / 1e12
    batch = r["samples_per_second"] * r["step_seconds"]   # not finite if the step took no time
    parts = [utc(seconds) + f"iteration {r['step']:8d}/{r['train_iters']:8d}", f"consumed samples: {r['samples']:12d}",
             f"elapsed time per iteration (ms): {1e3 * r['step_seconds']:.1f}",
             f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}", f"learning rate: {r['lr']:.6E}",
             f"global batch size: {round(batch) if math.isfinite(batch) else 0:5d}"]
    if not r["skipped"]:
        parts.append(f"lm loss{' of synthetic data' * run.synthetic}: {r['loss']:.6E}")
    parts += ["loss scale: 1.0", f"grad norm: {r['grad_norm']:.3f}",
              f"number of skipped iterations: {int(r['skipped']):3d}",
              f"number of nan iterations: {int(not math.isfinite(r['loss'])):3d}"]
    return " " + " | ".join(parts) + " |\n"


def write_megatron(run, file):
    """The log lines of Megatron-LM; times of day are UTC."""
    times = wall_times(run)
    for step in sorted({*run.steps, *run.evals}):
        if step in run.steps:
            file.write(megatron_step(run, run.steps[step], times[step]))
        if step in run.evals:
            loss = run.evals[step]["loss"]
            perplexity = math.exp(min(20, loss)) if not math.isnan(loss) else math.nan   # 20 is Megatron-LM's bound
            line = (f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E}"
                    " | ")
            rule = "-" * (len(line) + 1)
            file.write(f"{rule}\n{line}\n{rule}\n")


# ---- through packages ----

def all_scalars(run, step):
    """The row, and the statistics of every FP8 tensor by name."""
    scalars = row_of(run, step)
    for name, tensor in run.fp8.get(step, {}).items():
        for field in ("amax", "quant_mul", "flushed", "saturated", *(f"scale_{name}" for name in BLOCK_SCALES)):
            if field in tensor:
                scalars[f"values_in_fp8_{field}/{name}"] = tensor[field]
    return scalars


class TensorboardWriter:
    """Event files in a folder. A new file replaces what older ones have of the same steps."""

    def __init__(self, run, folder, project, follows):
        if not follows and list(Path(folder).glob("events.out.tfevents.*")):
            raise InputError(f"{folder}: has event files already; TensorBoard would draw both: choose another folder")
        need("tensorboard", "tensorboard", "--to tensorboard")
        writer_class = need("tensorboard.summary.writer.event_file_writer", "tensorboard", "--to tensorboard")
        self.events = need("tensorboard.compat.proto.event_pb2", "tensorboard", "--to tensorboard")
        self.summaries = need("tensorboard.compat.proto.summary_pb2", "tensorboard", "--to tensorboard")
        self.writer = writer_class.EventFileWriter(str(folder))
        self.hint = f"tensorboard --logdir {folder}"
        begin = run.headers[0]["step"]   # step 0 has the validation before training
        self.restart(run, begin + 1 if begin > 0 else 0)

    def restart(self, run, step):
        """Discards what was written for this step and later ones."""
        session = self.events.SessionLog(status=self.events.SessionLog.START)
        self.writer.add_event(self.events.Event(wall_time=run.headers[-1]["unix_time"], step=step, session_log=session))

    def write(self, step, seconds, scalars):
        values = [self.summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self.writer.add_event(self.events.Event(wall_time=seconds, step=step,
                                                summary=self.summaries.Summary(value=values)))

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class WandbWriter:
    """A run of W&B, whose files are under the folder: offline, for `wandb sync`, unless it follows a run, which is then
    WANDB_MODE or online. Equal logs have the same id, so that a resumed run continues the same run."""

    def __init__(self, run, folder, project, follows):
        wandb = need("wandb", "wandb", "--to wandb")
        Path(folder).mkdir(parents=True, exist_ok=True)
        header = run.headers[-1]
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False)
        start = f"{run.headers[0]['unix_time']!r} {run.headers[0]['command']}"
        self.session = wandb.init(
            mode=None if follows else "offline", project=project, name=run.name, dir=str(folder),
            id=hashlib.sha256(start.encode()).hexdigest()[:16], resume="allow", settings=settings,
            config={"options": header["config"], "command": header["command"], "commit": header["commit"],
                    "device": header["device"], "world": header["world"]})
        self.done = getattr(self.session, "step", 0)   # steps before it are there already, if the run is resumed
        place = Path(self.session.dir).parent
        self.hint = f"wandb sync {place}" if place.name.startswith("offline-") else str(self.session.url)

    def restart(self, run, step):
        """Does nothing, since W&B keeps the first value of a step that is done again."""

    def write(self, step, seconds, scalars):
        if step >= self.done:
            self.session.log(scalars, step=step)

    def flush(self):
        """Does nothing, since W&B writes in a separate process."""

    def close(self):
        self.session.finish()


class PackageExport:
    """Writes what a log has through a package, and what is new at each update(), once per step."""

    def __init__(self, run, make_writer):
        self.run, self.make_writer = run, make_writer
        self.writer, self.process = None, None
        self.last = 0     # the step that may still get values, since its validation follows
        self.tags = {}    # those written, by step; equal sets are one object
        self.sets = {}

    def update(self):
        run = self.run
        if not run.headers:
            return
        if self.writer is None:
            self.writer = self.make_writer(run)
        process = len(run.headers), run.headers[-1]["unix_time"]
        if self.process not in (None, process):   # a resume does steps again, a new run all
            begin = run.headers[-1]["step"]
            self.last = min(self.last, begin)
            self.tags = {step: tags for step, tags in self.tags.items() if step <= begin and begin > 0}
            self.writer.restart(run, begin + 1 if begin > 0 else 0)
        self.process = process
        for step, seconds in wall_times(run).items():
            if step >= self.last:
                self._write(step, seconds, all_scalars(run, step))
        self.writer.flush()

    def _write(self, step, seconds, scalars):
        known = self.tags.get(step, frozenset())
        new = {tag: value for tag, value in scalars.items() if tag not in known}
        if new:
            self.writer.write(step, seconds, new)
        tags = known | frozenset(new)
        self.last, self.tags[step] = step, self.sets.setdefault(tags, tags)


TEXT_FORMATS = {"csv": write_csv, "llmc": write_llmc, "megatron": write_megatron}
PACKAGE_FORMATS = {"tensorboard": TensorboardWriter, "wandb": WandbWriter}
