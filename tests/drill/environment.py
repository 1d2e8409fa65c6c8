"""An environment that lacks file descriptors, memory, stack, disk space or standard streams, or has wrong variables.
The run does its work, or ends with one line and the right exit code; it never crashes or hangs."""
import os
import shutil

from tests.support.train import GPT2, LLAMA

VARIABLES = {"OMP_NUM_THREADS": ("100000", "0", "-1", "many", "", "1,2,3", "99999999999999999999"),
             "TMPDIR": ("/nowhere", "", "x" * 5000), "HOME": (None, "", "/nowhere"), "LANG": ("xx_YY.junk", "\x1b[31m"),
             "LC_ALL": ("C", "junk"), "LLMFP8_HOST": ("", "a b\nc", "\x1b[2J", "h" * 3000),
             "LLMFP8_HEARTBEATS": ("", "nothing", "../../etc", "x" * 4000), "OMPI_COMM_WORLD_RANK": ("0", "x"),
             "CUDA_VISIBLE_DEVICES": ("junk",), "OMP_PROC_BIND": ("junk",), "COLUMNS": ("1", "-5", "x")}
LIMITS = {"NOFILE": (3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32), "AS": (8 << 20, 32 << 20, 64 << 20, 128 << 20, 512 << 20),
          "FSIZE": (0, 1, 4096, 20000), "STACK": (64 << 10, 256 << 10, 1 << 20), "DATA": (1 << 20, 16 << 20),
          "CORE": (0,), "MEMLOCK": (0,), "NPROC": (0, 1)}
STREAMS = ("no stdin", "no stdout", "no stderr", "none", "full stdout", "full stderr", "closed pipe", "closed pipes")


def prepare(shared):
    pass


def closes(*numbers):
    def child():
        for number in numbers:
            os.close(number)
    return child


def streams_of(case, kind):
    """Arguments of Case.start for these streams, and files to close afterwards."""
    numbers = {"no stdin": (0,), "no stdout": (1,), "no stderr": (2,), "none": (0, 1, 2)}.get(kind)
    if numbers:
        return {"before": closes(*numbers)}, []
    if kind.startswith("full"):
        full = open("/dev/full", "wb")
        return {kind.split()[1]: full}, [full]
    reading, writing = os.pipe()
    os.close(reading)
    return {"stdout": writing, **({"stderr": writing} if kind == "closed pipes" else {})}, [writing]


def trial(shared, case):
    save = case.path("run")
    command = [*shared.command(case.draw.choice((GPT2, LLAMA))), "--train-iters", "6", "--save", save,
               "--save-interval", "2"]
    env, limits, how, opened, kind = {}, [], {}, [], None
    for _ in range(case.draw.choice((1, 1, 1, 2))):
        fault = case.draw.choice(("variable", "limit", "limit", "stream", "stream", "folder"))
        if fault == "variable":
            name = case.draw.choice(sorted(VARIABLES))
            env[name] = case.draw.choice(VARIABLES[name])
        elif fault == "limit":
            name = case.draw.choice(sorted(LIMITS))
            limits.append((name, case.draw.choice(LIMITS[name])))
        elif fault == "stream" and not opened and not how:
            kind = case.draw.choice(STREAMS)
            how, opened = streams_of(case, kind)
            case.story.append(kind)
        elif fault == "folder":
            os.mkdir(save)
            os.chmod(save, 0o500)
            if case.draw.random() < 0.5:
                shutil.rmtree(save)
                os.symlink("nowhere/else", save)
            break
    case.story.append(f"{env} {limits}")
    code, out, error = case.run(command, seconds=90, env=env, limits=limits, **how)
    for file in opened:
        os.close(file) if isinstance(file, int) else file.close()
    # With less than the dynamic loader needs for the libraries, its own message and exit code (127) are accepted.
    if code == 127 and "error while loading shared libraries" in error:
        return
    only_streams = bool(how) and not limits and not env and not os.path.islink(save)
    heard = not how or kind in ("no stdin", "no stdout", "full stdout", "closed pipe")
    case.judge(code, error, {0} if only_streams else {0, 2, 7}, one_line=heard)
    if code == 0 and not os.path.exists(os.path.join(save, "step-00000006", "manifest.json")):
        case.found("loss", "exit code 0 without the last checkpoint")
    case.require_gone(10)
