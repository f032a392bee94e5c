"""Two daemons that are driven as one, and what their answers may differ in.

Every call goes to both, each with its own session ids and epoch. Either both are the same program on the same arithmetic,
then every bit has to agree; or they are not, then

- whatever draws nothing (status, code, length, digest, next_seq, shapes, refused what and where) is equal;
- each side's tokens are those that tests/support/draw.py, written from the contract, draws from that side's own logits,
  to 2e-5 of a score (kernels/README.md), greedy to the bit;
- logits of both agree to a bound; so tokens differ only where a change of two logits by that bound turns the draw: this
  is what a near tie is here. It is counted and listed, and the session is over on both sides.

With f32 rows the bound is that of refs.py for each side against the reference, 5e-4 * max(1, std / 1.6), once for both
together. A router's choice between two experts that are as good moves a logit by more: it is excused where the path
oracles of both sides (POST /v1/parity) find nothing in its path and both sides repeat their own rows, and then listed.

With bf16 rows routers decide apart in one row of a hundred, more often behind random drafts than in the texts of refs.py,
and no bound of a single row says much: a rig's rows are held to two quantiles of their KL divergence. The other checks
are the same, and so are all that compare a side with itself, bit by bit.
"""

import base64
import concurrent.futures
import json

import draw
import numpy as np
from daemon import Daemon

DRAW = 2e-5  # of a score: how far two libraries' logarithms take a draw
APART, APART_ROUNDED = 0.01, 0.1  # of rounds the oracles may excuse, of prefills may draw apart without a near tie
KEYS = ("seq", "status", "accepted", "pending", "new_tokens", "committed_len", "digest", "next_seq", "rule", "lossless",
        "finish", "stats", "cached_len")
PROBLEM = ("code", "pointer", "node", "committed", "retryable", "pages_needed", "pages_free")


class Difference(Exception):
    """The two do not agree, or one of them not with itself."""


def require(ok, text):
    if not ok:
        raise Difference(text)


def bound_of(rows):
    """For one backend against the other, with f32 rows: refs.py's for each against the reference."""
    return 5e-4 * max(1.0, float(rows.std()) / 1.6)


def log_softmax(rows):
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def values_of(block, name="data_b64"):
    """A block's values as its dtype has them, bf16 as uint16, in its shape."""
    kind = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[block.get("dtype", "f32")]
    array = np.frombuffer(base64.b64decode(block[name], validate=True), dtype=kind)
    return array.reshape(block["shape"] if name in ("data_b64", "logits_b64") else -1)


