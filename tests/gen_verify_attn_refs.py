#!/usr/bin/env python3
"""Writes .kdtr reference bundles of verify attention: inputs, and results in float64.

A bundle is a safetensors file. Everything is computed from the stored, rounded inputs. Needs numpy
alone. Values are standard normal; cache rows that belong to nobody are NaN, pages are scattered,
and requests of one bundle have different lengths.

usage: gen_verify_attn_refs.py --out DIR [--only TEXT] [--big] [--seed N] [--jobs N]
"""
import argparse
import json
import multiprocessing
import os
import sys

import numpy as np

LATENT, ROPE = 512, 64
DIM = LATENT + ROPE
# (heads, prefix, budget, batch)
MATRIX = [
    (16, 2048, 16, 2),
    (64, 128, 32, 1),
    (64, 512, 8, 2),
    (16, 30000, 16, 1),
    (8, 0, 8, 2),
    (8, 1, 4, 2),
    (128, 63, 64, 1),
    (16, 64, 255, 1),
    (8, 65, 1, 3),
]
BIG = [(8, 185000, 16, 1)]
TREES = {"": 64, "_chain": 32, "_star": 128}  # suffix: page size


def to_bf16(values):
    """Bits of the nearest bfloat16, ties to even; inputs are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_parents(rng, tree, nodes, q_len):
    parents = np.full(q_len, -1, np.int32)
    for i in range(1, nodes):
        if tree == "_chain":
            parents[i] = i - 1
        elif tree == "_star":
            parents[i] = 0
        else:
            parents[i] = rng.integers(0, i)
    return parents


def ancestors(parents, nodes):
    """visible[i, j]: node j is node i or one of its ancestors."""
    visible = np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        visible[i] |= visible[parents[i]]
    return visible


def attend(q, kv, prefix, visible, scale):
    """q [nodes, heads, DIM], kv [tokens, DIM], all float64 -> out, lse"""
    nodes, heads, _ = q.shape
    scores = scale * (q.reshape(-1, DIM) @ kv.T)
    mask = np.repeat(visible, heads, axis=0)
    scores[:, prefix:][~mask] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=1, keepdims=True)
    out = (p @ kv[:, :LATENT]) / total
    lse = (top + np.log(total))[:, 0]
    return out.reshape(nodes, heads, LATENT), lse.reshape(nodes, heads)


def make_bundle(shape, tree, dtype, seed):
    heads, prefix, budget, batch = shape
    page_size, q_len = TREES[tree], budget + 1
    rng = np.random.default_rng([seed, heads, prefix, budget, len(tree), dtype == "BF16"])
    scale = float(np.float32((128 + ROPE) ** -0.5))
    prefix_len = np.array([prefix * (batch - b) // batch for b in range(batch)], np.int32)
    node_count = np.array([max(1, q_len * (batch - b) // batch) for b in range(batch)], np.int32)
    pages = [-(-(int(prefix_len[b]) + int(node_count[b])) // page_size) for b in range(batch)]
    page_count = sum(pages) + 3
    order = rng.permutation(page_count)
    table = np.full((batch, max(pages) + 1), -1, np.int32)
    pool = np.full((page_count * page_size, DIM), np.nan, np.float32)
    q = rng.standard_normal((batch, q_len, heads, DIM), np.float32)
    parents = np.empty((batch, q_len), np.int32)
    out = np.zeros((batch, q_len, heads, LATENT), np.float32)
    lse = np.full((batch, q_len, heads), -np.inf, np.float32)
    q_bits = to_bf16(q) if dtype == "BF16" else None
    if dtype == "BF16":
        q = from_bf16(q_bits)
    for b in range(batch):
        nodes, start = int(node_count[b]), int(prefix_len[b])
        own, order = order[: pages[b]], order[pages[b] :]
        table[b, : pages[b]] = own
        parents[b] = make_parents(rng, tree, nodes, q_len)
        kv = rng.standard_normal((start + nodes, DIM), np.float32)
        if dtype == "BF16":
            kv = from_bf16(to_bf16(kv))
        slot = np.arange(start + nodes)
        pool[own[slot // page_size].astype(np.int64) * page_size + slot % page_size] = kv
        visible = ancestors(parents[b], nodes)
        queries, rows = q[b, :nodes].astype(np.float64), kv.astype(np.float64)
        out[b, :nodes], lse[b, :nodes] = attend(queries, rows, start, visible, scale)
    pool = pool.reshape(page_count, page_size, DIM)
    if dtype == "BF16":
        # NaN rows: the rounding above would carry, so they are written as such
        pool_bits = np.where(np.isnan(pool), np.uint16(0x7FC0), to_bf16(np.nan_to_num(pool)))
    tensors = {
        "q": (dtype, q_bits if dtype == "BF16" else q),
        "kv_pages": (dtype, pool_bits if dtype == "BF16" else pool),
        "page_table": ("I32", table),
        "prefix_len": ("I32", prefix_len),
        "node_count": ("I32", node_count),
        "parents": ("I32", parents),
        "out": ("F32", out),
        "lse": ("F32", lse),
    }
    metadata = {
        "format": "kdtr",
        "version": "1",
        "kind": "verify_attn",
        "softmax_scale": repr(scale),
        "page_size": str(page_size),
        "seed": str(seed),
    }
    return tensors, metadata


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, values) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".part", "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())
    os.replace(path + ".part", path)


def bundle_jobs(args):
    """(name, shape, tree, dtype, seed, folder) of every bundle that is wanted, largest first."""
    jobs = []
    shapes = MATRIX + (BIG if args.big else [])
    for shape in sorted(shapes, key=lambda s: -s[0] * s[1] * s[2]):
        for tree in TREES:
            for dtype in ("F32", "BF16"):
                name = f"verify_attn_h{shape[0]}_p{shape[1]}_b{shape[2]}{tree}"
                name += "_bf16.kdtr" if dtype == "BF16" else ".kdtr"
                if args.only in name:
                    jobs.append((name, shape, tree, dtype, args.seed, args.out))
    return jobs


def write_bundle(job):
    name, shape, tree, dtype, seed, folder = job
    tensors, metadata = make_bundle(shape, tree, dtype, seed)
    write_safetensors(os.path.join(folder, name), tensors, metadata)
    return name


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", required=True, help="folder of the bundles")
    parser.add_argument("--only", default="", help="only names that contain this text")
    parser.add_argument("--big", action="store_true", help="also the 185,000-token bundles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    args = parser.parse_args()
    if sys.byteorder != "little":
        sys.exit("bundles are little-endian and are written on little-endian machines only")
    os.makedirs(args.out, exist_ok=True)
    # A bundle's numbers depend on its own seed, so the number of processes changes nothing.
    with multiprocessing.Pool(args.jobs) as pool:
        for name in pool.imap(write_bundle, bundle_jobs(args), chunksize=1):
            print(name)


if __name__ == "__main__":
    main()
