"""Two daemons, one on the CPU and one on another backend, play the same random calls: what may not differ does not.

A rig is a checkpoint and options; its calls are drawn from the seed and its number: prompts of all lengths around page
borders, trees of every shape up to the cap, all rules and filters, forks, rollbacks, held rounds, batches, calls at once,
sessions that fill up, pools that run out, requests that are refused. tests/support/twins.py says what is compared and
what a near tie is. Besides, on each side for itself, bit by bit: a repeated number, a round once more behind a rollback,
a tree and each of its paths as a chain, a round alone and in a batch, drafts that the model itself would have decoded.

usage: differential.py TREEVERIFYD MODELS_DIR [--backend cpu|cuda] [--seed N] [--seconds S] [--rigs N]
                       [--rig K [--steps N]] [--pairs f32:f32,bf16:bf16,bf16:products] [--other PROGRAM]
  --backend: of the second daemon; with cpu it differs from the first in what no answer may depend on (page size, threads,
  launch_rows, prefix_cache) and every bit is compared. --seconds: no rig begins after it; --rigs: how many at most.
  --pairs: rows of the first and of the second daemon, where "products" is bf16 with --products bf16 on the second;
  f32:bf16 shows how far rounded rows alone may go. --other: the second daemon's program.
A difference ends with exit 1 and the line that repeats it.
"""

import argparse
import base64
import concurrent.futures
import os
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import twins
from rig import ALL_LOGITS, Rig
from texts import Text, mistakes, path_to, prompt_length, random_sampling, random_tree
from twins import Difference, Report, Twins, require

MODELS = ("v3", "kjv-mla-8m", "v2lite", "moonlight")
STEPS = 70
SESSIONS = 9
JUDGED_S = 60  # at most, until the oracle has no rounds left

# KL divergence of a rig's rows with bf16 rows, median and nine tenths: four times the largest of five rigs each that were
# measured on a processor, f32 rows against bf16 ones (--pairs f32:bf16 --seed 9), as here both sides may be rounded and a
# device rounds probabilities too. With bf16 products four times that, for the checkpoint whose rows are alike in every
# other respect sixteen (kernels/README.md has those against the references).
ROUNDED = {"v3": (2e-3, 9.3e-2), "v2lite": (8e-4, 3.7e-3), "moonlight": (5.4e-4, 7.6e-3), "kjv-mla-8m": (1.6e-4, 2.2e-3)}
OPERATIONS = {
    "create": 12, "verify": 30, "again": 7, "paths": 7, "together": 8, "held": 8, "extend": 5, "rollback": 4, "fork": 4,
    "decode": 6, "score": 3, "replay": 4, "mistake": 6, "state": 2, "close": 4,
}


