#!/usr/bin/env python3
"""Fails when a kernel of the library keeps anything in local memory.

usage: check_spills.py ARCH,... REPORT...

Reads what the assembler said while the library was compiled (-Xptxas -v, a file per source): stack
frame, spill stores and spill loads of every kernel in it. A kernel that some ARCH has, each other
has: those of a device alone (sm_90a) are beside them.
"""

import re
import sys
from collections import Counter
from pathlib import Path

KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'\n.*Function properties for \1\n\s+"
                    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def main():
    kernels, bad = Counter(), 0
    for path in sys.argv[2:]:
        report = Path(path).read_text(encoding="utf-8")
        found = KERNEL.findall(report)
        bad += report.count("Compiling entry function") - len(found)
        for name, arch, *frame in found:
            kernels[arch] += 1
            if any(int(size) for size in frame):
                print(f"{Path(path).stem} {arch} {name}: stack, stores, loads {', '.join(frame)}")
                bad += 1
    counts = {kernels[f"sm_{arch}"] for arch in sys.argv[1].split(",")}
    print(f"{dict(kernels)} kernels, {bad} unread or with a stack or spills")
    return 1 if bad or 0 in counts or len(counts) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
