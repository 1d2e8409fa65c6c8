"""train.sbatch and train_mpirun.sbatch under Debian's Slurm, with munge and a slurmd on each host and slurmctld on the
first. Device files stand in for GPUs: Slurm counts and allocates them. The ranks train on the CPU."""
import collections
import os
import re
import shutil
import subprocess

from tests.cluster.hosts import ENVIRONMENT, LIMIT_S, HostsTest
from tests.support.train import GPT2, records

# node1 runs two slurmd; the second one is a node without GPUs.
SLURM_CONF = """ClusterName=two
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
PropagateResourceLimits=NONE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
GresTypes=gpu
NodeName=node[1-2] CPUs=4 RealMemory=100 Gres=gpu:h200:2
NodeName=plain NodeHostname=node1 Port=6828 CPUs=4 RealMemory=100
PartitionName=gpus Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=plain Nodes=plain MaxTime=INFINITE State=UP
"""
GRES_CONF = "".join(f"NodeName=node[1-2] Name=gpu Type=h200 File=/dev/{file}\n" for file in ("null", "zero"))
SRUN, MPIRUN = "train.sbatch", "train_mpirun.sbatch"
# What each rank prints about itself. Under mpirun a rank has no SLURM_PROCID.
WHO = "echo who ${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} $(cat /proc/sys/kernel/hostname) gpus=${CUDA_VISIBLE_DEVICES:-}"
STEPS = 1500   # enough to be told to stop before the last one
LONG = ["--train-iters", str(STEPS), "--comm-timeout", "5"]


