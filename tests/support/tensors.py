"""Read a safetensors file into numpy arrays (fixtures only: the daemon has its own strict reader), and write one.

bf16 values are read as the f32 ones that they are.
"""

import json
import struct

import numpy as np

TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8"}


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
        if item["dtype"] == "BF16":
            values = (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw, dtype=TYPES[item["dtype"]])
        arrays[name] = values.reshape(item["shape"])
    return arrays


def save(path, arrays):
    """f32 and f16 arrays by name."""
    header, data = {}, b""
    for name, array in arrays.items():
        kind = {"<f4": "F32", "<f2": "F16"}[array.dtype.str]
        raw = array.tobytes()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
