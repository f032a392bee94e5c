#!/usr/bin/env python3
"""Fails when a promised target is missing from libtreeverify-cuda.so.

usage: check_images.py LIBRARY PTX ARCH...

Reads the fat binaries inside the library itself (a magic number, then entries of a kind, 1 for PTX
and 2 for machine code, a size and an architecture), so that it needs no toolkit. Every fat binary,
one per source file, must hold machine code for each ARCH, and PTX for the newest.
"""

import struct
import sys

MAGIC = 0xBA55ED50
PTX, CODE = 1, 2


def fat_binaries(data):
    """Yields the set of (kind, architecture) of each fat binary in the file."""
    at = data.find(struct.pack("<I", MAGIC))
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end, images = at + header, at + header + size, set()
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            images.add((kind, arch))
            entry += entry_header + payload
        yield images
        at = data.find(struct.pack("<I", MAGIC), max(end, at + 4))


def main():
    library, ptx, archs = sys.argv[1], sys.argv[2], sys.argv[3:]
    with open(library, "rb") as file:
        found = list(fat_binaries(file.read()))
    wanted = {(CODE, int(arch)) for arch in archs} | ({(PTX, int(ptx))} if ptx else set())
    missing = [(i, sorted(wanted - images)) for i, images in enumerate(found) if wanted - images]
    for i, images in missing:
        print(f"fat binary {i} lacks {images} (1: PTX, 2: machine code)")
    print(f"{len(found)} fat binaries, wanted {sorted(wanted)}")
    return 1 if missing or not found else 0


if __name__ == "__main__":
    sys.exit(main())