def might_draw(row, position, seed, tolerance, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that a draw gives when the difference of any two scores is known to `tolerance` only: a filter's edge
    may fall to either side, and the best score may be another's."""
    if temperature < 1e-4:
        return {int(t) for t in np.flatnonzero(row >= row.max() - tolerance)} if tolerance > 0 else {int(row.argmax())}
    scaled = row.astype(np.float32) / np.float32(temperature)
    may, sure = np.ones(len(row), dtype=bool), np.ones(len(row), dtype=bool)
    if 0 < top_k < len(row):
        ordered = np.sort(scaled)[::-1]
        may, sure = scaled >= ordered[top_k - 1] - tolerance, scaled > ordered[top_k] + tolerance
    weights = np.exp(scaled.astype(np.float64) - float(scaled.max()))
    if top_p < 1.0:
        above = scaled[None, :] > scaled[:, None] + tolerance
        near = scaled[None, :] >= scaled[:, None] - tolerance
        np.fill_diagonal(near, False)
        least = (above * (weights * sure)).sum(axis=1) / (weights * may).sum() * np.exp(-2 * tolerance)
        most = (near * (weights * may)).sum(axis=1) / max((weights * sure).sum(), 1e-300) * np.exp(2 * tolerance)
        may, sure = may & (least - 1e-6 < top_p), sure & (most + 1e-6 < top_p)
    if min_p > 0.0:
        edge = float(scaled.max()) + np.log(min_p)
        may, sure = may & (scaled >= edge - tolerance - 1e-6), sure & (scaled >= edge + tolerance + 1e-6)
    may[scaled.argmax()] = True
    ids = np.flatnonzero(may)
    scores = scaled[ids] + draw.gumbel(seed, position, ids)
    best = scores[sure[ids]].max() if sure.any() else -np.inf
    return {int(t) for t in ids[scores >= best - tolerance]}


class Side:
    """One daemon, its own ids."""

    def __init__(self, name, daemon):
        self.name, self.daemon = name, daemon

    def start(self):
        self.daemon.__enter__()
        self.client = self.daemon.client()
        self.model = self.client.get("/v1/model")
        self.epoch = self.model["epoch"]
        return self

    def post(self, path, body, client=None):
        """(status, decoded body); `client` for a connection of one's own."""
        status, _, data = (client or self.client).raw("POST", path, body)
        return status, json.loads(data)


class Report:
    """What one rig's rounds came to."""

    def __init__(self, exact, bounds):
        """exact: every bit is the same. bounds: (median, nine tenths) of the rows' KL divergence with bf16 rows, else None."""
        self.exact, self.bounds = exact, bounds
        self.rounds = self.rows = self.prefills = 0
        self.worst = self.largest = 0.0  # of the bound with f32 rows; of all logits
        self.bound = 5e-4  # of the widest rows that came
        self.near_ties, self.undecided, self.far, self.refused = [], [], [], {}
        self.parted = []  # paths whose logits, or whose draws, other drafts beside them changed on a device
        self.divergence = [np.zeros(0)]

    def logits(self, left, right):
        """True when they are within the bounds; with bf16 rows they are kept to be judged together."""
        require(left.shape == right.shape, f"logits are {left.shape} and {right.shape}")
        require(bool(np.isfinite(left).all() and np.isfinite(right).all()), "a logit is not finite")
        self.rows += len(left)
        largest, bound = float(np.abs(left - right).max()), bound_of(left)
        if self.exact:
            require(left.tobytes() == right.tobytes(), f"logits differ by {largest:.3g}")
            return True
        self.bound, self.largest = max(self.bound, bound), max(self.largest, largest)
        if self.bounds is None:
            self.worst = max(self.worst, largest / bound if largest <= bound else 0.0)
            return largest <= bound
        self.diverge(left, right)
        return True

    def diverge(self, left, right):
        want = log_softmax(left)
        self.divergence.append((np.exp(want) * (want - log_softmax(right))).sum(axis=1))

    def apart(self):
        """In words."""
        if self.exact:
            return "equal bits"
        text = f"{len(self.near_ties)} near ties, largest difference {self.largest:.2g}"
        if self.bounds is None:
            return f"{text}, {self.worst:.3f} of the bound, {len(self.undecided)} undecided routers"
        kl = np.concatenate(self.divergence)
        return f"{text}, KL median {np.median(kl):.1e}, nine tenths {np.quantile(kl, 0.9):.1e}" if len(kl) else text

    def judge(self):
        """The bounds that hold over all rows of a rig."""
        if self.exact:
            return
        share = APART if self.bounds is None else APART_ROUNDED
        some = ("undecided routers", self.undecided, self.rounds), ("prefills apart", self.far, self.prefills), (
            "paths apart", self.parted, self.rounds)
        for what, found, of in some:
            require(len(found) <= max(1, share * of), f"{what}: {len(found)} of {of}: {found}")
        kl = np.concatenate(self.divergence)
        if self.bounds is not None and len(kl) >= 100:
            for bound, share in zip(self.bounds, (0.5, 0.9)):
                got = float(np.quantile(kl, share))
                require(got <= bound, f"KL divergence of rows, quantile {share}: {got:.1e}, at most {bound:.1e}")


class Twins:
    """Both daemons, as a context manager."""

    def __init__(self, *sides):
        self.sides = sides
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def __enter__(self):
        started = [self.pool.submit(side.start) for side in self.sides]
        concurrent.futures.wait(started)
        for future in started:
            future.result()
        return self

    def __exit__(self, kind, value, trace):
        for side in self.sides:
            if getattr(side, "client", None):
                side.client.close()
            side.daemon.__exit__(kind, value, trace)
        self.pool.shutdown()

    def each(self, function):
        """function(side index) for both, at the same time."""
        return list(self.pool.map(function, range(2)))

    def post(self, path, body):
        """The same call of both without a session: their (status, body)."""
        return self.each(lambda side: self.sides[side].post(path, body))

    def outcome(self, answers, report, alone=True):
        """Both answers where the calls were served; None where both were refused alike. alone False: others were under way,
        and had more pages at that moment on one side."""
        (one, left), (two, right) = answers
        require(one == two, f"status {one} and {two}: {left.get('detail', '')} / {right.get('detail', '')}")
        if one < 400:
            return left, right
        for key in PROBLEM if alone else PROBLEM[:-1]:
            require(left.get(key) == right.get(key), f"{one} {left['code']}: {key} {left.get(key)} and {right.get(key)}")
        report.refused[left["code"]] = report.refused.get(left["code"], 0) + 1
        return None

    def row_behind(self, context):
        """Both sides' logits behind these tokens by a one-shot call, or None when the pool has no room."""
        rows = self.rows_of(context[:-1], {"tokens": [context[-1]], "parents": [-1]})
        return rows and [row[0] for row in rows]

    def rows_of(self, prefix, tree):
        """The same of a tree's nodes."""
        want = {"logits": {"rows": "all", "dtype": "f32"}}
        answers = self.post("/v1/verify", {"tokens": prefix, "tree": tree, "want": want})
        if any(status != 200 for status, _ in answers):
            return None
        return [values_of(body["logits"]) for _, body in answers]

    def oracles_agree(self, prefix, tree, nodes, rows):
        """Both path oracles find nothing in the path of these nodes, which has the same bits alone and in its tree, and both
        sides repeat the tree's `rows`, to the bound."""
        path = {"tokens": [tree["tokens"][node] for node in nodes], "parents": list(range(-1, len(nodes) - 1))}
        judged = self.post("/v1/parity", {"tokens": prefix, "tree": path})
        if any(status != 200 or not body["ok"] for status, body in judged):
            return False
        own, alone = self.rows_of(prefix, tree), self.rows_of(prefix, path)
        return own is not None and alone is not None and all(
            np.abs(row - mine).max() <= bound_of(mine) and mine[nodes].tobytes() == chain.tobytes()
            for row, mine, chain in zip(rows, own, alone))


def side(name, program, model, options):
    return Side(name, Daemon(program, model, *options))
