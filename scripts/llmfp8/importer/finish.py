"""Rules about several settings together: ranks, batch and length of a run, the preset, a checkpoint to start from."""
import dataclasses
import os
import re

from ..support import InputError
from .option_table import preset_of_model, preset_of_shape
from .rows import CANNOT, OTHER, read_value


def finish_megatron(run):
    if "groups" in run.kept and "grouped" not in run.kept:
        run.drop("num-query-groups", "Megatron reads it only with --group-query-attention, which is missing")
    run.default("num-query-groups", run.get("num-attention-heads"))
    _lengths(run)
    for name, option in (("data", "train-data"), ("valid", "valid-data")):
        words, finding = run.kept_as(name)
        if finding:
            run.set(option, _shards(words), finding)
    load, finding = run.kept_as("load")
    if finding and load == run.get("save"):
        run.set("resume", "auto", finding)
    elif finding:
        finding.decide(CANNOT, "a checkpoint of Megatron cannot be read: make a Hugging Face directory of it, then "
                       "--load DIR")
    if "profile" in run.kept:
        first, last = run.kept_as("profile_first")[0] or 10, run.kept_as("profile_last")[0] or 12
        run.set("profile", f"{first}:{last}", run.kept_as("profile")[1])
    if not any(f.text.startswith(("--hidden-dropout", "--attention-dropout")) for f in run.findings):
        run.notes.append("Megatron's default dropout of 0.1 is in effect there (no --hidden-dropout 0, "
                         "--attention-dropout 0); there is no dropout here")
    rope = run.get("position-embedding-type") == "rope"
    _preset(run, *("llama", "llama3-small") if rope else ("gpt2", "gpt2-124M"))


def _preset(run, family, other):
    shape = ("num-layers", "hidden-size", "num-attention-heads", "num-query-groups")
    run.default("model", preset_of_shape(family, {option: run.get(option) for option in shape}) or other)


