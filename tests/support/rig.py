"""Two daemons with one checkpoint, and the sessions that both have: calls of both, and the judgement of their answers.
twins.py says what may differ."""

import base64

import numpy as np
import rules
import twins
from texts import path_to
from twins import DRAW, KEYS, bound_of, might_draw, require, values_of

ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}


class Rig:
    """Calls of both sides, and what is open. rng draws everything that is random."""

    def __init__(self, rng, pair, report, apart):
        """pair: Twins. apart: their options differ in what no answer may depend on."""
        self.rng, self.twins, self.report = rng, pair, report
        self.texts, self.calls = [], 0
        self.keys = [key for key in KEYS if not (apart and key == "cached_len")]

    # --- calls of both

    def post(self, text, suffix, body, method_path="/v1/sessions/{id}/"):
        """The same call on both sides of a session."""
        self.calls += 1
        path = method_path + suffix
        return self.twins.each(lambda side: self.twins.sides[side].post(
            path.format(id=text.ids[side]), dict(body, epoch=self.twins.sides[side].epoch)))

    def served(self, answers, alone=True):
        return self.twins.outcome(answers, self.report, alone)

    def drop(self, text):
        """Close on both sides."""
        if text in self.texts:
            self.texts.remove(text)
        self.twins.each(lambda side: self.twins.sides[side].client.call("DELETE", f"/v1/sessions/{text.ids[side]}"))

    def pick(self, ready=True):
        found = [text for text in self.texts if not ready or (text.held is None and text.finish is None)]
        return found[int(self.rng.integers(len(found)))] if found else None

    # --- judgements

    def on_device(self, side):
        """There other drafts beside a path change its logits, by less than noise; on a processor by no bit."""
        return self.twins.sides[side].model["backend"] == "cuda"

    def same_path(self, what, side, rows, alone):
        """Rows of a path among other drafts, and of the path alone."""
        if rows.tobytes() == alone.tobytes():
            return
        require(self.on_device(side), f"{what} has other bits")
        if self.report.bounds is not None:
            self.report.diverge(rows, alone)
        elif np.abs(rows - alone).max() > bound_of(rows):
            self.report.parted.append(what)

    def tie(self, what, context, drawn, text, rule, rows, others=False):
        """Left and right drew different tokens behind `context`: is that a near tie? rows: the logits that they drew from,
        None behind a prefill, which does not show its own: then those of the same tokens as a tree, to the noise of two
        forms, and some may be further apart. others: a device's rows, made among other drafts; the same."""
        hidden = rows is None or others
        if rows is None:
            rows = self.twins.row_behind(context)
            if rows is None:  # no room: what is open makes some
                for other in list(self.texts):
                    self.drop(other)
                rows = self.twins.row_behind(context)
            require(rows is not None, f"{what}: tokens {drawn}, and no room for a one-shot call")
        setting, position = text.setting(rule), len(context)
        temperature = setting["temperature"] if setting["temperature"] >= 1e-4 else 1.0
        gaps = [float(np.subtract(*np.sort(row)[[-1, -2]])) for row in rows]
        found = f"{what} at {position}: {drawn}, T {temperature:g}, gaps {gaps[0]:.2g} {gaps[1]:.2g}"
        tolerances = [DRAW] * 2
        if self.report.bounds is None:
            drawn = drawn[::-1]  # each side's own token was looked at; the other's is one that the bound allows
            tolerances = [2 * bound_of(row) / temperature + DRAW for row in rows]
        elif hidden:
            tolerances = [4 * side.model["noise"] / temperature + DRAW for side in self.twins.sides]
        near = all(token in might_draw(row, position, text.seed, tolerance, **setting)
                   for token, row, tolerance in zip(drawn, rows, tolerances))
        require(near or hidden, f"{found}: no near tie")
        (self.report.near_ties if near else self.report.far).append(found)

    def drawn(self, what, text, before, pair, tree=None, rows=None):
        """Both sides' new tokens behind `before`, which are equal or begin to differ in a near tie; False: the session is
        over. tree: what they were drawn along, None behind a prefill; rows: each side's logits of its nodes, if asked for."""
        left, right = (body["new_tokens"] for body in pair)
        first = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), None)
        if first is None:
            for key in self.keys:
                one, other = (body.get(key) for body in pair)
                require(one == other, f"{what}: {key} {one} and {other}")
            return True
        require(not self.report.exact, f"{what}: tokens {left} and {right}")
        rule = pair[0].get("rule")
        others = tree is not None and rows is None and self.on_device(1)
        if tree is not None and rows is None:
            rows = self.shown(text, before[len(text.tokens) :], left[:first], pair)
            node = first
        elif rows is not None:
            node = pair[0]["accepted"]["nodes"][first]
        at = None if rows is None else [row[node] for row in rows]
        self.drop(text)
        self.tie(what, [*before, *left[:first]], (left[first], right[first]), text, rule, at, others)
        return False

    def shown(self, text, pending, path, pair):
        """Each side's logits along `path` behind the pending token, which are those of the round that ended so: behind a
        rollback, by a chain."""
        length = len(text.tokens)
        if pair[0]["status"] != "held":
            body = {"seq": pair[0]["next_seq"], "len": length, "pending": pending[0]}
            answers = self.twins.each(lambda side: self.twins.sides[side].post(
                f"/v1/sessions/{text.ids[side]}/rollback",
                dict(body, epoch=self.twins.sides[side].epoch, expected_len=pair[side]["committed_len"])))
        else:
            answers = self.post(text, "commit", {"seq": pair[0]["next_seq"], "path": []})
        require(all(status == 200 for status, _ in answers), f"no way back from a near tie: {answers}")
        tokens, most = [*pending, *path], min(self.limits["max_depth"], self.limits["max_nodes"])
        rows, seq = [[], []], answers[0][1]["next_seq"]
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            chain = {"tokens": part, "parents": list(range(-1, len(part) - 1))}
            body = {"seq": seq, "expected_len": length + start, "tree": chain, "commit": "hold", "rule": "greedy"}
            body["want"] = ALL_LOGITS
            answers = self.post(text, "verify", body)
            if any(status == 503 for status, _ in answers):
                return None  # a chain takes more rows than one token after the other
            require(all(status == 200 for status, _ in answers), f"no chain behind a rollback: {answers}")
            rows = [[*own, *values_of(answer["logits"])] for own, (_, answer) in zip(rows, answers)]
            if start + most < len(tokens):
                body = {"seq": seq + 1, "path": list(range(len(part))), "next": tokens[start + most]}
                require(all(status == 200 for status, _ in self.post(text, "commit", body)), "no commit behind a rollback")
            seq += 2
        return rows

    def own_draws(self, side, text, answer, rows, tree):
        """The side's tokens are those that the contract draws from its own logits."""
        tokens, parents = tree
        nodes, got = answer["accepted"]["nodes"], answer["new_tokens"]
        length = len(text.tokens)
        rule, margin = answer["rule"], answer["margin"]["min"]
        if rule in ("ratio_wor", "typical"):
            if text.stop or text.ends_within(len(nodes) + 1):
                return
            if rule == "ratio_wor":
                expected = rules.ratio_wor((tokens, parents), text.q, rows, length, text.seed, **text.setting(rule))
            else:
                expected = rules.typical((tokens, parents), rows, length, text.seed, **text.setting(rule))
            require(expected == (nodes, answer["pending"]) or (margin is not None and margin < 1e-4),
                    f"side {side}, {rule}: {(nodes, answer['pending'])}, by its own logits {expected}, margin {margin}")
            return
        setting = text.setting(rule)
        for depth, (node, token) in enumerate(zip(nodes, got)):
            tolerance = DRAW if setting["temperature"] >= 1e-4 else 0.0
            possible = might_draw(rows[node], length + depth + 1, text.seed, tolerance, **setting)
            require(token in possible, f"side {side}: token {token} at node {node}, by its own logits {sorted(possible)[:4]}")
        below = [tokens[node] for node in rules.children(parents, nodes[-1])]
        over = got[-1] in text.stop or text.ends_within(len(nodes) + 1)
        require(over or got[-1] not in below, f"side {side}: stopped at {nodes[-1]}, whose child has the token {got[-1]}")

    def own_blocks(self, side, text, answer, rows):
        """Top-k, log-sum-exp and probabilities are those of the side's own logits."""
        block = answer.get("topk")
        if block is not None:
            ids = np.frombuffer(base64.b64decode(block["ids_b64"]), dtype="<i4").reshape(block["shape"])
            logits, sums = values_of(block, "logits_b64"), values_of(block, "lse_b64")
            for at, node in enumerate(block["rows"]):
                order = np.lexsort((np.arange(rows.shape[1]), -rows[node]))[: block["k"]]
                same = list(order) == list(ids[at]) and rows[node][order].tobytes() == logits[at].tobytes()
                require(same, f"side {side}: top-k of node {node}")
                sum_exp = float(rows[node].max() - twins.log_softmax(rows[node : node + 1]).max())
                require(abs(sum_exp - float(sums[at])) < 1e-5 * max(1.0, abs(sum_exp)), f"side {side}: lse of node {node}")
        setting = text.setting(answer["rule"])
        if "logprobs" in answer and not any(key in setting for key in ("top_k", "top_p", "min_p")):
            scale = setting["temperature"] if setting["temperature"] >= 1e-4 else 1.0
            for node, token, given in zip(answer["accepted"]["nodes"], answer["new_tokens"], answer["logprobs"]):
                own = twins.log_softmax(rows[node : node + 1].astype(np.float64) / scale)[0, token]
                near = given is not None and abs(given - own) < 1e-4 * max(1.0, abs(own))
                require(near, f"side {side}: log-probability {given} of {token}, not {own}")

    def excused(self, what, text, prefix, tree, rows):
        """Logits of f32 rows are beyond the bound: a router that could not decide, if both oracles say so of the path to
        the row that differs most (a whole tree can take them minutes)."""
        apart = np.abs(rows[0] - rows[1]).max(axis=1)
        largest, nodes = float(apart.max()), path_to(tree[1], int(apart.argmax()))
        self.drop(text)
        agree = self.twins.oracles_agree(prefix, {"tokens": tree[0], "parents": tree[1]}, nodes, rows)
        require(agree, f"{what}: logits differ by {largest:.3g}, bound {bound_of(rows[0]):.2g}")
        self.report.undecided.append(f"{what}: {largest:.3g}")

    def hidden(self, what, left, right):
        """Rows of the residual stream, as logits; a router's choice moves them no less, and then the logits tell."""
        require(left.shape == right.shape and bool(np.isfinite([left, right]).all()), f"{what}: hidden rows")
        require(not self.report.exact or left.tobytes() == right.tobytes(), f"{what}: hidden rows have other bits")
        if self.report.bounds is None:
            require(left[0].tobytes() == right[0].tobytes(), f"{what}: embeddings have other bits")

    # --- a round

    def want(self, full):
        rng = self.rng
        want = dict(ALL_LOGITS) if full else {}
        if rng.random() < 0.3:
            want.update(top_k=int(rng.choice([1, 5, 64])), rows=str(rng.choice(["stop", "path", "all"])))
        if rng.random() < 0.3:
            want["logprobs"] = True
        if not full and rng.random() < 0.2:
            want["logits"] = {"rows": str(rng.choice(["stop", "path"])), "dtype": str(rng.choice(["bf16", "f16", "f32"]))}
        if self.twins.sides[0].model["taps"] and rng.random() < 0.3:
            want["hidden"] = {"rows": "all", "dtype": "f32"}
        return want

    def verify_body(self, text, tree, want, draft=None, **fields):
        """draft: the tree as it was sent before, with its distributions."""
        sent = draft or {"tokens": tree[0], "parents": tree[1]}
        if draft is None and (fields.get("rule") or text.rule) == "ratio_wor":
            sent.update(text.draft(self.rng, tree, self.twins.sides[0].model["vocab"]))
        return dict(text.base(), tree=sent, want=want, **fields)

    def round(self, what, text, tree, full=True, **fields):
        """One verify of both, judged. Returns each side's logits ([] when not asked for), or None when it was refused or
        the session is over."""
        body = self.verify_body(text, tree, self.want(full), **fields)
        answers = self.post(text, "verify", body)
        pair = self.served(answers)
        if pair is None:
            return None
        return self.judged(what, text, tree, body, pair)

    def judged(self, what, text, tree, body, pair):
        self.report.rounds += 1
        text.last = ("verify", body, pair)
        full = body["want"].get("logits") == ALL_LOGITS["logits"]
        rows = [values_of(answer["logits"]) for answer in pair] if full else None
        if pair[0]["accepted"] is None:
            require(all(pair[0].get(key) == pair[1].get(key) for key in self.keys), f"{what}: held rounds differ")
            text.follow_held(pair[0], tree)
            return rows or []
        for side, answer in enumerate(pair):
            if full:
                self.own_draws(side, text, answer, rows[side], tree)
                self.own_blocks(side, text, answer, rows[side])
        if "hidden" in pair[0]:
            self.hidden(what, *(values_of(answer["hidden"]) for answer in pair))
        if full and not self.report.logits(*rows):
            self.excused(what, text, list(text.tokens), tree, rows)
            return None
        if pair[0]["rule"] in ("ratio_wor", "typical") and pair[0]["accepted"] != pair[1]["accepted"]:
            self.rule_tie(what, text, pair)
            return None
        if not self.drawn(what, text, [*text.tokens, tree[0][0]], pair, tree, rows):
            return None
        if pair[0]["status"] == "held":
            text.follow_held(pair[0], tree)
        else:
            text.follow(pair[0])
        return rows or []

    def rule_tie(self, what, text, pair):
        """These rules decide by probabilities: the answer's own margin, as one of logits, is below the bound."""
        require(not self.report.exact, f"{what}: {[answer['accepted'] for answer in pair]}")
        margins = [answer["margin"]["min"] for answer in pair]
        temperature = text.sampling["temperature"]
        scale = temperature if temperature >= 1e-4 else 1.0
        widest = 2 * (self.report.bound if self.report.bounds is None else self.report.largest)
        near = any(margin is not None and margin * scale < 2 * widest for margin in margins)
        self.drop(text)
        require(near, f"{what}: {pair[0]['accepted']['nodes']} and {pair[1]['accepted']['nodes']}, margins {margins}")
        self.report.near_ties.append(f"{what}: {pair[0]['rule']}, margins {margins}")

    def scores(self, text, tree, pair):
        """Log-probabilities of a tree's nodes: a difference of two logits."""
        left, right = (answer["logprobs"] for answer in pair)
        require([one is None for one in left] == [other is None for other in right], f"{self.at}: {left} and {right}")
        if self.report.exact:
            require(left == right, f"{self.at}: scores differ")
            return
        largest = max([abs(a - b) for a, b in zip(left, right) if a is not None], default=0.0)
        if self.report.bounds is None and largest > 2 * self.report.bound:
            rows = self.twins.rows_of(text.tokens, {"tokens": tree[0], "parents": tree[1]})
            require(rows is not None, f"{self.at}: scores differ by {largest:.3g}")
            self.excused(self.at, text, list(text.tokens), tree, rows)

    def summary(self, number):
        report = self.report
        counts = f"{self.calls} calls, {report.rounds} rounds, {report.rows} rows of logits"
        lines = [f"rig {number}: {self.name}, {counts}, {report.apart()}; refused {report.refused}"]
        for kind in ("near_ties", "undecided", "far"):
            lines += [f"      {kind}: {one}" for one in getattr(report, kind)]
        return "\n".join(lines)
