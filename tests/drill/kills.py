"""Kills of ranks, of mpirun and of the launch wrapper at any time, also in the first moments, and suspended ranks. The
run ends in time with the right exit code and leaves no process, and the resumed run ends with the bytes of a run that
was never interrupted."""
import os
import re
import signal
import time

from tests.support.ranks import HAVE_RANKS, MPIRUN
from tests.support.train import GPT2, LLAMA, ROOT, state_of, with_faults

LAUNCHER = [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:]]
STEPS = 40
# Name, executable, ranks, launcher, options.
RUNS = (
    ("one rank", GPT2, 1, [], []), ("one rank, saves behind training", GPT2, 1, [], ["--save-async"]),
    ("one rank, FP8", LLAMA, 1, [], ["--fp8-recipe", "delayed"]),
    ("mpirun", GPT2, 2, MPIRUN, ["--micro-batch-size", "1", "--save-async"]),
    ("launch_mpi.sh", GPT2, 2, LAUNCHER, ["--micro-batch-size", "1"]),
    ("Muon, ZeRO-2", LLAMA, 2, LAUNCHER, ["--micro-batch-size", "1", "--zero", "2", "--optimizer", "muon"]),
    ("ZeRO-3", GPT2, 2, LAUNCHER, ["--micro-batch-size", "1", "--zero", "3"]),
    ("context parallel", LLAMA, 2, LAUNCHER, ["--micro-batch-size", "1", "--context-parallel", "2"]),
    ("ZeRO-3, context parallel, FP8", LLAMA, 4, LAUNCHER,
     ["--micro-batch-size", "1", "--zero", "3", "--context-parallel", "2", "--fp8-recipe", "delayed", "--seq-length",
      "64", "--max-position-embeddings", "64"]),
)
TIMEOUT = 3   # --comm-timeout of runs of which a rank is suspended
LAST = f"step-{STEPS:08d}"


def command_of(shared, run, save, *extra):
    _, binary, ranks, launcher, options = run
    start = [*launcher, "-np", str(ranks)] if launcher else []
    return [*start, *shared.command(binary), "--train-iters", str(STEPS), "--save-interval", "3", "--keep", "2",
            "--save", save, *options, *extra]


def prepare(shared, runs=RUNS):
    """Runs without interruption: their last states and durations."""
    shared.straight = {}
    for run in runs:
        if run[3] and not HAVE_RANKS:
            continue
        case = shared.case("straight", len(shared.straight))
        begin = time.monotonic()
        code, out, error = case.run(command_of(shared, run, case.path("run")))
        if code != 0:
            raise SystemExit(f"drill: the run without kills fails: {out}{error}")
        shared.straight[run[0]] = (run, time.monotonic() - begin, state_of(case.path("run", LAST)))


def victim_of(case, run):
    """A process of the case: a rank, mpirun or the wrapper."""
    names = {"rank": os.path.basename(run[1]), "mpirun": "mpirun", "wrapper": "launch_mpi.sh"}
    kinds = ["rank", "rank"] + (["mpirun"] if run[3] else []) + (["wrapper"] if run[3] is LAUNCHER else [])
    kind = case.draw.choice(kinds)
    living = case.processes()
    fitting = [pid for pid, name in living if name == names[kind][:15]]
    return (kind, case.draw.choice(fitting)) if fitting else ("first", living[0][0]) if living else (None, None)


def trial(shared, case):
    run, seconds, _ = case.draw.choice(list(shared.straight.values()))
    save, early = case.path("run"), case.draw.random() < 0.3
    told = case.draw.random() < 0.15   # asked to stop instead of killed
    process = case.start(command_of(shared, run, save))
    time.sleep(case.draw.random() * (0.2 if early else 1.1 * seconds))
    kind, pid = victim_of(case, run)
    number = signal.SIGTERM if told and not early else signal.SIGKILL
    case.story.append(f"{run[0]}: {number.name} to {kind}")
    if pid:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            kind = None
    # An mpirun of OpenMPI 4 may lock up when a rank dies while it registers; our wrapper ends it.
    code, out, error = case.end(process, may_stay="mpirun" if run[3] is MPIRUN else "")
    finished = f"finished {STEPS} steps" in out
    if number == signal.SIGKILL and kind == "rank" and run[3] is LAUNCHER and not finished and code not in (0, 6):
        case.found("code", f"exit code {code} of the wrapper after a rank was killed, expected 6")
    if number == signal.SIGKILL and kind == "rank" and not finished and code == 0 and "stop: " not in out:
        case.found("code", "exit code 0 though a rank was killed")
    if error and re.search(r"^error: ", error, re.M) and kind is None:
        case.found("code", "an error without a kill")
    case.require_gone(20)
    require_resume(shared, case, run, save, saved_in(out))


def saved_in(out):
    """The last step that a run reported as saved."""
    return max((int(step) for step in re.findall(r"^checkpoint step (\d+) ", out, re.M)), default=0)


def require_resume(shared, case, run, save, saved):
    """Resumes the newest checkpoint; the run must end with the bytes of a run that was never interrupted."""
    code, out, error = case.run(command_of(shared, run, save, "--resume", "auto"), seconds=120)
    if code != 0:
        case.found("loss", f"the resumed run ended with {code}")
        return
    if "skipped checkpoint" in out:
        case.found("loss", "a kill left a damaged checkpoint")
    resumed = re.search(r"resumed \S+ at step (\d+)", out)
    if saved > (int(resumed[1]) if resumed else 0):
        case.found("loss", f"step {saved} was reported as saved, resumed was {resumed and resumed[0]}")
    if state_of(os.path.join(save, LAST)) != shared.straight[run[0]][2]:
        case.found("loss", "other bytes than those of a run that was never interrupted")
    strange = [name for name in os.listdir(save) if not name.startswith(("step-", "log.jsonl"))]
    if strange:
        case.found("left behind", f"in the folder of checkpoints: {strange}")


def suspended_rank(shared, case):
    """A rank is suspended at some step: the hang report names it, and the collective in which another rank waits."""
    if not HAVE_RANKS:
        return
    run = case.draw.choice([run for run, _, _ in shared.straight.values() if run[3] is LAUNCHER])
    save, victim, step = case.path("run"), case.draw.randrange(run[2]), case.draw.randint(2, STEPS)
    fault = f"stop:rank={victim}@backward={step}"
    case.story.append(f"{run[0]}: {fault}")
    begin = time.monotonic()
    code, out, error = case.end(case.start(with_faults(command_of(shared, run, save, "--comm-timeout", str(TIMEOUT)),
                                                       fault)))
    if code is not None and code != 6:
        case.found("code", f"exit code {code} after a rank was suspended, expected 6")
    if time.monotonic() - begin > shared.straight[run[0]][1] + TIMEOUT + 8:
        case.found("hang", f"ended only after {time.monotonic() - begin:.1f} s")
    if not re.search(rf"error: rank {victim} \(.*\) has been suspended by a signal .*step {step}, .*; "
                     r"(rank \d+ waits|ranks [\d,-]+ wait) in collective \d+ \(.+\) of step \d+ ", error):
        case.found("text", "the hang report names no rank or no collective")
    case.require_gone(10)
    require_resume(shared, case, run, save, saved_in(out))
