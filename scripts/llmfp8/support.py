"""Shared by all scripts: errors, optional packages, progress."""
import argparse
import contextlib
import ctypes
import ctypes.util
import difflib
import errno
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import signal
import stat
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "a git-lfs pointer in place of the file; git lfs pull fetches that"
VENV = "python3 -m venv .venv && . .venv/bin/activate && "


class InputError(Exception):
    """An error of the user's input, in one line; the script prints it and exits with 2."""


def one_line(error):
    """A library's exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def parse_json(text):
    """Parses JSON from outside. ValueError is the only error, also for lists that are nested very deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class Parser(argparse.ArgumentParser):
    """Errors in one line, with exit code 2. A mistyped option is named before options that are missing."""

    def error(self, message):
        raise InputError(f"{message} (--help lists the options)")

    def parse_known_args(self, args=None, namespace=None):
        words = list(sys.argv[1:] if args is None else args)
        for word in words[:words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(known.startswith(name) for known in self._option_string_actions):
                near = difflib.get_close_matches(name, self._option_string_actions, 1)
                self.error(f"unknown option {name}" + (f": did you mean {near[0]}?" if near else ""))
        return super().parse_known_args(words, namespace)


def whole_number(text):
    """For options: an integer, also written as 1e8."""
    try:
        if "e" not in text.lower():
            return int(text)
        value = float(text)
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a whole number")


def count_text(number, noun, plural=""):
    """"1 shard", "2 shards"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def require_regular(path):
    """Refuses folders, pipes (which would be waited for) and devices (which have no end)."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device"}
        raise InputError(f"{path}: is {kind.get(stat.S_IFMT(mode), 'no regular file')}, where a file is needed")


def refuse_lfs_pointer(path):
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InputError(f"{path}: this is {LFS_ADVICE}")


def read_bounded(path, most, what):
    """The bytes of a file of at most `most` bytes; `what` it should be is part of the error. Waits for no FIFO and
    reads no device."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}; name {what} that exists and that you "
                         "may read") from None
    if len(data) > most:
        raise InputError(f"{path}: has more than {most} bytes, so it is not {what}")
    return data


@functools.cache
def xxh3_library():
    """libxxhash, which Debian's apt needs, or None."""
    class Hash(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]
    name = ctypes.util.find_library("xxhash")
    library = name and ctypes.CDLL(name)
    if library:
        library.XXH3_128bits.restype, library.XXH3_128bits.argtypes = Hash, [ctypes.c_void_p, ctypes.c_size_t]
    return library


def xxh3(data):
    """XXH3-128 of bytes or of a numpy array, as manifest.json has it; None without libxxhash."""
    if not xxh3_library():
        return None
    found = xxh3_library().XXH3_128bits(data if isinstance(data, bytes) else data.ctypes.data, len(data))
    return f"{found.high:016x}{found.low:016x}"


def escaped(text):
    """Control characters as \\x1b, so that a terminal does not act on them."""
    return "".join(c if c.isprintable() or c in " \n" else c.encode("unicode_escape").decode() for c in text)


