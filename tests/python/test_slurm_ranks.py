"""scripts/launch/slurm_ranks.sh for the variables that Slurm sets; tests/cluster/ has Slurm itself."""
import os
import unittest

from tests.support.run_command import run_command

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The line on --gres that `scontrol show job` prints.
PROGRAM = """scontrol() { echo "   TresPerNode=$GRES"; }
. scripts/launch/slurm_ranks.sh
echo "${SLURM_NTASKS_PER_NODE:-} ${SLURM_NTASKS:-} ${SLURM_TASKS_PER_NODE:-} ${SLURM_GPUS_PER_NODE:-}"
"""


def ranks(gres="", **slurm):
    """The exit code and either (ranks of a node, ranks, slots, GPUs of a node) or the error."""
    variables = {f"SLURM_{name}": value for name, value in {"JOB_ID": "1", "NNODES": "3", **slurm}.items()}
    done = run_command(["bash", "-uc", PROGRAM], None, cwd=ROOT,
                       env={"PATH": os.environ["PATH"], "GRES": gres, **variables})
    return done.returncode, done.stdout.split(" ") if done.returncode == 0 else done.stderr


class SlurmRanks(unittest.TestCase):
    def test_a_rank_for_each_gpu(self):
        for slurm, count in (({"GPUS_ON_NODE": "4"}, 4), ({"GPUS_PER_NODE": "2", "GPUS_ON_NODE": "8"}, 2),
                             ({"GPUS_PER_NODE": "h100:8"}, 8), ({"GPUS_PER_NODE": "h100:2,h200:6"}, 8),
                             ({"GPUS": "6", "GPUS_ON_NODE": "8"}, 2), ({"GPUS": "h200:12"}, 4),
                             ({"gres": "gres:gpu:2", "GPUS_ON_NODE": "8"}, 2), ({"gres": "gres/gpu"}, 1),
                             ({"gres": "gres:nic:4,gres/gpu:h200:3"}, 3)):
            with self.subTest(slurm):
                code, found = ranks(**slurm)
                self.assertEqual((code, found[:3]), (0, [str(count), str(3 * count), f"{count}(x3)"]))

    def test_all_gpus_of_the_nodes_are_asked_for_unless_an_option_did(self):
        for slurm, asked in (({"GPUS_ON_NODE": "4"}, "4"), ({"GPUS": "3", "GPUS_ON_NODE": "4"}, ""),
                             ({"gres": "gres:gpu:2", "GPUS_ON_NODE": "4"}, ""),
                             ({"NTASKS": "5", "GPUS_ON_NODE": "4"}, "4"),
                             ({"NTASKS": "6", "GPUS_PER_TASK": "1", "GPUS_ON_NODE": "4"}, "")):
            with self.subTest(slurm):
                self.assertEqual(ranks(**slurm)[1][3], asked + "\n")

    def test_tasks_win_over_gpus(self):
        slurm = {"NTASKS": "6", "NTASKS_PER_NODE": "2", "TASKS_PER_NODE": "2(x3)", "GPUS_ON_NODE": "8"}
        self.assertEqual(ranks(**slurm)[1][:3], ["2", "6", "2(x3)"])
        self.assertEqual(ranks(NTASKS="6", NTASKS_PER_NODE="2")[0], 0)

    def test_what_cannot_be_is_refused(self):
        for slurm, text in (({}, "error: the job has no GPUs: give sbatch --gpus-per-node N, or --ntasks-per-node N "
                             "for ranks on CPUs\n"),
                            ({"GPUS": "7"}, "error: --gpus 7 on 3 nodes: give sbatch --gpus-per-node N instead\n")):
            with self.subTest(slurm):
                self.assertEqual(ranks(**slurm), (2, text))
