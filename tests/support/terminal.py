"""A process on a terminal of its own."""
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time


class Terminal:
    """A process on a terminal of its own, of which `screen` is what it has written since the last look."""

    def __init__(self, *command, columns=80, rows=24, env=None):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        environment = dict(os.environ, TERM="xterm", **(env or {}))
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen([sys.executable, *map(str, command)], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, env=environment, preexec_fn=self.take_terminal)
        os.close(slave)
        self.text = ""

    @staticmethod
    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)   # ignored in tests that a shell started in the background

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, holds, seconds=30):
        end = time.monotonic() + seconds
        while not holds(self.text):
            if not select.select([self.master], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError("the screen is\n" + self.text[-3000:])
            try:
                self.text += os.read(self.master, 1 << 16).decode()
            except OSError:   # the process has closed the terminal
                break
        if not holds(self.text):
            raise AssertionError("the screen is\n" + self.text[-3000:])

    def frames(self):
        return [part.replace("\x1b[K", "").split("\x1b[J")[0].split("\r\n")
                for part in self.text.split("\x1b[H")[1:] if "\x1b[J" in part]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
