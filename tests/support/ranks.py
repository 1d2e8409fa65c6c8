"""Shared by the tests of several ranks over MPI."""
import os
import shlex
import shutil
import subprocess

from tests.support.train import BUILD, TrainTest

MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root"]
HAVE_RANKS = shutil.which("mpirun") and not os.path.basename(BUILD).startswith("cuda")
ONE_EACH = ["--micro-batch-size", "1", "--global-batch-size", "8"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


def each_rank(*commands):
    """Arguments of mpirun for ranks that run different commands; OpenMPI 5.0.7 crashes on "A : B"."""
    cases = "".join(f"{rank}) exec {shlex.join(command)};;" for rank, command in enumerate(commands))
    return ["-np", str(len(commands)), "bash", "-c", f"case $OMPI_COMM_WORLD_RANK in {cases} esac"]


class RanksTest(TrainTest):
    def ranks(self, ranks, binary, *options, expect=0, faults=None):
        command = [*MPIRUN, "-np", str(ranks), *self.command(binary, *ONE_EACH, *options, faults=faults)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        self.assertEqual(done.returncode, expect, done.stdout[-2000:] + done.stderr[-2000:])
        return done

    @staticmethod
    def children(parent):
        """The processes of the executable, read from /proc because not every machine has ps and pgrep."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    name, rest = stat.read().split("(", 1)[1].rsplit(")", 1)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == "train_gpt2" and int(rest.split()[1]) == parent:
                found.append(pid)
        return found
