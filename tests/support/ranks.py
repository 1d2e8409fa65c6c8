"""Shared by the tests of several ranks over MPI."""
import os
import shlex
import shutil
from pathlib import Path

from tests.support.run_command import run_command
from tests.support.train import BUILD, TrainTest

MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root"]
HAVE_RANKS = shutil.which("mpirun") and not os.path.basename(BUILD).startswith("cuda")
ONE_EACH = ["--micro-batch-size", "1", "--global-batch-size", "8"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


def each_rank(*commands):
    """Arguments of mpirun for ranks that run different commands; OpenMPI 5.0.7 crashes on "A : B"."""
    cases = "".join(f"{rank}) exec {shlex.join(command)};;" for rank, command in enumerate(commands))
    return ["-np", str(len(commands)), "bash", "-c", f"case $OMPI_COMM_WORLD_RANK in {cases} esac"]


def fields(pid):
    """The fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def processes(parent):
    """The living descendants of `parent`: their commands by process id."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        state = fields(pid)
        if state and state[0] != "Z" and int(state[1]) == parent:
            try:
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found.update(processes(int(pid)))
    return found


class RanksTest(TrainTest):
    BATCH = ONE_EACH

    def mpirun(self, ranks, binary, *options, **how):
        return [*MPIRUN, "-np", str(ranks), *self.command(binary, *self.BATCH, *options, **how)]

    def ranks(self, ranks, binary, *options, expect=0, **how):
        return run_command(self.mpirun(ranks, binary, *options, **how), expect, env=ENVIRONMENT)
