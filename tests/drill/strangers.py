"""Unknown processes connect to the port on which rank 0 waits for the hosts of a run. The run must continue
undisturbed, and send them nothing but a challenge."""
import contextlib
import os
import re
import socket
import threading
import time

from tests.support.ranks import HAVE_RANKS, MPIRUN, each_rank
from tests.support.train import GPT2

STEPS = 12
# The only bytes that an unknown process receives.
MOST_HEARD = 48


def prepare(shared):
    pass


def word(draw):
    """The first bytes that an unknown process sends."""
    return draw.choice((b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"8fml\2\0\0\0" + b"\x7f" * 8, b"x" * 70000,
                        b"8fml", draw.randbytes(draw.randrange(1, 300)), b"\0" * 4096,
                        b"8fml\1\0\0\0" + draw.randbytes(77)))


def knock(port, ended, words, met):
    while not ended.is_set():
        stranger = socket.socket()
        if stranger.connect_ex(("127.0.0.1", port)):
            stranger.close()
            continue
        stranger.settimeout(30)
        met.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall(words[len(met) % len(words)])


def trial(shared, case):
    """A run on two hosts, while unknown processes connect. The port is open for milliseconds only."""
    if not HAVE_RANKS:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = [*shared.command(GPT2), "--micro-batch-size", "1", "--train-iters", str(STEPS)]
    hosts = [["env", f"LLMFP8_HOST=host{rank}", *train] for rank in range(2)]
    met, ended, words = [], threading.Event(), [word(case.draw) for _ in range(50)]
    knockers = [threading.Thread(target=knock, args=(port, ended, words, met)) for _ in range(2)]
    for thread in knockers:
        thread.start()
    begin = time.monotonic()
    process = case.start([*MPIRUN, *each_rank(*hosts)],
                         env={"LLMFP8_SOCKET_IFNAME": "=lo", "LLMFP8_SOCKET_PORTS": str(port)})
    code, out, error = case.end(process, 60)
    ended.set()
    for thread in knockers:
        thread.join()
    shared.strangers = getattr(shared, "strangers", 0) + len(met)
    for stranger in met:
        heard = b""
        with stranger, contextlib.suppress(OSError):
            while piece := stranger.recv(4096):
                heard += piece
        if len(heard) > MOST_HEARD:
            case.found("loss", f"a stranger was told {len(heard)} bytes")
    case.judge(code, error, {0}, one_line=False)
    if code == 0 and (not re.search(f"^stop: finished {STEPS} steps", out, re.M) or "cannot reach" in error):
        case.found("code", "the hosts did not meet")
    case.story.append(f"{len(met)} strangers in {time.monotonic() - begin:.1f} s")


def finish(shared):
    print(f"strangers who found the port open: {getattr(shared, 'strangers', 0)}")
    case = shared.case("strangers", "all")
    os.rmdir(case.folder)
    return case
