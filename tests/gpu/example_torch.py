#!/usr/bin/env python3
"""Tree-verify attention from another engine: libtreeverify-cuda through ctypes, on torch tensors.

usage: example_torch.py [LIBRARY]    (default: the installed one, found as any shared library is)

Two requests share a pool of pages; the first has 70 cached tokens and a tree of four nodes
(0 -> 1 -> 2 and 0 -> 3), the second starts from nothing with a chain of two. Checks the result
against plain torch and says so. Exit status 77 without a device.
"""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit(77)

from tvcuda import Kernels


def main():
    kernels = Kernels(sys.argv[1] if len(sys.argv) > 1 else "libtreeverify-cuda.so.0")
    heads, scale = 16, 192 ** -0.5
    torch.manual_seed(1)
    device = dict(device="cuda", dtype=torch.int32)
    pool = torch.randn(4, 64, 576, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, 4, heads, 576, device="cuda", dtype=torch.bfloat16)
    page_table = torch.tensor([[3, 1], [0, -1]], **device)
    prefix_len, node_count = torch.tensor([70, 0], **device), torch.tensor([4, 2], **device)
    parents = torch.tensor([[-1, 0, 1, 0], [-1, 0, -1, -1]], **device)
    out, lse = kernels.verify_attn(query, pool, page_table, prefix_len, node_count, parents, scale)

    keys = torch.cat((pool[3], pool[1]))[:74].double()
    node = 3  # a child of the root: attends to the prefix, the root and itself
    attended = list(range(70)) + [70, 73]
    score = query[0, node].double() @ keys[attended].T * scale
    want = torch.softmax(score, -1) @ keys[attended, :512]
    error = ((out[0, node].double() - want).norm() / want.norm()).item()
    padding = bool((out[1, 2:] == 0).all() and torch.isinf(lse[1, 2:]).all())
    print(f"{kernels.variant}: rel_l2 {error:.2e}, padding rows empty: {padding}")
    return 0 if error < 4e-3 and padding else 1


if __name__ == "__main__":
    sys.exit(main())
