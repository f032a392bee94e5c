#!/usr/bin/env python3
"""Fails when a CUDA header does not compile by itself.

usage: check_headers.py NVCC ARCH HEADER...
"""

import subprocess
import sys


def main():
    nvcc, arch, headers = sys.argv[1], sys.argv[2], sys.argv[3:]
    bad = 0
    for header in headers:
        command = [nvcc, "-std=c++17", f"-arch=sm_{arch}", "-x", "cu", "-cubin", "-o", "/dev/null", header]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            print(f"{header} does not compile alone:\n{run.stderr.strip()}")
            bad += 1
    print(f"{len(headers)} headers, {bad} that need another")
    return 1 if bad or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
