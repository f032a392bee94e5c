"""Position-keyed sampling in numpy: a second implementation of proto/README.md, "Sampling".

Written from the contract, not from the C code: Philox4x32-10, filters, Gumbel-max.
"""

import numpy as np

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK = np.uint64(0xFFFFFFFF)


def philox_word0(seed, position, tokens, purpose=0):
    """Word 0 of Philox4x32-10 for each token id: key = seed, counter = (position, token, purpose, 0)."""
    t = np.asarray(tokens, dtype=np.uint64)
    c = [np.full_like(t, position), t.copy(), np.full_like(t, purpose), np.zeros_like(t)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0 = np.uint64(M0) * c[0]
        p1 = np.uint64(M1) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & MASK,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & MASK,
        ]
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return c[0]


def gumbel(seed, position, tokens, purpose=0):
    u = (philox_word0(seed, position, tokens, purpose).astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(u))).astype(np.float32)


def kept_tokens(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Ids that survive temperature, top-k, top-p, min-p, in this order, each on what was left."""
    scaled = logits.astype(np.float32) / np.float32(temperature)
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order].astype(np.float64) - float(scaled[order[0]]))
    weights /= weights.sum()
    if top_p < 1.0:
        before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
        keep = before < top_p
        order, weights = order[keep], weights[keep]
        weights /= weights.sum()
    if min_p > 0.0:
        keep = weights >= min_p * weights[0]
        order = order[keep]
    return order


def draw(logits, position, seed, temperature, **filters):
    """(token, margin): the drawn id and the gap of the two best perturbed scores (inf if one)."""
    if temperature < 1e-4:
        best = np.lexsort((np.arange(len(logits)), -logits))
        return int(best[0]), float(logits[best[0]] - logits[best[1]])
    ids = kept_tokens(logits, temperature, **filters)
    scores = logits[ids].astype(np.float32) / np.float32(temperature) + gumbel(seed, position, ids)
    best = np.lexsort((ids, -scores))
    margin = float(scores[best[0]] - scores[best[1]]) if len(best) > 1 else float("inf")
    return int(ids[best[0]]), margin


def _check_vectors():
    assert int(philox_word0(0, 0, [0])[0]) == 0x6627E8D5
    x = philox_word0(1234567890123456789, 812, [17])
    assert int(x[0]) == 0xFF795F2A
    assert abs(float(gumbel(1234567890123456789, 812, [17])[0]) - 6.1868095) < 1e-6


_check_vectors()
