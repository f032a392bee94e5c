"""Read a safetensors file into numpy arrays (fixtures only: the daemon has its own strict reader)."""

import json
import struct

import numpy as np

TYPES = {"F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    arrays = {}
    for name, item in header.items():
        begin, end = item["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        arrays[name] = np.frombuffer(raw, dtype=TYPES[item["dtype"]]).reshape(item["shape"])
    return arrays
