"""Acceptance rules in numpy: a second implementation of proto/README.md, "Sampling", for whole trees.

Written from the contract, not from the C code. A tree is (tokens, parents); rows are raw logits [nodes, vocab].
Each walk returns (accepted nodes, pending token).
"""

import base64

import numpy as np

import draw

COIN, RESIDUAL = 1, 2


def target(logits, temperature=1.0, **filters):
    """The distribution that a target draw is from, dense."""
    p = np.zeros(len(logits))
    if temperature < 1e-4:
        p[int(np.lexsort((np.arange(len(logits)), -logits))[0])] = 1.0
        return p
    ids = draw.kept_tokens(logits, temperature, **filters)
    scaled = logits[ids].astype(np.float32) / np.float32(temperature)
    p[ids] = np.exp((scaled - scaled.max()).astype(np.float64)).astype(np.float32)
    return p / p.sum()


def children(parents, node):
    return [i for i, parent in enumerate(parents) if parent == node]


def uniform(seed, position, token, purpose):
    return (float(draw.philox_word0(seed, position, [token], purpose)[0]) + 0.5) * 2.0**-32


def ratio_step(p, q, tokens, seed, position):
    """(index of the accepted one of `tokens`, its token), or (None, the residual's token)."""
    p, q = p.copy(), q / q.sum()
    for index, x in enumerate(tokens):
        if uniform(seed, position, x, COIN) * q[x] < p[x]:
            return index, x
        rest = np.maximum(p - q, 0.0)
        if rest.sum() > 0:
            p = rest / rest.sum()
        q[x] = 0.0
        q = q / max(q.sum(), np.finfo(float).tiny)
    ids = np.flatnonzero(p > 0)
    scores = np.log(p[ids]).astype(np.float32) + draw.gumbel(seed, position, ids, RESIDUAL)
    return None, int(ids[np.lexsort((ids, -scores))[0]])


def ratio_wor(tree, q, rows, length, seed, **setting):
    """q: dense draft distributions, one row for each node."""
    tokens, parents = tree
    path = [0]
    while True:
        node, position = path[-1], length + len(path)
        below = children(parents, node)
        if not below:
            return path, draw.draw(rows[node], position, seed, **setting)[0]
        p = target(rows[node], **setting)
        index, token = ratio_step(p, q[node], [tokens[c] for c in below], seed, position)
        if index is None:
            return path, token
        path.append(below[index])


def typical(tree, rows, length, seed, epsilon=0.09, delta=0.3, **setting):
    tokens, parents = tree
    depth, passes = [0], [True]
    for node in range(1, len(tokens)):
        depth.append(depth[parents[node]] + 1)
        p = target(rows[parents[node]], **setting)
        positive = p[p > 0]
        bar = min(epsilon, delta * np.exp(np.sum(positive * np.log(positive))))
        passes.append(passes[parents[node]] and p[tokens[node]] >= bar)
    end = max((node for node in range(len(tokens)) if passes[node]), key=lambda node: (depth[node], -node))
    path = [end]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path, draw.draw(rows[end], length + len(path), seed, **setting)[0]


def sample_without_replacement(rng, q, count):
    """`count` tokens (or as many as q has) in the order drawn."""
    q, drawn = q.astype(np.float64).copy(), []
    while len(drawn) < count and q.sum() > 0:
        token = int(rng.choice(len(q), p=q / q.sum()))
        drawn.append(token)
        q[token] = 0.0
    return drawn


def dense_field(q):
    data = np.asarray(q, dtype="<f4")
    return {"shape": list(data.shape), "dtype": "f32", "data_b64": base64.b64encode(data.tobytes()).decode()}


def topk_field(q):
    """The same as sparse rows, as wide as the widest."""
    q = np.asarray(q, dtype="<f4")
    width = max(1, int((q > 0).sum(axis=1).max()))
    ids = np.full((len(q), width), -1, dtype="<i4")
    probs = np.zeros((len(q), width), dtype="<f4")
    for row, values in enumerate(q):
        support = np.flatnonzero(values > 0)
        ids[row, : len(support)], probs[row, : len(support)] = support, values[support]
    encoded = [base64.b64encode(array.tobytes()).decode() for array in (ids, probs)]
    return {"shape": [len(q), width], "ids_b64": encoded[0], "probs_b64": encoded[1]}
