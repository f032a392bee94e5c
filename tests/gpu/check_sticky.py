#!/usr/bin/env python3
"""Fails when the toolkit knows an error that ends a process's use of its device, and the backend takes it for one that is
over: a daemon would answer every round with a fault and never end.

usage: check_sticky.py BACKEND_C NVCC
"""

import os
import re
import sys


def main():
    source, nvcc = sys.argv[1:]
    header = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "include", "driver_types.h")
    with open(header, encoding="utf-8") as file:
        known = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*(cudaError\w+)\s*=", file.read(), re.DOTALL)
    ending = {name for text, name in known if "must be terminated" in " ".join(text.replace("*", " ").split())}
    with open(source, encoding="utf-8") as file:
        cases = re.findall(r"((?:case cudaError\w+:\s*(?:/\*.*?\*/\s*)?)+)return -ENOTRECOVERABLE;", file.read(), re.DOTALL)
    taken = set(re.findall(r"cudaError\w+", " ".join(cases)))
    missing = sorted(ending - taken)
    print(f"{len(ending)} errors end a process, {len(missing)} of them are taken for passing ones: {missing}")
    return 1 if missing or len(ending) < 5 else 0


if __name__ == "__main__":
    sys.exit(main())
