"""launch_mpi.sh over two hosts by OpenMPI's own launcher: ssh to an sshd on each of them."""
import os
import re
import signal
import subprocess
import time
import unittest

from tests.cluster.hosts import ENVIRONMENT, LIMIT_S, HostsTest
from tests.support.train import GPT2, records

SSHD_CONFIG = """Port 2222
HostKey {folder}/{name}.key
PidFile none
AuthorizedKeysFile {folder}/user.key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
SSH_CONFIG = """Host node*
Port 2222
User root
IdentityFile {folder}/user.key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""
TIMEOUT = 3   # --comm-timeout
FOREVER = ["--train-iters", "1000000", "--comm-timeout", str(TIMEOUT)]


class Ssh(HostsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        keys = {}
        for name in ("user", "node1", "node2"):
            path = os.path.join(cls.shared, name + ".key")
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
            with open(path + ".pub") as public:
                keys[name] = public.read()
        cls.write("known_hosts", "".join(f"[{host.name}]:2222 {keys[host.name]}" for host in cls.hosts))
        cls.ssh = "ssh -F " + cls.write("ssh_config", SSH_CONFIG.format(folder=cls.shared))
        cls.hostfile = cls.write("hostfile", "node1 slots=2\nnode2 slots=2\n")
        for host in cls.hosts:
            config = cls.write(host.name + ".conf", SSHD_CONFIG.format(folder=cls.shared, name=host.name))
            # sshd must be started by its absolute path.
            host.run("bash", "-c", f'exec "$(PATH=$PATH:/usr/sbin command -v sshd)" -f {config} '
                     f'-E {cls.shared}/{host.name}.log')

    def start(self, *options, until="step 1/", faults=None):
        """Starts the launcher with four ranks, and waits for a line that begins like this."""
        command = ["scripts/launch/launch_mpi.sh", "--mca", "plm_rsh_agent", self.ssh, "--hostfile", self.hostfile,
                   "-x", "OMP_NUM_THREADS", "-np", "4",
                   *self.command(GPT2, "--micro-batch-size", "1", "--log-interval", "100", *options,
                                 faults=faults)]
        reach = "timeout 2 bash -c 'exec 3<>/dev/tcp/node2/2222 && echo yes' 2>/dev/null || true"
        self.until("node2 is reached", lambda: self.node1.run("bash", "-c", reach))   # once a cable is back
        process = self.node1.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith(until):
                time.sleep(1.5)   # heartbeats are sent twice per second
                return process
        return self.fail(f"exit code {process.wait()}: {''.join(printed)}")

    def finish(self, process, expect):
        """The output of the launcher after that line."""
        out = process.communicate(timeout=LIMIT_S)[0]
        self.assertEqual(process.returncode, expect, out[-4000:])
        self.until("no rank is left", lambda: not any(host.ranks() for host in self.hosts), TIMEOUT + 5)
        self.assertEqual([host.run("ls", "/dev/shm") for host in self.hosts], ["", ""])
        return out

    def reports(self, process, pattern):
        """Waits for the run to end with exit code 6, and returns its hang report."""
        out = self.finish(process, 6)
        report = re.search(rf".*{pattern}.*", out)
        self.assertTrue(report, out[-4000:])
        self.shows(report[0])

    # ---- training

    def test_four_ranks_on_two_hosts_have_the_losses_of_four_on_one(self):
        logs = [self.path(name) for name in ("one.jsonl", "two.jsonl")]
        subprocess.run(["mpirun", "--oversubscribe", "-np", "4", *self.command(
            GPT2, "--micro-batch-size", "1", "--train-iters", "50", "--log-interval", "100", "--log-file", logs[0])],
            check=True, capture_output=True, timeout=LIMIT_S, env=ENVIRONMENT)
        self.finish(self.start("--train-iters", "50", "--log-file", logs[1]), 0)
        one, two = ([r["loss"] for r in records(log, "step")] for log in logs)
        self.assertEqual(len(one), 50)
        self.assertEqual(one, two)

    def test_a_signal_to_the_launcher_saves(self):
        process = self.start(*FOREVER, "--save", self.path("run"), "--save-interval", "1000000")
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            os.kill(int(children.read()), signal.SIGTERM)   # nsenter is the launcher's parent
        stop = re.search(r"stop: a signal to the launch wrapper after step (\d+)", self.finish(process, 0))
        self.assertEqual(self.checkpoints("run"), [f"step-{int(stop[1]):08d}"])
        self.shows(stop[0])

    # ---- faults: the report names rank and host

    def test_a_killed_rank(self):
        for host, rank in ((self.node1, 0), (self.node2, 2)):
            with self.subTest(host.name):
                process = self.start(*FOREVER, until="step 100/")
                pid = host.ranks()[0]
                host.send("KILL", pid)
                self.reports(process, rf"rank {rank} \(process {pid} on {host.name}\) is gone, last seen in ")

    def test_a_suspended_rank(self):
        process = self.start(*FOREVER, until="step 100/")
        pid = self.node2.ranks()[1]
        self.node2.send("STOP", pid)
        self.reports(process, rf"rank 3 \(process {pid} on node2\) (has been suspended by a signal|sends no heartbeat) "
                     r"for 3.*, last seen in .*step \d+.*; rank.* waits? in collective \d+ ")

    def test_a_rank_that_hangs(self):
        process = self.start(*FOREVER, faults="stall@backward=200")
        self.reports(process, r"rank 0 \(process \d+ on node1\) is in step 200, backward, before collective \d+ "
                     r"\(reduce .*\), without progress for 3.*; ranks 1-3 wait in collective ")

    def test_a_cut_cable(self):
        for host in self.hosts:
            with self.subTest(host.name):
                process = self.start(*FOREVER, until="step 100/")
                pids = self.node2.ranks()
                host.cable("down")
                self.addCleanup(host.cable, "up")
                silent = "; ".join(rf"rank {2 + i} \(process {pid} on node2\) sends no heartbeat for 3.*, last seen in "
                                   r".*step \d+.*" for i, pid in enumerate(pids))
                self.reports(process, silent + "; ranks? 0.* waits? in collective ")
                host.cable("up")


if __name__ == "__main__":
    unittest.main()