class Slurm(HostsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for node in ("node1", "node2", "plain"):
            for kind in ("spool", "tmp"):
                os.makedirs(os.path.join(cls.shared, kind, node))
        os.mkdir(os.path.join(cls.shared, "state"))
        cls.write("gres.conf", GRES_CONF)
        cls.write("cgroup.conf", "")
        conf = cls.write("slurm.conf", SLURM_CONF.format(folder=cls.shared))
        cls.environment = {**ENVIRONMENT, "SLURM_CONF": conf}
        key = cls.write("munge.key", os.urandom(64).hex())
        for host in cls.hosts:
            host.run("munged", "--key-file", key, "--seed-file", "/run/munge/seed",
                     "--log-file", os.path.join(cls.shared, f"munged.{host.name}.log"))
        cls.node1.run("slurmctld", "-f", conf)
        for host, node in ((cls.node1, "node1"), (cls.node1, "plain"), (cls.node2, "node2")):
            host.run("slurmd", "-N", node, "-f", conf)

    def setUp(self):
        super().setUp()
        self.until("three idle nodes", lambda: self.slurm("sinfo", "-h", "-t", "idle", "-o", "%D") == "3\n")
        self.addCleanup(self.slurm, "scancel", "--user", "root")

    @classmethod
    def slurm(cls, *command):
        return cls.node1.run(*command, env=cls.environment)

    def sbatch(self, script, options, *command):
        """Submits a job and returns its id."""
        return self.slurm("sbatch", "--parsable", *options, "-o", self.path("%j.out"), f"scripts/launch/{script}",
                          *command).strip()

    def state(self, job):
        """The state of a job, exit code and signal, for instance ["COMPLETED", "0:0"]."""
        text = self.slurm("scontrol", "-o", "show", "job", job)
        return [re.search(rf"\b{name}=(\S+)", text)[1] for name in ("JobState", "ExitCode")]

    def printed(self, job):
        with open(self.path(job + ".out")) as file:
            return file.read()

    def finish(self, job, expect, seconds=LIMIT_S):
        """Waits for the end of a job and returns its output."""
        done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        state = self.until(f"end of job {job}", lambda: (s := self.state(job))[0] in done and s, seconds)
        self.assertEqual(state, expect, self.printed(job)[-4000:])
        self.assertEqual([host.ranks() for host in self.hosts], [[], []])
        return self.printed(job)

    def ranks_of(self, script, *options):
        """The number of ranks of a host that see these GPUs."""
        job = self.sbatch(script, ["--nodes", "2", *options], "bash", "-c", WHO)
        who = re.findall(r"who (\d+) (\w+) gpus=(.*)", self.finish(job, ["COMPLETED", "0:0"]))
        self.assertEqual(sorted(int(rank) for rank, *_ in who), list(range(len(who))))
        return dict(collections.Counter(" ".join(place) for _, *place in who))

    def step(self, log):
        try:
            return max((r["step"] for r in records(log, "step")), default=0)
        except (FileNotFoundError, ValueError):   # a line that is being written
            return 0

    def submit(self, script, log, *options, batch=()):
        """Submits a job of two nodes with one rank each; `batch`: more options of sbatch."""
        return self.sbatch(script, ["--nodes", "2", "--gpus-per-node", "1", *batch], *self.command(
            GPT2, "--micro-batch-size", "1", *LONG, "--log-interval", "1", "--log-file", log, *options))

    def train(self, *arguments):
        """Submits such a job and waits until it trains."""
        job, log = self.submit(*arguments), arguments[1]
        self.until(f"job {job} trains", lambda: self.step(log) >= 100 or self.state(job)[0] == "FAILED")
        self.assertEqual(self.state(job)[0], "RUNNING", self.printed(job))
        return job

    # ---- ranks are the GPUs

    def test_a_rank_for_each_gpu_by_every_option_of_sbatch(self):
        both = {"node1 0,1": 2, "node2 0,1": 2}
        one = {"node1 0": 1, "node2 0": 1}
        one_of_both = {"node1 0,1": 1, "node2 0,1": 1}
        for script, options, ranks in (
                (SRUN, [], both),
                (SRUN, ["--gpus-per-node", "1"], one),
                (SRUN, ["--gpus-per-node", "h200:2"], both),
                (SRUN, ["--gres=gpu:h200:1"], one),
                (SRUN, ["--gres=gpu"], one),
                (SRUN, ["--gpus", "h200:2"], one),
                (SRUN, ["--ntasks-per-node", "1"], one_of_both),
                (SRUN, ["--ntasks", "3"], {"node1 0,1": 2, "node2 0,1": 1}),
                (SRUN, ["--gpus-per-task", "1", "--ntasks", "2"], one),
                (MPIRUN, [], both),
                # The ranks of the first host run in the step of the job script, which has all GPUs of the node.
                (MPIRUN, ["--gpus-per-node", "1"], {"node1 0,1": 1, "node2 0": 1}),
                (MPIRUN, ["--gres=gpu:1"], {"node1 0,1": 1, "node2 0": 1}),
                (MPIRUN, ["--gpus", "2"], one_of_both),
                (MPIRUN, ["--ntasks-per-node", "1"], one_of_both)):
            with self.subTest(script, options=options):
                self.assertEqual(self.ranks_of(script, *options), ranks)

    def test_jobs_that_cannot_start_say_why(self):
        for options, command, text in (
                (["--nodes", "2", "--gpus", "3"], ["true"], "error: --gpus 3 on 2 nodes: give sbatch --gpus-per-node"),
                (["--partition", "plain"], ["true"], "error: the job has no GPUs: give sbatch --gpus-per-node N, or"),
                (["--chdir", self.dir], ["true"], "error: submit this from the repository's folder"),
                ([], [], "one rank per GPU")):
            for script in (SRUN, MPIRUN):
                with self.subTest(script, options=options):
                    self.assertIn(text, self.finish(self.sbatch(script, options, *command), ["FAILED", "2:0"]))
        for script in (SRUN, MPIRUN):
            ranks = self.sbatch(script, ["--partition", "plain", "--ntasks-per-node", "2"], "bash", "-c", WHO)
            self.assertEqual(self.finish(ranks, ["COMPLETED", "0:0"]).count("who "), 2)

    # ---- training

    def test_a_job_that_is_told_to_stop_saves_and_the_next_one_goes_on_with_the_same_losses(self):
        alone = self.path("alone.jsonl")
        subprocess.run(["mpirun", "--oversubscribe", "-np", "2", *self.command(
            GPT2, "--micro-batch-size", "1", *LONG, "--log-interval", "1", "--log-file", alone)],
            check=True, capture_output=True, timeout=LIMIT_S, env=ENVIRONMENT)
        losses = {r["step"]: r["loss"] for r in records(alone, "step")}
        self.assertEqual(len(losses), STEPS)
        for script, signal in ((SRUN, ["--signal=TERM"]), (SRUN, ["--full", "--signal=USR1"]),
                               (MPIRUN, ["--signal=TERM"]), (MPIRUN, ["--batch", "--signal=TERM"])):
            with self.subTest(script, scancel=signal):
                save, log = self.path(script), self.path(script + ".jsonl")
                saving = ["--save", save, "--save-interval", "10000", "--resume", "auto"]
                first = self.train(script, log, *saving)
                self.slurm("scancel", *signal, first)
                stop = re.search(r"stop: .* after step (\d+)", self.finish(first, ["COMPLETED", "0:0"]))
                self.assertLess(int(stop[1]), STEPS)
                self.assertEqual(os.listdir(save), [f"step-{int(stop[1]):08d}"])
                rest = self.finish(self.submit(script, log, *saving), ["COMPLETED", "0:0"])
                self.assertEqual(re.search(r"step (\d+)/", rest)[1], str(int(stop[1]) + 1))
                self.assertIn(f"stop: finished {STEPS} steps", rest)
                self.assertEqual(records(log, "header")[-1]["world"], 2)
                self.assertEqual({r["step"]: r["loss"] for r in records(log, "step")}, losses)
                self.shows(f"{script}, scancel {' '.join(signal)}: {stop[0]}; resumed with equal losses")
                shutil.rmtree(save)
                os.unlink(log)

    def test_a_plain_scancel_leaves_time_to_save(self):
        for script in (SRUN, MPIRUN):
            with self.subTest(script):
                job = self.train(script, self.path(script + ".jsonl"), "--save", self.path(script))
                self.slurm("scancel", job)
                stop = re.search(r"stop: SIGTERM after step (\d+)", self.finish(job, ["CANCELLED", "0:0"]))
                self.assertEqual(self.checkpoints(script)[-1], f"step-{int(stop[1]):08d}")

    def test_jobs_whose_time_is_nearly_up_save_one_after_the_other(self):
        # Slurm sends SIGUSR1 300 s before the time limit, which here is soon after the start.
        jobs = [self.submit(script, self.path("log.jsonl"), "--train-iters", "1000000", "--save", self.path("run"),
                            "--save-interval", "1000000", "--resume", "auto",
                            batch=["--time", "5", "--dependency", "singleton"]) for script in (SRUN, MPIRUN)]
        outs = [self.finish(job, ["COMPLETED", "0:0"], 120 + LIMIT_S) for job in jobs]
        stops = [int(re.search(r"stop: .* after step (\d+)", out)[1]) for out in outs]
        self.assertEqual(re.search(r"step (\d+)/", outs[1])[1], str(stops[0] + 1))
        self.assertEqual(self.checkpoints("run"), [f"step-{stop:08d}" for stop in stops])
        self.shows(f"{SRUN}, then {MPIRUN}: SIGUSR1 from Slurm, saved after steps {stops[0]} and {stops[1]}")

    def test_the_exit_code_of_a_rank_is_that_of_the_job(self):
        for script in (SRUN, MPIRUN):
            with self.subTest(script):
                job = self.submit(script, self.path("log.jsonl"), "--seq-length", "0")
                self.assertIn("error: ", self.finish(job, ["FAILED", "2:0"]))

    def test_a_killed_rank_ends_the_job_with_6(self):
        for script in (SRUN, MPIRUN):
            with self.subTest(script):
                job = self.train(script, self.path(script + ".jsonl"))
                self.node2.send("KILL", self.node2.ranks()[0])
                out = self.finish(job, ["FAILED", "6:0"])
                # It was the only one of its host, so the launcher names it.
                report = re.search(r".*(node2: task 1: Killed|rank 1 .* on node node2 exited on signal 9).*", out)
                self.assertTrue(report, out)
                self.shows(f"{script}: {report[0]}")
