"""Random verify-attention inputs on the device, and what they should give in float64.

The reference gathers each request's rows and multiplies whole matrices in f64; it shares nothing
with the kernels but the definition.
"""

import numpy as np
import torch

DIMS, LATENT = 576, 512
SCALE = 192 ** -0.5


def tree(kind, nodes, rng):
    """Parents of a tree of `nodes` nodes."""
    if kind == "chain":
        return np.arange(-1, nodes - 1)
    if kind == "star":
        return np.where(np.arange(nodes) == 0, -1, 0)
    return np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])


class Case:
    """One launch's inputs. prefixes and nodes are lists over the batch; unused rows hold NaN."""

    def __init__(self, heads, prefixes, nodes, *, kind="random", page_size=64, dtype=torch.bfloat16,
                 seed=0, packed=False, contiguous=False, spare_pages=0, fill_nan=True, q_len=None):
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.heads, self.prefixes, self.nodes, self.page_size = heads, prefixes, nodes, page_size
        self.q_len = q_len or max(nodes)
        self.packed = packed
        batch = len(prefixes)
        lengths = [p + n for p, n in zip(prefixes, nodes)]
        counts = [-(-length // page_size) for length in lengths]
        pages = sum(counts) + spare_pages
        # with spare pages, the session sits at the top of the pool
        ids = np.arange(spare_pages, pages)
        if not contiguous:
            rng.shuffle(ids)
        table = np.full((batch, max(counts)), -1, np.int32)
        self.kv = torch.empty((pages, page_size, DIMS), device="cuda", dtype=dtype)
        if fill_nan:
            self.kv.fill_(float("nan"))
        self.starts = np.cumsum([0] + nodes[:-1]) if packed else np.arange(batch) * self.q_len
        rows = sum(nodes) if packed else batch * self.q_len
        parents = np.full(rows, -1, np.int32)
        self.rows = []
        for b in range(batch):
            mine = ids[:counts[b]]
            ids = ids[counts[b]:]
            table[b, :counts[b]] = mine
            values = torch.randn((lengths[b], DIMS), device="cuda", generator=generator).to(dtype)
            slots = torch.arange(lengths[b], device="cuda")
            page = torch.tensor(mine, device="cuda", dtype=torch.int64)[slots // page_size]
            self.kv.view(-1, DIMS)[page * page_size + slots % page_size] = values
            parents[self.starts[b]:self.starts[b] + nodes[b]] = tree(kind, nodes[b], rng)
            self.rows.append(page * page_size + slots % page_size)
        shape = (rows, heads, DIMS) if packed else (batch, self.q_len, heads, DIMS)
        self.q = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        self.parents_host = parents
        as_device = lambda x: torch.tensor(np.asarray(x), device="cuda", dtype=torch.int32)
        self.table, self.prefix, self.count = as_device(table), as_device(prefixes), as_device(nodes)
        self.parents = as_device(parents)
        self.row_start = as_device(self.starts) if packed else None
        self.kv_len_max = max(lengths)

    def tensors(self):
        return self.q, self.kv, self.table, self.prefix, self.count, self.parents, SCALE

    def options(self):
        return dict(row_start=self.row_start, q_len=self.q_len, kv_len_max=self.kv_len_max)

    def flops(self):
        return sum(2 * (DIMS + LATENT) * self.heads * n * (p + n)
                   for p, n in zip(self.prefixes, self.nodes))

    def bytes(self):
        return sum((p + n) * DIMS * self.kv.element_size()
                   for p, n in zip(self.prefixes, self.nodes))

    def mask(self, b):
        """[nodes, nodes] of ancestors-and-self of request b."""
        n = self.nodes[b]
        parents = self.parents_host[self.starts[b]:self.starts[b] + n]
        mask = np.zeros((n, n), bool)
        for i in range(n):
            if i > 0:
                mask[i] = mask[parents[i]]
            mask[i, i] = True
        return torch.tensor(mask, device="cuda")

    def reference(self):
        """out and lse in f64, shaped like the launch's."""
        q = self.q.reshape(-1, self.heads, DIMS)
        out = torch.zeros((q.shape[0], self.heads, LATENT), device="cuda", dtype=torch.float64)
        lse = torch.full(q.shape[:2], -float("inf"), device="cuda", dtype=torch.float64)
        for b, (p, n) in enumerate(zip(self.prefixes, self.nodes)):
            first = int(self.starts[b])
            keys = self.kv.view(-1, DIMS)[self.rows[b]].double()
            mask = torch.ones((n, p + n), device="cuda", dtype=torch.bool)
            mask[:, p:] = self.mask(b)
            for h in range(self.heads):
                score = q[first:first + n, h].double() @ keys.T * SCALE
                score.masked_fill_(~mask, -float("inf"))
                lse[first:first + n, h] = torch.logsumexp(score, -1)
                out[first:first + n, h] = torch.softmax(score, -1) @ keys[:, :LATENT]
        return out.reshape(*self.q.shape[:-1], LATENT), lse.reshape(self.q.shape[:-1])


def errors(out, lse, want_out, want_lse):
    """rel_l2, max_abs and the largest lse difference; inf where anything is not finite that should
    be, or -inf does not meet -inf."""
    out, lse = out.double(), lse.double()
    empty = torch.isinf(want_lse)
    if not torch.isfinite(out).all() or not (lse[empty] == want_lse[empty]).all():
        return float("inf"), float("inf"), float("inf")
    difference = (out - want_out)
    lse_abs = (lse[~empty] - want_lse[~empty]).abs().max().item()
    if lse_abs != lse_abs:
        lse_abs = float("inf")
    return (difference.norm() / want_out.norm()).item(), difference.abs().max().item(), lse_abs
