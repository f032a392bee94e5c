#!/usr/bin/env python3
"""Fails when a kernel of a source file keeps anything in local memory.

usage: check_spills.py NVCC SOURCE ARCH...

Compiles the source for each architecture with the assembler's resource report, and reads stack
frame, spill stores and spill loads of every kernel in it.
"""

import os
import re
import subprocess
import sys
import tempfile

KERNEL = re.compile(r"Function properties for (\S+)\s+"
                    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def report(nvcc, source, arch, folder):
    command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", "-gencode",
               f"arch=compute_{arch},code=sm_{arch}", "-cubin", source, "-o",
               os.path.join(folder, "image")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main():
    nvcc, source, *archs = sys.argv[1:]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            kernels = KERNEL.findall(report(nvcc, source, arch, folder))
            spills = [kernel for kernel in kernels if any(int(n) for n in kernel[1:])]
            for name, *frame in spills:
                print(f"sm_{arch} {name}: stack, stores, loads {', '.join(frame)}")
            print(f"sm_{arch}: {len(kernels)} kernels, {len(spills)} with a stack or spills")
            bad += len(spills) + (0 if kernels else 1)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
