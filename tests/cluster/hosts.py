"""Two hosts on one machine, node1 and node2: namespaces with separate names, processes, shared memory and networks,
joined by a virtual cable. They share the files. When this process ends, for whatever reason, the kernel ends all
processes of the hosts and removes their networks."""
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.train import ROOT, TrainTest

# The first process of a host: bash, which reaps processes that have lost their parent. /run is for sockets of daemons.
# sshd treats "!" in /etc/shadow as a locked account, and some installers set it for root.
FIRST = """set -e
echo {name} > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mkdir -p /run/sshd /run/munge
mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/shadow /etc/shadow
echo ready
sleep infinity & while :; do wait; done"""
LIMIT_S = 180   # of waiting for what takes seconds where nothing else runs
SEPARATE = ["--mount", "--uts", "--ipc", "--net", "--pid"]
# OpenMPI refuses root unless told otherwise.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Host:
    def __init__(self, name, address, folder):
        self.name, self.address = name, address
        self.unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *SEPARATE, "--fork", "--kill-child", "--mount-proc",
             "bash", "-c", FIRST.format(name=name, folder=shlex.quote(folder))],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} cannot be made: {self.unshare.communicate()[1].strip()}")
        self.first = int(Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children").read_text())

    def start(self, *command, **how):
        """Starts a command on this host, in the repository's folder."""
        inside = ["nsenter", "--target", str(self.first), *SEPARATE, "--wd=" + ROOT]
        return subprocess.Popen([*inside, *command], **{"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, **how})

    def run(self, *command, timeout=LIMIT_S, **how):
        """Runs a command, which must exit with 0, and returns its output."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
        out, errors = process.communicate(timeout=timeout)
        if process.returncode:
            raise RuntimeError(f"{self.name}: {shlex.join(command)} ended with {process.returncode}: {out}{errors}")
        return out

    def ranks(self):
        """The process ids of the trainers on this host, in its own numbering."""
        names = "grep -l '^Name:.train_' /proc/[0-9]*/status || true"
        return sorted(int(path.split("/")[2]) for path in self.run("bash", "-c", names).split())

    def send(self, signal, pid):
        self.run("kill", f"-{signal}", str(pid))

    def cable(self, state):
        """"up" or "down"."""
        self.run("ip", "link", "set", "eth0", state)

    def end(self):
        self.unshare.kill()
        self.unshare.communicate()


class HostsTest(TrainTest):
    """Base of tests that use two hosts and a folder."""

    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp(prefix="llmc-cluster-")
        cls.addClassCleanup(shutil.rmtree, cls.shared, ignore_errors=True)
        addresses = {f"node{i}": f"10.77.0.{i}" for i in (1, 2)}
        cls.write("hosts", "127.0.0.1 localhost\n" + "".join(f"{a} {name}\n" for name, a in addresses.items()))
        with open("/etc/shadow") as shadow:
            cls.write("shadow", "root:*:1::::::\n" + "".join(row for row in shadow if not row.startswith("root:")))
        cls.hosts = []
        for name, address in addresses.items():
            cls.hosts.append(Host(name, address, cls.shared))
            cls.addClassCleanup(cls.hosts[-1].end)
        cls.node1, cls.node2 = cls.hosts
        subprocess.run(["ip", "link", "add", "eth0", "netns", str(cls.node1.first), "type", "veth",
                        "peer", "name", "eth0", "netns", str(cls.node2.first)], check=True)
        for host in cls.hosts:
            host.run("ip", "addr", "add", host.address + "/24", "dev", "eth0")
            host.run("ip", "link", "set", "lo", "up")
            host.cable("up")

    @classmethod
    def write(cls, name, text, mode=0o600):
        path = os.path.join(cls.shared, name)
        Path(path).write_text(text)
        os.chmod(path, mode)
        return path

    def setUp(self):
        super().setUp()
        self.addCleanup(self.end_ranks)

    def end_ranks(self):
        """Ends the processes that a failed test has left."""
        for host in self.hosts:
            host.cable("up")
            for pid in host.ranks():
                host.run("bash", "-c", f"kill -KILL {pid} || true")

    def shows(self, text):
        """Prints an observation into the log of the tests."""
        print("".join(f"\n    {line}" for line in text.strip().splitlines()), end=" ", file=sys.stderr, flush=True)

    def until(self, what, holds, seconds=LIMIT_S):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.1)
        return self.fail(f"not within {seconds} s: {what}")