def run_main(main):
    """Calls main() and turns its outcome into the exit status, with one line for every error: 2 for input, 7 for the
    disk, 1 for a bug; 130 if interrupted."""
    for stream in (sys.stdout, sys.stderr):   # for text that the terminal's encoding cannot write
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:   # the reader of our output (head) has seen enough
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())   # what is left in the buffer goes there
        status = 0
    except KeyboardInterrupt:
        status = said("interrupted", 130)
    except InputError as error:
        text = escaped(str(error))   # it may quote the input
        status = said(f"error: {text if len(text) < 1000 else text[:500] + ' ... ' + text[-200:]}", 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
        status = said(f"error: {where}{error.strerror or error}", 7 if full else 2)
    except MemoryError:
        status = said("error: not enough memory for this input", 2)
    except Exception as error:   # a bug here; its place is what a report of it needs
        place = error.__traceback__
        while place.tb_next:
            place = place.tb_next
        status = said(f"error: a bug: {one_line(error)} ({Path(place.tb_frame.f_code.co_filename).name}:"
                      f"{place.tb_lineno}); please report it with the command and its input", 1)
    sys.exit(status)


def said(line, status):
    try:
        print(line, file=sys.stderr)
    except OSError:
        pass
    return status


def no_follow(path, flags):
    """An opener for open(): a link at the last part of the path is an error. For names that are not the user's."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def replacement(path):
    """Gives the path of a new file beside `path`, with its suffix and a name that cannot be predicted; it takes the
    place of `path` at the end, after fsync, and is removed on failure. A link at `path` is replaced, not followed."""
    path = Path(path)
    number, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    try:
        with open(number, "rb") as file:
            yield Path(name)
            os.umask(mask := os.umask(0))
            os.chmod(name, 0o666 & ~mask)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:   # write() names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextlib.contextmanager
def only_user_of(folder, seconds=2):
    """Locks a folder; yields False if another process holds the lock, True on a file system without locks. A lock lasts
    until the process and its forks have ended, so this waits a moment for the forks of an earlier run."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + seconds
        while not (alone := lock(number)) and time.monotonic() < end:
            time.sleep(0.05)
        yield alone
    finally:
        os.close(number)


def lock(number):
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:   # ENOLCK, EOPNOTSUPP; EBADF on NFS, which locks only what is open for writing
        pass
    return True


def end_with_parent(parent):
    """For a worker process: it is killed when its parent ends, even if that was before this call. The parent of a
    worker that is no fork is a server process, which ends with the run that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PR_SET_PDEATHSIG
    if multiprocessing.get_start_method() == "fork" and os.getppid() != parent:
        os._exit(1)


def pinned(package):
    """The requirement line of a package, without its environment marker."""
    for line in REQUIREMENTS.read_text().splitlines():
        if line.startswith(package + "=="):
            requirement = line.split(";")[0].strip()
            marker = line.partition(";")[2].strip()
            if not marker or (sys.version_info < (3, 11)) == ("<" in marker):
                return requirement
    return package


def install_line(package):
    """The shell line that installs a package. Debian's and Ubuntu's Python needs a virtual environment (PEP 668)."""
    managed = sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    return f"{VENV if managed else ''}python3 -m pip install '{pinned(package)}'"


def need(module, package, purpose):
    """Imports an optional package; the error has the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{purpose} needs the Python package {package} ({error}): "
                         f"{install_line(package)}") from None


class Progress:
    """Shows progress on standard error: on a terminal a line that changes, in a log a line every ten seconds."""

    def __init__(self, total_bytes, quiet=False):
        self.total, self.quiet = total_bytes, quiet   # 0: unknown
        self.documents = self.tokens = 0
        self.terminal = sys.stderr.isatty()
        self.begin, self.every = time.monotonic(), 0.5 if self.terminal else 10
        self.next = self.begin + self.every

    def update(self, done_bytes, documents, tokens):
        """done_bytes: read so far; documents and tokens: new ones."""
        self.documents += documents
        self.tokens += tokens
        if not self.quiet and time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            begin, end = ("\r", "\x1b[K") if self.terminal else ("", "\n")
            print(begin + self.line(done_bytes), end=end, file=sys.stderr, flush=True)

    def line(self, done_bytes):
        seconds = max(time.monotonic() - self.begin, 1e-9)
        rate = done_bytes / seconds
        text = (f"{done_bytes / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s | {count_text(self.documents, 'document')} | "
                f"{count_text(self.tokens, 'token')}")
        if self.total and rate > 0:
            left = max(0, self.total - done_bytes) / rate
            text = (f"{100.0 * done_bytes / self.total:.1f}% | {text} | "
                    f"eta {int(left // 3600):02d}:{int(left // 60 % 60):02d}:{int(left % 60):02d}")
        return text

    def close(self):
        if self.terminal and not self.quiet:
            print(file=sys.stderr)
