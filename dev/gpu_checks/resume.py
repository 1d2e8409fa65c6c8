"""After a change of checkpoints, on --ranks (all GPUs): for each of --recipes, short runs of a small Llama that never
stop, then the same steps on RANKS -> RANKS / 2 -> RANKS ranks, each continuing from the other's checkpoint.

A checkpoint that is loaded and saved again at once must have equal files. The same number of ranks must repeat every
bit. With another number, the first loss after loading has equal weights and samples and may differ only by the order
of a sum in double; later losses may differ as much as those of uninterrupted runs with these numbers of ranks. Then
asynchronous saves are tested: how long they stall training, and that nothing else changes. --steps (4) is the number
of steps between checkpoints, which must take longer than writing one; --save is the folder of the checkpoints (14
bytes per parameter, 6 checkpoints at a time).
"""
import json
import shlex
import shutil
import statistics
from pathlib import Path

from check import RECIPES
from logs import Log

MODEL = "--model llama3-small --num-layers 6 --micro-batch-size 4 --global-batch-size 64 --gemm-search off"
# Losses are sums in double of the same values in another order: one epsilon for each of up to 10^6 targets is far more
# than the order can change, and far less than one wrong sample does.
ORDER_OF_A_SUM = 1e6 * 2**-53
# Later losses are compared with the difference between uninterrupted runs on other numbers of ranks. All of these are
# equally near to the exact loss, so the distance may be this many times that difference.
SPREADS = 4
# Fields of the run that saved, not of its state; the last two have no effect on a resumed run.
RUN_OPTIONS = ("save", "save-interval", "save-async", "resume", "log-file", "train-iters", "load", "init-method-std")


def files_of(checkpoint):
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")
            if path.is_file() and path.name != "manifest.json"}   # hashes of the others, by rank


def same_bytes(a, b):
    if a.stat().st_size != b.stat().st_size:
        return False
    with open(a, "rb") as x, open(b, "rb") as y:
        while block := x.read(1 << 24):
            if block != y.read(1 << 24):
                return False
    return True


