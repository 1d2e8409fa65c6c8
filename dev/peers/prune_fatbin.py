#!/usr/bin/env python3
"""Leaves one GPU architecture in a CUDA shared library, so that it can be carried to a machine without a network.

    dev/peers/prune_fatbin.py FROM.so TO.so [ARCH]     90 by default, which includes 90a

The file keeps its size, but what was removed is zeros: `xz -9` makes 27 MB of Transformer Engine's 276. Each fat binary
in the section .nv_fatbin is a header (magic, version, header bytes, body bytes) and entries, each with its kind, header
bytes, body bytes and, at byte 28, the architecture. Needs readelf; standard library only.
"""
import struct
import subprocess
import sys

MAGIC = 0xBA55ED50


def section(path):
    """(offset, bytes) of .nv_fatbin."""
    out = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    words = next(line for line in out.splitlines() if ".nv_fatbin " in line).split("]")[1].split()
    return int(words[3], 16), int(words[4], 16)


def entries(data, begin, end):
    """(begin, end of the header, end, architecture) of each entry."""
    while begin < end:
        header, body = struct.unpack_from("<IQ", data, begin + 4)
        yield begin, begin + header, begin + header + body, struct.unpack_from("<I", data, begin + 28)[0]
        begin += header + body


def prune(data, start, size, arch):
    """Returns how many entries were kept."""
    at, kept = start, 0
    while at < start + size:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:   # padding
            at += 8
            continue
        begin, end = at + header, at + header + body
        found = list(entries(data, begin, end))
        mine = b"".join(bytes(data[first:last]) for first, _, last, its in found if its == arch)
        kept += sum(its == arch for *_, its in found)
        if mine:
            struct.pack_into("<Q", data, at + 8, len(mine))
            data[begin:end] = mine + bytes(body - len(mine))
        else:   # entries stay in number and place, without their bodies
            for _, first, last, _ in found:
                data[first:last] = bytes(last - first)
        at = end
    return kept


def main():
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    with open(sys.argv[1], "rb") as file:
        data = bytearray(file.read())
    kept = prune(data, *section(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) == 4 else 90)
    with open(sys.argv[2], "wb") as file:
        file.write(data)
    print(f"{kept} entries kept")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
