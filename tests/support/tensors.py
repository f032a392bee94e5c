"""Read a safetensors file as it is or into numpy arrays (fixtures only: the daemon has its own strict reader), and write one.

In an array, bf16 values are the f32 ones that they are.
"""

import json
import struct

import numpy as np

TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8"}


class Tensor:
    """As a file has it: the type's name, the shape, the bytes."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, shape, data

    def array(self):
        if self.dtype == "BF16":
            values = (np.frombuffer(self.data, dtype="<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(self.data, dtype=TYPES[self.dtype])
        return values.reshape(self.shape)


def header(file):
    """What an open file says of its tensors, by name, and where their bytes begin."""
    (size,) = struct.unpack("<Q", file.read(8))
    entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return entries, 8 + size


def load_raw(path):
    with open(path, "rb") as file:
        entries, _ = header(file)
        data = file.read()
    return {name: Tensor(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in entries.items()}


def load(path):
    return {name: tensor.array() for name, tensor in load_raw(path).items()}


def save_raw(path, tensors, edit=None):
    """edit: changes the header's object before it is written."""
    entries, data = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + len(tensor.data)]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.data
    if edit is not None:
        edit(entries)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def save(path, arrays):
    """f32 and f16 arrays by name."""
    kinds = {"<f4": "F32", "<f2": "F16"}
    save_raw(path, {name: Tensor(kinds[array.dtype.str], array.shape, array.tobytes()) for name, array in arrays.items()})