def run_state(checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    for option in RUN_OPTIONS:
        state["config"].pop(option, None)
    state.pop("gemm_plans")   # a resumed run has plans for shapes that it has not used yet
    return state


class Recipe:
    """The runs of one recipe, and the checks that compare them."""

    def __init__(self, check, name):
        self.check, self.name, self.logs = check, name, {}
        self.folder = Path(check.options.save or check.out / "saved").resolve() / name
        shutil.rmtree(self.folder, ignore_errors=True)

    def train(self, run, ranks, last, *options):
        log = self.check.train(f"{self.name}-{run}", ranks, "train_llama",
                               *shlex.split(self.check.options.model or MODEL), "--lr-decay-style", "constant",
                               "--train-iters", str(last), *RECIPES[self.name], *options)
        self.logs[run] = log

    def step(self, run, step):
        return self.folder / run / f"step-{step:08d}"

    def remove(self, *runs):
        for run in runs:
            shutil.rmtree(self.folder / run, ignore_errors=True)

    def same_files(self, a, b):
        try:
            names = files_of(a)
            differ = sorted(names ^ files_of(b)) or [name for name in sorted(names - {"state.json"})
                                                     if not same_bytes(a / name, b / name)]
            if run_state(a) != run_state(b):
                differ.append("state.json")
            total = sum((a / name).stat().st_size for name in names)
        except OSError as error:
            names, total, differ = set(), 0, [str(error)]
        print(f"{self.name}-{b.parent.name}: " + (f"{', '.join(differ)} differ" if differ else "equal")
              + f", {len(names)} files, {total * 1e-9:.2f} GB", flush=True)
        if differ:
            self.check.fail(f"{self.name}-{b.parent.name}: files differ")

    def reload(self, run, ranks, source, step):
        """Loads a checkpoint, saves it under another name before any step, and compares."""
        self.train(run, ranks, step, "--save", self.folder / run, "--resume", self.step(source, step))
        self.same_files(self.step(source, step), self.step(run, step))
        self.remove(run)

    def runs(self, count, half, steps):
        a, b, c = steps, 2 * steps, 3 * steps

        def save(run):
            return ["--save", self.folder / run, "--save-interval", str(steps)]
        self.train("straight", count, c, *save("straight"))
        self.train("straight-half", half, c)
        self.reload("load-half", half, "straight", a)
        self.train("half", half, c, *save("half"), "--resume", self.step("straight", a))
        self.reload("load-back", count, "half", b)
        self.train("back", count, c, "--resume", self.step("half", b))
        self.train("same", count, c, "--save", self.folder / "same", "--resume", self.step("straight", b))
        self.same_files(self.step("straight", c), self.step("same", c))
        self.remove("half", "same")
        self.train("async", count, c, *save("async"), "--save-async")
        self.same_files(self.step("straight", c), self.step("async", c))
        self.remove("straight", "async")

    # ---- the table

    def line(self, what, log, text):
        print(f"  {what:26} {log.world:5} {text}")

    def equal(self, what, log, straight):
        """Loss, norm and data cursor, to the bit."""
        differ = [step for step, r in log.steps.items()
                  if any(r[key] != straight.steps[step][key] for key in ("loss", "grad_norm", "samples"))]
        self.line(what, log, f"{min(log.steps):5} to {max(log.steps):<3} "
                  + (f"DIFFERS at steps {differ}" if differ else "equal to the bit"))
        if differ:
            self.check.fail(f"{self.name}: {what}: losses differ")

    def near(self, what, log, before, straight, spread):
        """before: the run whose checkpoint this one continues from."""
        first, far = min(log.steps), log.far_from(straight)
        start, worst = log.far_from(before)[first], max(far.values())
        failed = [start > ORDER_OF_A_SUM and "first loss", worst > SPREADS * spread and "later losses",
                  any(r["samples"] != straight.steps[s]["samples"] for s, r in log.steps.items()) and "data"]
        failed = [text for text in failed if text]
        self.line(what, log, f"{first:5} to {max(far):<3} first loss {start:.1e} apart (bound {ORDER_OF_A_SUM:.1e}), "
                  f"worst {worst:.1e} (bound {SPREADS * spread:.1e})" + "".join(f", {text} FAILED" for text in failed))
        if failed:
            self.check.fail(f"{self.name}: {what}: {', '.join(failed)}")

    def saves(self, what, log, idle):
        for save in log.saves[:-1]:   # the run waits for the last one in any case
            stall = save["stall_seconds"]
            self.line(what, log, f"step {save['step']:<8} {save['seconds']:6.2f} s to the disk, training was stalled "
                      f"for {stall:.3f} s = {stall / idle:.2f} steps")

    def table(self):
        logs = {run: Log(path) for run, path in self.logs.items() if not run.startswith("load-")}
        straight, half = logs["straight"], logs["straight-half"]
        # A run with half the ranks from the first step on. The first bound already shows that its start is the same.
        spread = max(half.far_from(straight).values())
        idle = statistics.median(r["step_seconds"] for r in list(straight.steps.values())[2:])
        print(f"{self.name}: losses against {straight.world} ranks without a stop; a step takes {idle:.3f} s; "
              f"{half.world} ranks without a stop are {spread:.1e} apart")
        self.equal("the same ranks, resumed", logs["same"], straight)
        self.near("half the ranks, resumed", logs["half"], straight, straight, spread)
        self.near("and all of them again", logs["back"], logs["half"], straight, spread)
        self.equal("saved behind training", logs["async"], straight)
        self.saves("save", straight, idle)
        self.saves("save behind training", logs["async"], idle)
        if any(save["stall_seconds"] > idle for save in logs["async"].saves[:-1]):
            self.check.fail(f"{self.name}: training was stalled for more than a step")


def run(check):
    count = check.options.ranks or check.options.gpus
    if count < 2:
        check.fail(f"{count} ranks, at least 2 are needed")
        return
    check.make("train_llama")
    check.describe_gpus()
    recipes = [Recipe(check, name) for name in check.options.recipes]
    for recipe in recipes:
        recipe.runs(count, count // 2, check.options.steps or 4)
    for recipe in recipes:
        recipe.table()
