"""Checkpoints whose JSON was changed, with right checksums: the damage is named with exit code 5, or `--resume auto`
resumes an older checkpoint and the run ends with the same bytes. A damaged checkpoint must never be accepted.
test_checkpoint_disk.cpp, test_checkpoint_ranks.cpp and test_checkpoint.cpp damage the bytes of each file."""
import json
import os
import shutil
from pathlib import Path

from llmfp8.support import xxh3
from tests.support.train import GPT2, LLAMA, state_of

RUNS = (("gpt2", GPT2, []), ("delayed", LLAMA, ["--fp8-recipe", "delayed"]),
        ("tensorwise", LLAMA, ["--fp8-recipe", "tensorwise"]))
STEPS, SAVED = 8, (2, 4, 6)
LAST = f"step-{STEPS:08d}"
BAD = (None, -1, 0, 1e308, "x", "", [], {}, True, 2 ** 63, -2 ** 63, 1.5, float("nan"), "\0", [[[]]])


def name_of(step):
    return f"step-{step:08d}"


def command_of(shared, run, save, *extra):
    return [*shared.command(run[1]), "--train-iters", str(STEPS), "--save", save, "--save-interval", "2", *run[2],
            *extra]


def prepare(shared):
    shared.checkpoints = {}
    for run in RUNS:
        case = shared.case("saved", len(shared.checkpoints))
        code, out, error = case.run(command_of(shared, run, case.path("run")))
        if code != 0:
            raise SystemExit(f"drill: the run without damage fails: {out}{error}")
        last = state_of(case.path("run", LAST))
        shutil.rmtree(case.path("run", LAST))
        shared.checkpoints[run[0]] = (run, case.path("run"), last)


def read(path):
    return Path(path).read_bytes()


def write(path, content):
    Path(path).write_bytes(content)


def places(value, path=()):
    """Paths to every value in a tree of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, path + (key,))


def change_json(case, tree):
    """Replaces a value of a JSON tree by a wrong one, or removes one. Returns the change as text, and its place."""
    top = case.draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))   # long parts get no more
    path = (top, *case.draw.choice(list(places(tree[top]))))
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    if case.draw.random() < 0.25:
        del holder[path[-1]]
        return f"{path} removed", path
    bad = case.draw.choice(BAD)
    holder[path[-1]] = bad
    return f"{path} = {bad!r}", path


def damage_content(case, folder):
    """Changes state.json, config.json or the manifest itself; returns the place."""
    name = case.draw.choice(("state.json", "state.json", "config.json", "manifest.json"))
    tree = json.loads(read(os.path.join(folder, name)))
    how, path = change_json(case, tree)
    manifest = tree
    if name != "manifest.json":
        content = json.dumps(tree).encode()
        write(os.path.join(folder, name), content)
        manifest = json.loads(read(os.path.join(folder, "manifest.json")))
        manifest["files"][name] = {"bytes": len(content), "xxh3": xxh3(content)}
    # The manifest has a hash of itself, and its format is fixed to the byte.
    manifest.pop("xxh3", None)
    manifest["xxh3"] = xxh3(json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    write(os.path.join(folder, "manifest.json"),
          (json.dumps(manifest, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode())
    case.story.append(f"{name}: {how}")
    return path


# Values that do not affect what the run computes, or whose change the run reports as a changed option.
HARMLESS = ("config", "commit", "gemm_plans", "loss_watch", "skips", "norm_skips", "consecutive_skips", "norms",
            "missed", "train_data", "fp8",
            "bos_token_id", "eos_token_id", "pad_token_id")   # ids are taken over as they stand


def trial(shared, case):
    run, saved, last = case.draw.choice(list(shared.checkpoints.values()))
    save = case.path("run")
    shutil.copytree(saved, save)
    newest = os.path.join(save, name_of(SAVED[-1]))
    path = damage_content(case, newest)
    use = case.draw.choice(("auto", "auto", "named", "load", "generate"))
    if use == "auto":
        command = command_of(shared, run, save, "--resume", "auto")
    elif use == "named":
        command = command_of(shared, run, case.path("other"), "--resume", newest)
    elif use == "load":
        command = command_of(shared, run, case.path("other"), "--load", newest)
    else:
        command = [run[1], "generate", "--load", newest, "--prompt", "1 2 3", "--sample-tokens", "2"]
    code, out, error = case.run(command)
    case.judge(code, error, {0, 2, 5})   # a changed value may be as valid as the original
    if use == "auto" and code == 0:
        same = os.path.isdir(os.path.join(save, LAST)) and state_of(os.path.join(save, LAST)) == last
        if not same and ("skipped checkpoint" in out or path[0] not in HARMLESS):
            case.found("loss", "other bytes than those of the run without damage")
    older = [step for step in SAVED[:-1] if not os.path.isdir(os.path.join(save, name_of(step)))]
    if older:
        case.found("loss", f"checkpoints {older} are gone")
