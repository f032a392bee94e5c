"""Sessions that two daemons have in common, as their client knows them, and random trees, prompts and samplings."""

import numpy as np
import rules


class Text:
    """One session on both sides: .ids, and what both agree on."""

    def __init__(self, ids, tokens, created, sampling, stop):
        self.ids, self.tokens = ids, list(tokens)
        self.sampling, self.stop, self.max_len = sampling, set(stop.get("token_ids", ())), stop.get("max_len", 1 << 30)
        self.rule = sampling["rule"]
        self.seed = int(sampling["seed"])
        self.held = self.last = self.q = None
        self.pending, self.seq, self.finish = created["pending"], created["next_seq"], created["finish"]
        self.digest = created["digest"]

    def base(self):
        body = {"seq": self.seq, "expected_len": len(self.tokens)}
        if self.seq % 2:
            body["expected_digest"] = self.digest
        return body

    def setting(self, rule=None):
        """What draws under the session's rule, or another one of this round."""
        if (rule or self.rule) == "greedy":
            return {"temperature": 0.0}
        return {key: self.sampling[key] for key in ("temperature", "top_k", "top_p", "min_p") if key in self.sampling}

    def ends_within(self, count):
        """Its length may end it `count` tokens further on."""
        return len(self.tokens) + count + 1 >= self.max_len

    def follow(self, answer):
        """A round is committed."""
        self.tokens += answer["accepted"]["tokens"] if "accepted" in answer else []
        self.settled(answer)

    def follow_decode(self, answer):
        self.tokens += [self.pending, *answer["new_tokens"][:-1]]
        self.settled(answer)

    def settled(self, answer):
        if answer["committed_len"] != len(self.tokens):
            raise AssertionError(f"{answer['committed_len']} committed tokens, not {len(self.tokens)}")
        self.pending, self.digest, self.finish = answer["pending"], answer["digest"], answer["finish"]
        self.seq = answer["next_seq"]

    def follow_held(self, answer, tree):
        self.held = {"seq": answer["seq"], "tree": tree, "accepted": answer["accepted"], "pending": answer["pending"]}
        self.seq = answer["next_seq"]

    def draft(self, rng, tree, vocab):
        """tree.q_topk: for every inner node a distribution with its children in it."""
        tokens, parents = tree
        self.q = np.zeros((len(tokens), vocab), dtype=np.float32)
        for node in range(len(tokens)):
            below = [tokens[child] for child in rules.children(parents, node)]
            if below:
                others = rng.choice(vocab, min(vocab, 5), replace=False)
                support = np.unique([*below, *others])
                self.q[node, support] = rng.dirichlet(np.ones(len(support)))
        return {"q_topk": rules.topk_field(self.q)}


def random_sampling(rng, vocab):
    kind = rng.random()
    seed = int(rng.choice([0, 2**64 - 1, int(rng.integers(1 << 62))], p=[0.1, 0.1, 0.8]))
    sampling = {"rule": "target_walk", "temperature": 1.0, "seed": str(seed)}
    if kind < 0.3:
        sampling["rule"] = "greedy"
    elif kind > 0.85:
        sampling["rule"] = str(rng.choice(["ratio_wor", "typical"]))
    sampling["temperature"] = float(rng.choice([0.0, 5e-5, 0.3, 0.8, 1.0, 2.5, 100.0]))
    for name, values in (("top_k", [1, 5, 40, vocab]), ("top_p", [0.01, 0.5, 0.95, 1.0]), ("min_p", [0.05, 0.5, 1.0])):
        if rng.random() < 0.35:
            value = values[int(rng.integers(len(values)))]
            sampling[name] = int(value) if name == "top_k" else float(value)
    return sampling


def prompt_length(rng, page, longest):
    """Around page borders mostly; some long."""
    kind = rng.random()
    if kind < 0.5:
        length = page * int(rng.integers(0, 5)) + int(rng.integers(-1, 2))
    elif kind < 0.85:
        length = int(rng.integers(1, 200))
    else:
        length = int(rng.integers(200, longest))
    return max(1, min(length, longest))


