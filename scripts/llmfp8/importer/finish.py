"""Rules about several settings together: batch and length of a run, the preset, a checkpoint to start from."""
import os
import re
from pathlib import Path

from ..support import InputError
from .option_table import SHAPE, preset_of_model, preset_of_shape
from .rows import CANNOT, OTHER


def finish_megatron(run):
    _groups(run)
    _lengths(run)
    for name in ("data", "valid"):
        _globs(run, name)
    if "load" in run.kept:
        _megatron_load(run)
    if "profile" in run.kept:
        run.set("profile", f"{run.value('profile_first', 10)}:{run.value('profile_last', 12)}", run.kept["profile"][1])
    if "instances" in run.kept:
        instances, finding = run.kept["instances"]
        if run.ranks:
            run.set("zero-group", run.ranks // instances, finding)
        else:
            run.notes.append(f"--zero-group: the number of ranks / {instances} (--num-distributed-optimizer-instances)")
    if not any(f.text.startswith(("--hidden-dropout", "--attention-dropout")) for f in run.findings):
        run.notes.append("Megatron's default dropout of 0.1 is in effect there (no --hidden-dropout 0, "
                         "--attention-dropout 0); there is no dropout here")
    _preset(run)


def _groups(run):
    """Megatron reads --num-query-groups only with --group-query-attention."""
    if "groups" in run.kept and "grouped" not in run.kept:
        run.drop("num-query-groups", "Megatron reads it only with --group-query-attention, which is missing")
    heads = run.get("num-attention-heads")
    if heads and run.get("num-query-groups") is None:
        run.set("num-query-groups", heads, None, weak=True)


def _preset(run):
    rope = run.get("position-embedding-type") == "rope"
    found = (preset_of_shape("llama" if rope else "gpt2", map(run.get, SHAPE))
             or ("llama3-small" if rope else "gpt2-124M"))
    run.set("model", found, None, weak=True)
    if run.get("vocab-size") is None:
        size = 128256 if rope else 50257
        run.notes.append(f"vocab-size is that of the preset {found} ({size}); set it if the tokenizer has another")


def _lengths(run):
    """Samples and shares to steps."""
    batch = run.get("global-batch-size")
    if "train_samples" in run.kept and batch:
        run.set("train-iters", run.value("train_samples") // batch, run.kept["train_samples"][1])
    if "warmup_samples" in run.kept and batch:
        run.set("lr-warmup-iters", run.value("warmup_samples") // batch, run.kept["warmup_samples"][1])
    steps = run.get("train-iters")
    decay = run.value("decay_iters") or (run.value("decay_samples", 0) // batch if batch else 0)
    for name in ("decay_iters", "decay_samples"):
        if name in run.kept and steps and decay != steps:
            finding = run.kept[name][1]
            finding.action = CANNOT
            finding.fact = f"the rate decays until the last step ({steps}), not until {decay}"
    if "warmup_fraction" in run.kept:
        finding = run.kept["warmup_fraction"][1]
        if decay or steps:
            run.set("lr-warmup-iters", round(run.value("warmup_fraction") * (decay or steps)), finding)
        else:
            finding.action, finding.fact = CANNOT, ("a share of a length that only the data says: set lr-warmup-iters "
                                                    "once the steps are known")


def _globs(run, name):
    """Megatron's prefixes become names of shards; the weights of a blend stay before them."""
    if name not in run.kept:
        return
    words, finding = run.kept[name]
    weights = [w for w in words if re.fullmatch(r"[0-9.eE+-]+", w)]
    paths = [w if w.endswith(".bin") or "*" in w or w in weights else w + ".bin" for w in words]
    if len(paths) - len(weights) == 1:   # its weight has no effect
        paths = [path for path in paths if path not in weights]
    run.set("train-data" if name == "data" else "valid-data", paths, finding)


def _megatron_load(run):
    path, finding = run.kept["load"]
    if path == run.get("save"):
        run.set("resume", "auto", finding)
        finding.fact = "the folder of --save: resume auto, which starts a new run where there is no checkpoint"
    else:
        finding.action = CANNOT
        finding.fact = "a checkpoint of Megatron cannot be read: make a Hugging Face directory of it, then --load DIR"


def finish_deepspeed(run):
    if "bucket" in run.kept:
        value, finding = run.kept["bucket"]
        run.set("bucket-mb", max(1, round(value * 4 / 1e6)), finding)
    if "betas" in run.kept:
        values, finding = run.kept["betas"]
        if len(values) == 2:
            run.set("adam-beta1", float(values[0]), finding)
            run.set("adam-beta2", float(values[1]), finding)
        else:
            finding.action, finding.fact = CANNOT, "two numbers are needed"
    _min_lr(run)


def _min_lr(run, ratio=None):
    """The last rate as a share of the first one; `ratio` is the share if the input has none."""
    ratio, finding = run.kept.get("min_ratio", (ratio, None))
    if ratio is not None and run.get("lr"):
        run.set("min-lr", float(f"{run.get('lr') * ratio:.12g}"), finding, weak=finding is None)


def finish_llmc(run):
    _min_lr(run, 1)   # llm.c's default keeps the rate
    if "tokens" in run.kept:
        tokens, finding = run.kept["tokens"]
        if tokens % (run.get("seq-length") or 1):
            raise InputError(f"{finding.where}: {finding.text}: must be a multiple of the sequence length "
                             f"{run.get('seq-length')} (-t): -d counts tokens")
        run.set("global-batch-size", tokens // (run.get("seq-length") or 1), finding)
    if "descriptor" not in run.kept:
        run.set("model", "gpt2-124M", None, weak=True)
        return
    name, finding = run.kept["descriptor"]
    depth = re.fullmatch(r"(?:gpt2:)?d(\d+)", name)
    width = {6: 384, 12: 768, 24: 1024, 36: 1280, 48: 1600, 60: 1920}.get(int(depth.group(1))) if depth else None
    size = re.search(r"124M|350M|774M|1558M", name)
    if width:
        shape = (int(depth.group(1)), width, width // 64, width // 64)
        preset = preset_of_shape("gpt2", shape)
        run.set("model", preset or "gpt2-124M", finding)
        for option, value in zip(SHAPE, shape) if not preset else []:
            run.set(option, value, finding)
    elif size and name.endswith(".bin"):
        run.set("model", f"gpt2-{size.group()}", finding)
        finding.action = CANNOT
        finding.fact += "; a .bin of llm.c cannot be read: --load DIR takes the weights from a Hugging Face directory"
    else:
        finding.action = CANNOT
        finding.fact = "no such shape here: set model, or num-layers, hidden-size and num-attention-heads"


def finish_nanogpt(run):
    run.set("num-query-groups", run.get("num-attention-heads"), None, weak=True)
    run.set("max-position-embeddings", run.get("seq-length"), None, weak=True)
    run.set("save-interval", run.get("eval-interval"), None, weak=True)
    accumulation, finding = run.kept.get("all_accumulation", (40, None))
    run.set("global-batch-size", run.get("micro-batch-size") * accumulation, finding, weak=finding is None)
    dataset, finding = run.kept.get("dataset", ("openwebtext", None))
    for option, part in (("train-data", "train"), ("valid-data", "val")):
        run.set(option, [f"data/{dataset}/{part}.bin"], finding, weak=finding is None)
    run.set("token-dtype", "uint16", None, weak=True)
    if dataset.endswith("_char"):
        run.notes.append(f"--vocab-size N: the number of characters of {dataset}, which its meta.pkl has")
    _lengths(run)
    if "model" in run.kept:
        _model(run)
    elif run.get("model") is None:
        run.set("model", preset_of_shape("gpt2", map(run.get, SHAPE)) or "gpt2-124M", None, weak=True)


def finish_torchtitan(run):
    _min_lr(run, 0)
    steps = run.get("train-iters")
    if run.get("lr-warmup-iters") > steps:   # torchtitan shortens both in this way, too
        run.set("lr-warmup-iters", steps, run.config["lr-warmup-iters"].finding)
    if run.get("model") is None:
        run.notes.append("--model NAME: the size, which model.flavor says in torchtitan; without it llama3-small")
    if "decay_ratio" in run.kept:
        ratio, finding = run.kept["decay_ratio"]
        if run.value("decay_type", "linear") == "linear":
            run.config.pop("lr-decay-style", None)
            run.set("lr-decay-style", "wsd", finding)
            run.set("lr-wsd-decay-iters", min(round(ratio * steps), steps - run.get("lr-warmup-iters")), finding)
        else:
            finding.action, finding.fact = CANNOT, "the final decay of wsd is linear"
    if "shard_degree" in run.kept:
        run.ranks = run.ranks or run.value("shard_degree") * run.value("replicate_degree", 1)
        if run.value("replicate_degree", 1) > 1 and run.value("shard_degree") > 1:
            run.set("zero-group", run.value("shard_degree"), run.kept["shard_degree"][1])
    if "checkpoints" in run.kept:
        finding = run.kept["checkpoints"][1]
        folder = Path(run.value("dump_folder", "outputs")) / run.value("folder", "checkpoint")
        run.set("save", str(folder), finding)
        run.set("resume", "auto", finding)
    if (run.get("seq-length") or 0) > 8192:
        run.set("max-position-embeddings", run.get("seq-length"), None, weak=True)


def finish_llamafactory(run):
    """For LLaMA-Factory and accelerate: a backend that is not set, the model, the length."""
    if "fp8" in run.kept and "backend" not in run.kept:
        finding = run.kept["fp8"][1]
        finding.error = 4
        finding.fact = "no backend beside it, so auto chooses: one of the seven errors, see below"
    if "max_steps" in run.kept:
        run.drop("epochs", "max_steps wins over it")
    _lengths(run)
    _model(run)


def finish_guide(run):
    if "max_steps" in run.kept and run.get("epochs"):
        run.drop("epochs", "a number of steps is given as well")
    _model(run)
    heads = run.get("num-attention-heads")
    if heads and run.get("num-query-groups") is None:
        run.set("num-query-groups", heads, None, weak=True)
    if run.get("model") is None and run.get("position-embedding-type") is None:
        run.set("model", "gpt2-124M", None, weak=True)


def _model(run):
    if "model" not in run.kept:
        return
    name, finding = run.kept["model"]
    if os.path.isfile(os.path.join(name, "config.json")):   # false for what is no name of a file
        run.set("load", name, finding)
        finding.fact = "weights and shape of this directory"
        return
    preset = preset_of_model(name)
    if preset:
        run.set("model", preset, finding)
        finding.action = OTHER
        finding.fact += "; no directory of that name here, so only the shape is written: download the model and give " \
                        "--load DIR for its weights"
        run.notes.append(f"--load DIR: the weights of {name}; without it training starts from random ones")
        return
    finding.action = CANNOT
    finding.fact = "neither a directory here nor a model with a preset: download it, then --load DIR"


def _data_ranks(run):
    """Ranks, or groups that share their sequences, that train on different samples; 0 if they are unknown."""
    return run.ranks // (run.get("context-parallel") or 1)


def _ranks_text(run):
    context = run.get("context-parallel") or 1
    return f"{run.ranks} ranks" + (f" / context-parallel {context}" if context > 1 else "")


def _check_batch(run, batch, micro, accumulation, finding):
    """Checks the global batch against the batch per rank; DeepSpeed also refuses to start if they differ."""
    ranks = _data_ranks(run) if run.get("micro-batch-size") else 0
    if batch != micro * accumulation * ranks if ranks else batch % (micro * accumulation):
        product = " x ".join(map(str, [micro, accumulation] + [_ranks_text(run)] * bool(ranks)))
        other = run.config["global-batch-size"].finding
        raise InputError(f"{other.where}: {other.text} and {finding.where}: {finding.text} contradict each other: "
                         f"{batch} is not {'' if ranks else 'a multiple of '}{product}; correct one of them"
                         + (", or --ranks" if ranks else ""))


def finish_batch(run):
    """Called once, after all inputs: sets the global batch and checks it against the ranks."""
    if "ranks" not in run.kept and "per_node" in run.kept:
        run.ranks = run.ranks or run.value("per_node") * run.value("nodes", 1)
    run.ranks = run.ranks or run.value("ranks") or 0
    micro, batch = run.get("micro-batch-size") or 1, run.get("global-batch-size")
    if "accumulation" in run.kept:
        accumulation, finding = run.kept["accumulation"]
        if accumulation < 1:
            raise InputError(f"{finding.where}: {finding.text}: must be 1 or more")
        if batch is None:
            run.set("global-batch-size", micro * accumulation * (_data_ranks(run) or 1), finding)
            if not run.ranks:
                run.notes.append(f"global-batch-size is for 1 rank: {micro} x {accumulation}; say --ranks N for more")
        else:
            _check_batch(run, batch, micro, *run.kept["accumulation"])
            run.ranks = run.ranks or batch // (micro * accumulation) * (run.get("context-parallel") or 1)
    batch = run.get("global-batch-size")
    data_ranks = _data_ranks(run)
    if batch and data_ranks and batch % (micro * data_ranks):
        run.notes.append(f"global-batch-size {batch} is not a multiple of micro-batch-size {micro} x "
                         f"{_ranks_text(run)}; the trainer refuses that, since all ranks are data or context "
                         "parallel here")
