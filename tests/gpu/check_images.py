#!/usr/bin/env python3
"""Fails when a promised target is missing from libtreeverify-cuda.so.

usage: check_images.py LIBRARY PTX ALONE ARCH...

Reads the fat binaries inside the library itself (a magic number, then entries of a kind, 1 for PTX
and 2 for machine code, a size and an architecture), so that it needs no toolkit. Every fat binary,
one per source file, must hold machine code for each ARCH, and PTX for the newest, but for as many as
ALONE says: those hold machine code for one ARCH and nothing else (a kernel that only one device has
instructions for; another kernel does its work on all).
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
    library, ptx, alone, archs = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    with open(library, "rb") as file:
        found = list(fat_binaries(file.read()))
    wanted = {(CODE, int(arch)) for arch in archs} | ({(PTX, int(ptx))} if ptx else set())
    single = [images for images in found if len(images) == 1 < len(wanted) and images <= wanted]
    if len(single) != (alone if len(wanted) > 1 else 0):
        print(f"{len(single)} fat binaries for one device alone, wanted {alone}")
        return 1
    missing = [(i, sorted(wanted - images)) for i, images in enumerate(found)
               if wanted - images and images not in single]
    for i, images in missing:
        print(f"fat binary {i} lacks {images} (1: PTX, 2: machine code)")
    print(f"{len(found)} fat binaries, wanted {sorted(wanted)}")
    return 1 if missing or not found else 0


if __name__ == "__main__":
    sys.exit(main())