def options_of(args, rng, number):
    """(checkpoint, both daemons' options, whether every bit is the same, whether they differ on purpose, roomy)"""
    pairs = args.pairs.split(",")
    left, right = pairs[number % len(pairs)].split(":")
    products = ["--products", "bf16"] if right == "products" else []
    right = "bf16" if products else right
    name = MODELS[(number // len(MODELS) + number) % len(MODELS)]
    exact = args.backend == "cpu" and left == right
    nodes, depth = [(256, 64), (64, 16), (1024, 200), (256, 255)][int(rng.integers(4))]
    roomy = bool(rng.random() < 0.6)
    apart = exact and roomy
    page = int(rng.choice([16, 32, 64, 128]))
    rows = 20000 if roomy else max(nodes, 600) + int(rng.integers(300, 1500))
    shared = {
        "--max-nodes": nodes, "--max-depth": depth, "--max-len": rng.choice([0, 350, 1200]), "--idle-pages-s": 0,
        "--taps": rng.choice(["none", "0,2,3"]), "--listen-admin": "off",
    }
    ours = {
        "--page-size": page, "--pages": rows // page, "--launch-rows": rng.choice([0, 40, 300]),
        "--prefix-cache": "on" if apart else rng.choice(["on", "on", "off", "rounds"]),
    }
    theirs = dict(ours)
    if apart:
        page = int(rng.choice([16, 32, 64, 128]))
        theirs.update({"--page-size": page, "--pages": 24000 // page, "--launch-rows": rng.choice([0, 17, 100])})
        theirs.update({"--prefix-cache": "off", "--threads": 1, "--batch-window-us": 0})
    options = [[str(word) for option in {**shared, **own}.items() for word in option] for own in (ours, theirs)]
    options[0] += ["--backend", "cpu", "--kv-dtype", left]
    if roomy:  # what an oracle still looks at is no free page, whenever that is
        options[0] += ["--shadow", str(rng.choice(["off", "sample:0.1"]))]
        options[1] += ["--shadow", "sample:0.1" if args.backend == "cpu" else "all"]
    options[1] += ["--backend", args.backend, "--kv-dtype", right, *products]
    wider = 1 if not products else 16 if name == "kjv-mla-8m" else 4
    report = Report(exact, [bound * wider for bound in ROUNDED[name]] if right == "bf16" else None)
    return name, options, report, apart, roomy


class Player(Rig):
    """Draws calls and plays them."""

    def __init__(self, args, number):
        rng = np.random.default_rng([args.seed, number])
        self.name, self.options, report, self.apart, self.roomy = options_of(args, rng, number)
        folder = os.path.join(args.models, self.name)
        programs = (args.program, args.other or args.program)
        sides = [twins.side(name, program, folder, options)
                 for name, program, options in zip(("first", "second"), programs, self.options)]
        super().__init__(rng, Twins(*sides), report, self.apart)

    def play(self, steps):
        with self.twins:
            first, second = (side.model for side in self.twins.sides)
            self.vocab, self.limits, self.page = first["vocab"], first["limits"], first["page_size"]
            self.longest = min(first["max_len"] - 2, 1500 if self.roomy else 900)
            for key in ("vocab", "model_id", "limits", "max_len", "taps", "rules"):
                require(first[key] == second[key], f"/v1/model: {key} {first[key]} and {second[key]}")
            require(self.apart or first["pages"] == second["pages"], f"/v1/model: {first['pages']} and {second['pages']}")
            names, weights = list(OPERATIONS), np.array(list(OPERATIONS.values()), dtype=float)
            for step in range(steps):
                name = str(self.rng.choice(names, p=weights / weights.sum())) if self.texts else "create"
                self.at = f"step {step} {name}"
                try:
                    getattr(self, name)()
                except Difference as difference:
                    text = str(difference)
                    raise Difference(text if text.startswith(self.at) else f"{self.at}: {text}") from None
            self.at = "the end"
            self.end()

    def end(self):
        """Pages are all back, shadow found nothing, a device gave no memory since the start."""
        self.report.judge()
        for text in list(self.texts):
            self.drop(text)
        for side in self.twins.sides:
            judged = time.monotonic() + JUDGED_S
            while True:  # what the oracle still looks at is pinned
                model, parity = side.client.get("/v1/model"), side.client.get("/v1/parity")
                if model["pages"]["free"] == side.model["pages"]["free"] or time.monotonic() > judged:
                    break
                time.sleep(0.02)
            require(model["pages"]["free"] == side.model["pages"]["free"],
                    f"{side.name}: pages {model['pages']} when all is closed, at the start {side.model['pages']}")
            taken = model["device_allocations"]
            require(not taken, f"{side.name}: {taken} device allocations since the start")
            require(parity["rounds"]["violation"] == 0, f"{side.name}: shadow {parity}")

    # --- sessions

    def create(self):
        rng = self.rng
        if len(self.texts) >= SESSIONS:
            self.close()
            return
        tokens = [int(t) for t in rng.integers(0, self.vocab, prompt_length(rng, self.page, self.longest))]
        if self.texts and rng.random() < 0.4:  # begins as another one: pages are shared
            other = self.pick(ready=False).tokens
            tokens = [*other[: int(rng.integers(1, len(other) + 1))], *tokens][: self.longest]
        sampling = random_sampling(rng, self.vocab)
        stop = {}
        if rng.random() < 0.25:
            stop["token_ids"] = sorted({int(t) for t in rng.integers(0, self.vocab, 4)})
        if rng.random() < 0.25:
            stop["max_len"] = min(len(tokens) + int(rng.integers(1, 40)), self.longest + 2)
        body = {"tokens": tokens, "sampling": sampling, "stop": stop, "lease_s": 3600}
        if rng.random() < 0.3:
            body["tokens_b64"] = base64.b64encode(np.array(body.pop("tokens"), dtype="<i4").tobytes()).decode()
        self.calls += 1
        self.made(self.twins.post("/v1/sessions", body), tokens, sampling, stop)

    def made(self, answers, tokens, sampling, stop):
        """The session of a create or fork, when both have one; its first token is drawn behind the prompt."""
        pair = self.served(answers)
        if pair is None:
            return None
        text = Text([answer["session"] for answer in pair], tokens, pair[0], sampling, stop)
        text.max_len = min(text.max_len, self.twins.sides[0].model["max_len"])
        self.texts.append(text)
        self.report.prefills += 1
        pair = [dict(answer, new_tokens=[answer["pending"]]) for answer in pair]
        return text if self.drawn(f"{self.at} of {len(tokens)}", text, list(tokens), pair) else None

    def child(self, text, length=None):
        """A fork, with its parent's seed."""
        body = {} if length is None else {"len": length}
        answers = self.post(text, "fork", body)
        stop = {"token_ids": sorted(text.stop), "max_len": text.max_len}
        return self.made(answers, text.tokens[:length], text.sampling, stop)

    def fork(self):
        text = self.pick()
        if text is not None and len(self.texts) < SESSIONS:
            self.child(text, None if self.rng.random() < 0.4 else int(self.rng.integers(1, len(text.tokens) + 1)))

    def close(self):
        self.drop(self.pick(ready=False))

    # --- rounds

    def tree(self, text):
        """A tree, half of the time with what the model itself says next among it; and that path."""
        path = []
        if self.rng.random() < 0.5:
            child = self.child(text)
            if child is not None and child.finish is None:
                path = self.decoded(child, int(self.rng.integers(1, 9))) or []
            if child in self.texts:
                self.drop(child)
        path = path[: self.limits["max_depth"]]
        return random_tree(self.rng, text.pending, self.vocab, self.limits["max_nodes"], self.limits["max_depth"], path), path

    def verify(self, full=None):
        text = self.pick()
        if text is None:
            return
        tree, path = self.tree(text)
        if text not in self.texts:
            return
        full = bool(self.rng.random() < 0.6) if full is None else full
        other = {"rule": str(self.rng.choice(["greedy", "typical"]))} if self.rng.random() < 0.1 else {}
        rows = self.round(self.at, text, tree, full, **other)
        if rows is not None and not other and text.rule in ("target_walk", "greedy"):
            for side, answer in enumerate(text.last[2]):
                new = answer["new_tokens"]
                if new[: len(path)] != path:
                    found = f"{self.at}: side {side}: {new} with the drafts {path} that it decoded"
                    require(self.on_device(side), found)
                    self.report.parted.append(found)

    def again(self):
        """The same round once more behind a rollback has the same bits; so has what is drawn without logits in sight."""
        text = self.pick()
        if text is None:
            return
        tree, _ = self.tree(text)
        if text not in self.texts:
            return
        length, pending, digest = len(text.tokens), text.pending, text.digest
        rows = self.round(self.at, text, tree, bool(self.rng.random() < 0.6))
        first = text.last
        if rows is None or not self.back(text, length, pending):
            return
        require(text.digest == digest, f"{self.at}: digest {text.digest} behind the rollback, {digest} before")
        more = self.round(self.at, text, tree, draft=first[1]["tree"])
        if more is None:
            return
        for side in range(2):
            require(not rows or rows[side].tobytes() == more[side].tobytes(), f"{self.at}: side {side} has other bits")
            for key in ("accepted", "new_tokens", "digest"):
                require(first[2][side][key] == text.last[2][side][key], f"{self.at}: side {side} has another {key}")

    def back(self, text, length, pending=None):
        body = dict(text.base(), len=length, **({} if pending is None else {"pending": pending}))
        pair = self.served(self.post(text, "rollback", body))
        if pair is None:
            return False
        require(all(pair[0][key] == pair[1][key] for key in ("pending", "committed_len", "digest", "next_seq", "finish")),
                f"{self.at}: rollbacks to {length} differ: {pair}")
        text.last = ("rollback", body, pair)
        text.tokens, text.held = text.tokens[:length], None
        text.settled(pair[0])
        return True

    def rollback(self):
        text = self.pick(ready=False)
        self.back(text, int(self.rng.integers(1, len(text.tokens) + 1)))

    def paths(self):
        """A node has the logits of its path as a chain, behind the same prefix."""
        text = self.pick()
        if text is None or len(self.texts) >= SESSIONS or text.rule in ("ratio_wor", "typical"):
            return
        tree = random_tree(self.rng, text.pending, self.vocab, self.limits["max_nodes"], self.limits["max_depth"])
        child = self.child(text)
        rows = self.round(self.at, text, tree)
        if child is None or rows is None:
            return
        nodes = path_to(tree[1], int(self.rng.integers(len(tree[0]))))
        chain = [tree[0][node] for node in nodes], list(range(-1, len(nodes) - 1))
        alone = self.round(self.at, child, chain)
        for side in range(2 if alone else 0):
            self.same_path(f"{self.at}: side {side}: the path {nodes} as a chain", side, rows[side][nodes], alone[side])
        if child in self.texts:
            self.drop(child)

    def together(self):
        """Rounds of several sessions in one body or at once have the bits that their forks have alone."""
        ready = [text for text in self.texts if text.held is None and text.finish is None][: SESSIONS // 2]
        sent = []
        for text in ready:
            child = self.child(text)
            if child is not None:
                most = min(48, self.limits["max_nodes"])
                tree = random_tree(self.rng, text.pending, self.vocab, most, self.limits["max_depth"])
                sent.append((text, child, tree, self.verify_body(text, tree, dict(ALL_LOGITS))))
        if not sent:
            return
        as_one = self.rng.random() < 0.5 or not self.roomy
        answers = self.twins.each(lambda side: (self.as_one if as_one else self.at_once)(side, sent))
        self.calls += len(sent)
        for number, (text, child, tree, body) in enumerate(sent):
            pair = self.served([side[number] for side in answers], alone=False)
            rows = self.judged(f"{self.at} item {number}", text, tree, body, pair) if pair is not None else None
            child.q = text.q
            alone = self.round(f"{self.at} item {number} alone", child, tree, draft=body["tree"]) if rows else None
            for side in range(2 if alone else 0):
                same = rows[side].tobytes() == alone[side].tobytes()
                require(same, f"{self.at}: side {side} item {number}: alone it has other bits")
            if child in self.texts:
                self.drop(child)

    def as_one(self, side, sent):
        here = self.twins.sides[side]
        items = [dict(body, session=text.ids[side], epoch=here.epoch) for text, _, _, body in sent]
        status, answer = here.post("/v1/verify:batch", {"items": items})
        require(status == 200, f"a batch is {status}: {answer}")
        return [(item["status"], item.get("body") or item["problem"]) for item in answer["items"]]

    def at_once(self, side, sent):
        """Each on a connection of its own."""
        here = self.twins.sides[side]

        def call(item):
            client = here.daemon.client()
            try:
                return here.post(f"/v1/sessions/{item[0].ids[side]}/verify", dict(item[3], epoch=here.epoch), client)
            finally:
                client.close()

        with concurrent.futures.ThreadPoolExecutor(len(sent)) as pool:
            return list(pool.map(call, sent))

    def held(self):
        """A round that waits for its client: settled by commit, inside the next round, discarded, or rolled back."""
        text = self.pick()
        if text is None:
            return
        tree = random_tree(self.rng, text.pending, self.vocab, self.limits["max_nodes"], self.limits["max_depth"])
        fields = {"rule": "client"} if self.rng.random() < 0.5 else {"commit": "hold"}
        if self.round(self.at, text, tree, bool(self.rng.random() < 0.5), **fields) is None or text.held is None:
            return
        self.mistake(text)
        held, how = text.held, str(self.rng.choice(["commit", "next", "rollback"]))
        if how == "rollback":
            self.back(text, int(self.rng.integers(1, len(text.tokens) + 1)))
            return
        path = [] if self.rng.random() < 0.2 else path_to(tree[1], int(self.rng.integers(len(tree[0]))))
        settled = {"path": path, **({"next": int(self.rng.integers(self.vocab))} if path else {})}
        tokens, pending = [tree[0][node] for node in path], settled.get("next", text.pending)
        if how == "commit":
            body = {"seq": text.seq, **settled}
            pair = self.served(self.post(text, "commit", body))
            if pair is not None:
                require(all(pair[0].get(key) == pair[1].get(key) for key in self.keys), f"{self.at}: commits differ: {pair}")
                text.last = ("commit", body, pair)
                text.held, text.tokens = None, [*text.tokens, *tokens]
                text.settled(pair[0])
            return
        text.tokens, text.pending, text.held, before = [*text.tokens, *tokens], pending, None, text.tokens
        after = random_tree(self.rng, pending, self.vocab, self.limits["max_nodes"], self.limits["max_depth"])
        digest, text.digest = text.digest, None
        rows = self.round(self.at, text, after, commit_prev={"seq": held["seq"], **settled})
        if rows is None and text in self.texts:
            text.tokens, text.pending, text.held, text.digest = before, tree[0][0], held, digest

    # --- the other calls

    def decoded(self, text, count):
        """Both decode: the new tokens, or None."""
        body = dict(text.base(), max_tokens=count)
        pair = self.served(self.post(text, "decode", body))
        if pair is None or not self.drawn(self.at, text, [*text.tokens, text.pending], pair, tree=()):
            return None
        self.report.rounds += 1
        text.last = ("decode", body, pair)
        text.follow_decode(pair[0])
        return pair[0]["new_tokens"]

    def decode(self):
        text = self.pick()
        if text is not None:
            self.decoded(text, int(self.rng.choice([1, 2, 5, 17, 70])))

    def extend(self):
        text = self.pick(ready=False)
        if text.held is not None:
            return
        tokens = [int(t) for t in self.rng.integers(0, self.vocab, prompt_length(self.rng, self.page, 400))]
        keep = bool(self.rng.random() < 0.5)
        body = dict(text.base(), tokens=tokens, keep_pending=keep)
        pair = self.served(self.post(text, "extend", body))
        if pair is None:
            return
        text.last = ("extend", body, pair)
        context = [*text.tokens, *([text.pending] if keep else []), *tokens]
        if self.drawn(self.at, text, context, pair):
            text.tokens = context
            text.settled(pair[0])

    def score(self):
        text = self.pick()
        if text is None:
            return
        tree = random_tree(self.rng, text.pending, self.vocab, self.limits["max_nodes"], self.limits["max_depth"])
        body = {"tree": {"tokens": tree[0], "parents": tree[1]}}
        if self.rng.random() < 0.5:
            answers = self.twins.each(lambda side: self.twins.sides[side].post("/v1/score", dict(body, session=text.ids[side])))
        else:
            answers = self.twins.post("/v1/score", dict(body, tokens=text.tokens))
        self.calls += 1
        pair = self.served(answers)
        if pair is not None:
            self.scores(text, tree, pair)

    def replay(self):
        """A number once more: the answer that is kept, to the letter."""
        text = self.pick(ready=False)
        if text.last is None:
            return
        suffix, body, pair = text.last
        for before, (status, now) in zip(pair, self.post(text, suffix, body)):
            require(status == 200 and now == dict(before, replayed=True), f"{self.at}: {status} {now}, not {before}")

    def mistake(self, text=None):
        text = text or self.pick(ready=False)
        suffix, body = mistakes(self.rng, text, self.vocab, self.limits)
        answers = self.post(text, suffix, body)
        require(self.served(answers) is None, f"{self.at}: {suffix} {str(body)[:200]} is served")

    def state(self):
        """Both know the same tokens."""
        text = self.pick(ready=False)
        for side in self.twins.sides:
            number = self.twins.sides.index(side)
            state = side.client.get(f"/v1/sessions/{text.ids[number]}?tail=4096")
            known = (state["tail"], state["pending"], state["next_seq"], state["finish"], state["committed_len"])
            expected = (text.tokens[-4096:], text.pending, text.seq, text.finish, len(text.tokens))
            require(known == expected, f"{self.at}: {side.name} has {state}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("models")
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--rigs", type=int, default=1 << 20)
    parser.add_argument("--rig", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pairs")
    parser.add_argument("--other")
    args = parser.parse_args()
    args.pairs = args.pairs or ("f32:f32,bf16:bf16" if args.backend == "cpu" else "f32:f32,bf16:bf16,f32:f32,bf16:products")
    numbers = [args.rig] if args.rig is not None else range(args.rigs)
    began, played, failed = time.monotonic(), 0, 0
    for number in numbers:
        if time.monotonic() - began > args.seconds:
            break
        player = Player(args, number)
        try:
            player.play(args.steps)
        except Exception as problem:  # an answer out of contract, or none, is a difference too
            failed += 1
            kind = "" if isinstance(problem, Difference) else f"{getattr(player, 'at', 'the start')} {type(problem).__name__}: "
            print(f"FAIL rig {number} {kind}{problem}")
            print(f"     options {' '.join(player.options[0])} / {' '.join(player.options[1])}")
            other = f" --other {args.other}" if args.other else ""
            print(f"     repeat: differential.py {args.program} {args.models} --backend {args.backend} --pairs {args.pairs} "
                  f"--seed {args.seed} --rig {number} --steps {args.steps}{other}", flush=True)
        played += 1
        print(player.summary(number), flush=True)
    print(f"seed {args.seed}: {played} rigs, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed or not played else 0


if __name__ == "__main__":
    sys.exit(main())
