#!/usr/bin/env python3
"""Fails when tests/gpu/tvcuda.py, which runs on a device alone, no longer mirrors kernels.h.

Compares the ABI's number, the slots of struct tv_kernels in their order, and the members of struct
tv_verify_attn with their types.

usage: mirror.py SOURCE_FOLDER
"""

import ast
import os
import re
import sys

TYPES = {"int32_t": "c_int32", "int64_t": "c_int64", "float": "c_float", "size_t": "c_size_t"}


def structure(header, name):
    """The members' text of a struct, without comments."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", header, re.S | re.M).group(1)
    return re.sub(r"/\*.*?\*/", "", body, flags=re.S)


def members(header, name):
    """(name, ctypes type) of a struct of plain members."""
    found = []
    for line in structure(header, name).split(";"):
        member = re.fullmatch(r"\s*(?:const )?(enum \w+|\w+) (\*?)(\w+)\s*", line)
        if member:
            kind, pointer, label = member.groups()
            found.append((label, "c_void_p" if pointer else TYPES.get(kind, "c_int")))
    return found


def mirror(text):
    """ABI, SLOTS and VerifyAttn's fields of the Python side."""
    abi = slots = fields = None
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "ABI":
            abi = node.value.value
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "SLOTS":
            slots = ast.literal_eval(node.value)
        elif isinstance(node, ast.ClassDef) and node.name == "VerifyAttn":
            pairs = next(part.value.elts for part in node.body if isinstance(part, ast.Assign))
            fields = [(pair.elts[0].value, pair.elts[1].attr) for pair in pairs]
    return abi, slots, fields


def main():
    source = sys.argv[1]
    with open(os.path.join(source, "kernels", "kernels.h"), encoding="utf-8") as file:
        header = file.read()
    with open(os.path.join(source, "tests", "gpu", "tvcuda.py"), encoding="utf-8") as file:
        abi, slots, fields = mirror(file.read())
    wanted = (int(re.search(r"#define TV_KERNELS_ABI\s+(\d+)", header).group(1)),
              re.findall(r"\(\*(\w+)\)\(", structure(header, "tv_kernels")),
              members(header, "tv_verify_attn"))
    bad = 0
    for what, want, got in zip(("ABI", "slots", "tv_verify_attn"), wanted, (abi, slots, fields)):
        if not want or want != got:
            bad += 1
            print(f"{what}: kernels.h has {want},\n  tvcuda.py {got}")
    print(f"{len(wanted[1])} slots, {len(wanted[2])} members, {bad} that differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
