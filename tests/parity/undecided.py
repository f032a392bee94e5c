"""Why two texts of one model part where its logits are far from a tie: a router that could not decide.

With KV rows of bf16 two correct paths (a tree, one token at a time) have rows that differ by roundings, 2e-3 of
themselves. Where two sets of experts are nearer than that, each path may take its own, and what follows is as far apart
as experts are: by half a logit and more. Such a difference is proven here, not assumed: both paths are replayed with the
residual stream in front of every layer (`want.hidden`), and wherever a row's streams part inside of one layer, the
stream of either path behind it must be what tests/support/mla.py, in float64, has with experts of its own choice; the
two choices differ, and the router's scores are next to each other. Another kind of fault (a wrong row, mask, position or
sum) has no such explanation.
"""

import base64

import numpy as np

SAME, APART = 1e-2, 2e-2  # shares of a stream: paths that round differently, and rows that had other experts
STEP = 2.0**-8  # of a router's score: one of bf16 beside 1


def streams_of(block):
    values = np.frombuffer(base64.b64decode(block["data_b64"], validate=True), "<f4")
    return values.reshape(block["shape"]).astype(np.float64)


def replay(make, trees):
    """Text and [taps, rows, hidden] of a session that is played again: its prompt's rows, then those it accepts."""
    want = {"hidden": {"dtype": "f32", "rows": "all"}}
    session = make(want=want)
    parts = [streams_of(session.state["hidden"])]
    want = {"hidden": {"dtype": "f32", "rows": "path"}}
    for drafts, parents in trees:
        parts.append(streams_of(session.verify(drafts, parents, want=want)["hidden"]))
    session.close()
    return session.text, np.concatenate(parts, axis=1)


def share(a, b):
    return np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)


def choices(model, logits, at):
    """Experts of one row, and those it has when one score is a step higher or lower."""
    found = {}
    count = len(logits)
    for nudge in [np.zeros(count), *(np.eye(count) * STEP), *(np.eye(count) * -STEP)]:
        experts, weights = model.choice(logits, at, nudge)
        found[tuple(sorted(experts.tolist()))] = (experts, weights)
    return found


def experts_behind(model, streams, at, row, behind):
    """The experts with which a layer makes `behind` of a row, or None: nearly equal to no choice, or to several."""
    name, rows = f"model.layers.{at}.", streams[: row + 1]
    visible = np.tri(row + 1, dtype=bool)
    x = rows + model.attention(model.norm(rows, name + "input_layernorm"), at, np.arange(row + 1), visible)
    x = x[row:]
    normed = model.norm(x, name + "post_attention_layernorm")
    shared = x + model.mlp(normed, name + "mlp.shared_experts.")
    fits = []
    for key, (experts, weights) in choices(model, model.linear(normed, name + "mlp.gate")[0], at).items():
        out = shared.copy()
        for expert, weight in zip(experts, weights):
            out += weight * model.mlp(normed, f"{name}mlp.experts.{expert}.")
        if share(out[0], behind) < SAME:
            fits.append(key)
    return fits[0] if len(fits) == 1 else None


def explain(model, first, second, count):
    """Rows of [taps, rows, hidden] whose streams part inside of a layer, with either path's experts, or None: the first
    `count` rows part nowhere, or for another reason."""
    found = []
    apart = share(first[:, :count], second[:, :count])
    for row in range(count):
        for at in range(model.layers):
            if not apart[at, row] < APART <= apart[at + 1, row]:
                continue
            if at < model.config["first_k_dense_replace"]:
                return None
            mine, other = (
                experts_behind(model, streams[at], at, row, streams[at + 1, row]) for streams in (first, second)
            )
            if mine is None or other is None or mine == other:
                return None
            found.append((row, at, mine, other))
    return found or None
