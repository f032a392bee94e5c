#!/usr/bin/env python3
"""Pack the parsing cases of JSONTestSuite into one file that C reads without a decompressor.

usage: pack.py <JSONTestSuite checkout>/test_parsing suite.pack

Each entry is "<name> <bytes>\n", the raw bytes, "\n", sorted by name. Files above 90,000 bytes are
left out; the test generates them.
"""

import pathlib
import sys


def main():
    source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out = bytearray()
    for path in sorted(source.glob("*.json")):
        data = path.read_bytes()
        if len(data) > 90_000:
            print("left out:", path.name, len(data))
            continue
        out += f"{path.name} {len(data)}\n".encode() + data + b"\n"
    target.write_bytes(out)


if __name__ == "__main__":
    main()
