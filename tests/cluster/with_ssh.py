"""launch_mpi.sh over two hosts by OpenMPI's own launcher: ssh to an sshd on each of them."""
import os
import re
import signal
import subprocess

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
                   *self.command(GPT2, "--micro-batch-size", "1", "--log-interval", "100", *options, faults=faults)]
        reach = "timeout 2 bash -c 'exec 3<>/dev/tcp/node2/2222 && echo yes' 2>/dev/null || true"
        self.until("node2 is reached", lambda: self.node1.run("bash", "-c", reach))   # once a cable is back
        process = self.node1.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith(until):
                return process
        return self.fail(f"exit code {process.wait()}: {''.join(printed)}")

    def finish(self, process, expect):
        """The output of the launcher after that line."""
        out = process.communicate(timeout=LIMIT_S)[0]
        self.assertEqual(process.returncode, expect, out[-4000:])
        self.until("no rank is left", lambda: not any(host.ranks() for host in self.hosts),
                   10 * TIMEOUT + 5)   # a host behind a cut cable may have waited in "read data"
        self.assertEqual([host.run("ls", "/dev/shm") for host in self.hosts], ["", ""])
        return out

    def reports(self, process, *patterns):
        """Waits for the run to end with exit code 6, after it has printed these lines."""
        out = self.finish(process, 6)
        for pattern in patterns:
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

    # ---- faults: the reports name rank and host; test_watch.py has ranks that are suspended or hang

    OTHERS = r"all ranks of this host wait for another host \(node2: ranks 2,3\); ranks? .* waits? in collective \d+ "

    def test_a_killed_rank(self):
        for host, rank in ((self.node1, 0), (self.node2, 2)):
            with self.subTest(host.name):
                process = self.start(*FOREVER, until="step 100/")
                pid = host.ranks()[0]
                host.send("KILL", pid)
                self.reports(process, rf"error: on {host.name}: rank {rank} \(process {pid} on {host.name}\) is gone, "
                             "last seen in ")

    def test_a_suspended_host(self):
        process = self.start(*FOREVER, until="step 100/")
        for pid in self.node2.ranks():
            self.node2.send("STOP", pid)
        self.reports(process, "error: on node1: " + self.OTHERS, "launch_mpi.sh: no hang report came from node2")

    def test_a_cut_cable(self):
        for host in self.hosts:
            with self.subTest(host.name):
                process = self.start(*FOREVER, until="step 100/")
                host.cable("down")
                self.addCleanup(host.cable, "up")
                self.reports(process, "error: on node1: " + self.OTHERS,
                             "launch_mpi.sh: no hang report came from node2")
                host.cable("up")