def _lengths(run):
    """Samples and shares to steps."""
    batch = run.get("global-batch-size") or max(1, run.get("micro-batch-size") or 1) * max(1, run.ranks)
    for name, option in (("train_samples", "train-iters"), ("warmup_samples", "lr-warmup-iters")):
        samples, finding = run.kept_as(name)
        if finding:
            run.set(option, samples // batch, finding)
    steps = run.get("train-iters")
    decay, finding = run.kept_as("decay_iters")
    if not finding:
        samples, finding = run.kept_as("decay_samples")
        decay = finding and samples // batch
    if finding and steps and decay != steps:
        finding.decide(CANNOT, f"the rate decays until the last step ({steps}), not until {decay}")
    fraction, finding = run.kept_as("warmup_fraction")
    if finding and (decay or steps):
        run.set("lr-warmup-iters", round(fraction * (decay or steps)), finding)
    elif finding:
        finding.decide(CANNOT, "a share of a length that only the data says: set lr-warmup-iters once the steps are "
                       "known")


def _shards(words):
    """Megatron's prefixes become names of shards; the weights of a blend stay before them."""
    weights = [w for w in words if re.fullmatch(r"[0-9.eE+-]+", w)]
    paths = [w if w.endswith(".bin") or "*" in w or w in weights else w + ".bin" for w in words]
    one = len(paths) - len(weights) == 1   # its weight has no effect
    return [path for path in paths if not one or path not in weights]


def finish_deepspeed(run):
    value, finding = run.kept_as("bucket")
    if finding:
        run.set("bucket-mb", max(1, round(value * 4 / 1e6)), finding)
    values, finding = run.kept_as("betas")
    for option, value in zip(("adam-beta1", "adam-beta2"), values or []):
        run.set(option, read_value(dataclasses.replace(finding, value=value), "number"), finding)
    _min_lr(run)


def _min_lr(run, ratio=None):
    """The last rate as a share of the first one; `ratio` is the share if the input has none."""
    ratio, finding = run.kept_as("min_ratio", ratio)
    if ratio is not None and run.get("lr"):
        run.set("min-lr", float(f"{run.get('lr') * ratio:.12g}"), finding, weak=finding is None)


def finish_torchtitan(run):
    _min_lr(run, 0)
    _flavor(run)
    steps, warmup = run.get("train-iters"), run.get("lr-warmup-iters")
    if warmup > steps:   # torchtitan shortens both in this way, too
        run.set("lr-warmup-iters", steps, run.config["lr-warmup-iters"].finding)
    ratio, finding = run.kept_as("decay_ratio")
    if finding and run.kept_as("decay_type", "linear")[0] == "linear":
        run.config.pop("lr-decay-style", None)
        run.set("lr-decay-style", "wsd", finding)
        run.set("lr-wsd-decay-iters", min(round(ratio * steps), steps - min(warmup, steps)), finding)
    elif finding:
        finding.decide(CANNOT, "the final decay of wsd is linear")
    shards, finding = run.kept_as("shard_degree", 1)
    if shards > 1 and run.kept_as("replicate_degree", 1)[0] > 1:
        run.set("zero-group", shards, finding)
    _, finding = run.kept_as("checkpoints")
    if finding:
        folders = run.kept_as("dump_folder", "outputs")[0], run.kept_as("folder", "checkpoint")[0]
        run.set("save", os.path.normpath(os.path.join(*folders)), finding)
        run.set("resume", "auto", finding)
    if (run.get("seq-length") or 0) > 8192:
        run.default("max-position-embeddings", run.get("seq-length"))


def _flavor(run):
    """The preset of torchtitan's name and flavor of a model."""
    name, named = run.kept_as("model_name", "llama3")
    flavor, finding = run.kept_as("flavor", "debugmodel")
    names = [f"{name.replace('_', '-')}-{flavor}", f"{name}.1-{flavor}"]   # there is a llama3-8B, but a llama3.1-70B
    preset = next(filter(None, map(preset_of_model, names)), None)
    if preset and finding:
        run.set("model", preset, finding)
        if name == "llama3":
            finding.fact = ("newer versions of torchtitan scale rope as llama3.1-8B and llama3.1-70B do, older ones do "
                            "not")
    for setting in filter(None, (named, finding) if not preset else ()):
        setting.decide(CANNOT, "no preset has this name and flavor: set num-layers, hidden-size and the like, or "
                       "--load DIR")


def finish_llamafactory(run):
    """For LLaMA-Factory and accelerate: a backend that is not set, the model, the length."""
    _, finding = run.kept_as("fp8")
    if finding and "backend" not in run.kept:
        finding.decide(finding.action, "no backend beside it: auto takes torchao, which reads no NVTE_* variable", 4)
    if "max_steps" in run.kept:
        run.drop("epochs", "max_steps wins over it")
    _lengths(run)
    _model(run)


def finish_guide(run):
    if "max_steps" in run.kept:
        run.drop("epochs", "a number of steps is given as well")
    _model(run)
    run.default("num-query-groups", run.get("num-attention-heads"))
    if run.get("position-embedding-type") is None and "load" not in run.config:
        run.default("model", "gpt2-124M")


def _model(run):
    name, finding = run.kept_as("model")
    preset = name and preset_of_model(name)
    if name and os.path.isfile(os.path.join(name, "config.json")):   # false for what is no name of a file
        run.set("load", name, finding.decide(finding.action, "weights and shape of this directory"))
    elif preset:
        run.set("model", preset, finding.decide(OTHER, "no directory of that name here, so only the shape is written, "
                                                "and training starts from random weights: download the model and give "
                                                "--load DIR"))
    elif finding:
        finding.decide(CANNOT, "neither a directory here nor a model with a preset: download it, then --load DIR")


def known_ranks(run):
    """Sets the number of ranks: of --ranks, else of the launcher, else of torchtitan's sharding."""
    def product(first, second):
        return (run.kept_as(first)[0] or 0) * (run.kept_as(second)[0] or 1)
    run.ranks = max(0, run.ranks or run.kept_as("ranks")[0] or product("per_node", "nodes")
                    or product("shard_degree", "replicate_degree"))


def finish_batch(run):
    """Sets the global batch and checks it against the ranks, of which those that share sequences count once."""
    micro, batch, context = (run.get(o) or 0 for o in ("micro-batch-size", "global-batch-size", "context-parallel"))
    accumulation, finding = run.kept_as("accumulation")
    ranks, sequences = run.ranks // max(1, context), max(1, micro) * (accumulation or 1)
    if finding and accumulation < 1:
        raise InputError(f"{finding.where}: {finding.text}: must be 1 or more")
    if finding and not batch:
        run.set("global-batch-size", sequences * max(1, ranks), finding)
        if not ranks:
            run.notes.append(f"global-batch-size is for 1 rank: {max(1, micro)} x {accumulation}; say --ranks N for "
                             "more")
    elif finding:
        all_ranks = ranks if micro else 0
        if batch != sequences * all_ranks if all_ranks else batch % sequences:
            other = run.config["global-batch-size"].finding
            shared = f" / context-parallel {context}" if context > 1 else ""
            raise InputError(f"{other.where}: {other.text} and {finding.where}: {finding.text} contradict each other: "
                             f"{batch} is not {max(1, micro)} x {accumulation} x "
                             + (f"{run.ranks} ranks{shared}" if all_ranks else "a number of ranks")
                             + "; correct one of them, or --ranks")
        run.ranks = run.ranks or batch // sequences * max(1, context)
    if run.ranks:   # the plan is for them, and a run on another number is refused
        run.set("ranks", run.ranks, run.kept_as("ranks")[1] or run.kept_as("per_node")[1])