def random_tree(rng, pending, vocab, nodes, depth_max, path=()):
    """(tokens, parents) of up to `nodes` nodes, `path` (tokens) below node 0 among them; no two siblings alike."""
    kind = str(rng.choice(["one", "chain", "star", "wide", "any", "deep", "cap"], p=[0.08, 0.17, 0.15, 0.2, 0.2, 0.1, 0.1]))
    count = {"one": 1, "deep": min(nodes, depth_max + 1), "cap": nodes}.get(kind, int(rng.integers(2, min(nodes, 40) + 1)))
    tokens, parents, depth = [pending], [-1], [0]
    taken = {0: set()}

    def add(token, parent):
        if token in taken[parent] or depth[parent] >= depth_max or len(tokens) >= nodes:
            return False
        taken[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        depth.append(depth[parent] + 1)
        taken[len(tokens) - 1] = set()
        return True

    for step, token in enumerate(path):
        if not add(int(token), step):
            break
    edges = (0, vocab - 1)
    for _ in range(4 * count):
        if len(tokens) >= count:
            break
        last = len(tokens) - 1
        parent = {"chain": last, "deep": last, "star": 0, "wide": int(rng.integers(0, min(len(tokens), 6)))}.get(
            kind, int(rng.integers(0, len(tokens))))
        add(int(rng.choice(edges)) if rng.random() < 0.1 else int(rng.integers(vocab)), parent)
    return relabelled(rng, tokens, parents)


def relabelled(rng, tokens, parents):
    """The same tree with its nodes in another order, parents still before children."""
    below = {node: rules.children(parents, node) for node in range(len(tokens))} if len(tokens) < 80 else None
    if below is None or rng.random() < 0.5:
        return tokens, parents
    order, ready = [], [0]
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        order.append(node)
        ready += below[node]
    place = {node: at for at, node in enumerate(order)}
    return [tokens[node] for node in order], [-1 if parents[node] < 0 else place[parents[node]] for node in order]


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def mistakes(rng, text, vocab, limits):
    """A request that is refused, as (suffix, body)."""
    base, pending = text.base(), text.pending
    chain = list(range(-1, limits["max_depth"] + 1))
    wide = limits["max_nodes"]
    trees = {
        "pending": {"tokens": [(pending + 1) % vocab], "parents": [-1]},
        "siblings": {"tokens": [pending, 3, 3], "parents": [-1, 0, 0]},
        "deep": {"tokens": [pending] * len(chain), "parents": chain},
        "large": {"tokens": [pending, *(i % vocab for i in range(wide))], "parents": [-1, *(i // vocab for i in range(wide))]},
        "token": {"tokens": [pending, vocab], "parents": [-1, 0]},
        "parent": {"tokens": [pending, 1, 2], "parents": [-1, 2, 0]},
        "root": {"tokens": [pending, 1], "parents": [-1, -1]},
    }
    one = {"tokens": [pending], "parents": [-1]}
    bodies = [("verify", dict(base, tree=tree)) for tree in trees.values()]
    bodies += [
        ("verify", dict(base, tree=one, expected_len=base["expected_len"] + 1)),
        ("verify", dict(base, tree=one, seq=base["seq"] + 1)),
        ("verify", dict(base, tree=one, expected_digest="0" * 32)),
        ("verify", dict(base, tree=one, want={"hidden": {"taps": [77]}})),
        ("verify", dict(base, tree=one, want={"top_k": 65})),
        ("rollback", dict(base, len=base["expected_len"] + 1)),
        ("rollback", dict(base, len=0)),
        ("extend", dict(base, tokens=[])),
        ("extend", dict(base, tokens=[vocab])),
        ("extend", dict(base, tokens=[1] * 5000)),
        ("decode", dict(base, max_tokens=0)),
        ("commit", {"seq": base["seq"], "path": [0], "next": vocab}),
    ]
    return bodies[int(rng.integers(len(bodies)))]
