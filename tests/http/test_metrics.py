"""GET /metrics: the whole text by the format's rules, and the conservation laws of what it counts.

A client keeps its own books of every answer it gets; at rest the daemon's must be the same.
"""

import collections
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
import unittest

from harness import CONTRACT, Caller, FixedDaemon, Reader, request_bytes, round_body, sized, verify_path, wait_until
from metrics import Malformed, growing, parse
from real import MODEL, RealDaemon

PREFIX = "treeverify_"


def scrape(daemon, admin=True):
    caller = Caller(daemon, admin)
    answer = caller.call("GET", "/metrics")
    caller.close()
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.body.decode("ascii")


def route_of(target):
    path = target.split("?")[0]
    template = next((t for pattern, t in CONTRACT.routes if pattern.match(path)), None)
    return "none" if template is None else re.sub(r"\{\w+\}", "*", template)


class Books:
    """A caller that counts what it is answered."""

    def __init__(self, daemon, seed):
        self.caller, self.random = Caller(daemon), random.Random(seed)
        self.answers, self.problems = collections.Counter(), collections.Counter()
        self.rounds, self.replays = collections.Counter(), collections.Counter()
        self.guesses, self.places = collections.Counter(), collections.Counter()
        self.drafts = self.draft_tokens = self.accepted = self.new_tokens = self.prompt_tokens = 0
        self.created = self.deleted = 0
        self.nodes = []  # of each verified tree
        self.open = []

    def call(self, method, target, body=None, check=True):
        answer = self.caller.call(method, target, body, check=check)
        self.answers[route_of(target), str(answer.status)] += 1
        if answer.status >= 400:
            self.problems[answer.code] += 1
        return answer

    def judge(self, drafted, accepted):
        if drafted > 0:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted += accepted
            self.places.update(str(min(place, 127)) for place in range(accepted))

    def post(self, state, what, body):
        """One numbered round, whose answer becomes the state."""
        answer = self.call("POST", f"/v1/sessions/{state['session']}/{what}", body)
        assert answer.status == 200, answer.body
        got = answer.json
        if got["replayed"]:
            self.replays["stored"] += 1
            return got
        self.rounds[got["status"]] += 1
        if got["status"] == "held":
            self.nodes.append(len(body["tree"]["tokens"]))
            state.update(next_seq=got["next_seq"], held=(body["tree"], got["accepted"]["nodes"]))
            return got
        state.update(pending=got["pending"], committed_len=got["committed_len"], next_seq=got["next_seq"])
        self.new_tokens += len(got.get("new_tokens") or [])
        if what == "verify" and got["status"] != "skipped":
            self.nodes.append(len(body["tree"]["tokens"]))
            self.judge(len(body["tree"]["tokens"]) - 1, len(got["accepted"]["nodes"]) - 1)
        return got

    def create(self):
        tokens = [self.random.randrange(256) for _ in range(self.random.randrange(1, 40))]
        answer = self.call("POST", "/v1/sessions", {"tokens": tokens, "sampling": {"rule": "greedy"}})
        assert answer.status == 201, answer.body
        self.created += 1
        self.prompt_tokens += len(tokens)
        self.open.append(answer.json)

    def tree(self, state):
        """Right guesses (of the engine with fixed answers) in front of wrong ones."""
        right = self.random.randrange(5)
        drafts = [(7 * (state["committed_len"] + 1 + i) + 3) % self.vocab for i in range(right)]
        parents = list(range(right))
        for _ in range(self.random.randrange(4)):
            if self.vocab - 1 not in drafts:
                drafts.append(self.vocab - 1)
                parents.append(0)
        return drafts, parents

    def verify(self, state):
        body = round_body(state, *self.tree(state))
        self.post(state, "verify", body)
        if self.random.random() < 0.2:
            again = self.post(state, "verify", body)
            assert again["replayed"]

    def hold(self, state):
        body = round_body(state, *self.tree(state), commit="hold")
        self.post(state, "verify", body)
        tree, path = state.pop("held")
        head = {"seq": state["next_seq"], "epoch": state["epoch"]}
        if self.random.random() < 0.3:
            self.judge(len(tree["tokens"]) - 1, 0)
            length = state["committed_len"]
            self.post(state, "rollback", dict(head, expected_len=length, len=length))
            return
        self.judge(len(tree["tokens"]) - 1, len(path) - 1)
        self.post(state, "commit", dict(head, path=path, next=self.random.randrange(250)))

    def guess(self, state):
        """A round, and one behind it that holds or does not; both come one after the other."""
        first = self.post(state, "verify", round_body(state, *self.tree(state)))
        right = self.random.random() < 0.5
        held = {"seq": first["seq"], "leaf": first["accepted"]["nodes"][-1], "pending": first["pending"]}
        wrong = dict(held, pending=(held["pending"] + 1) % 250)
        condition = held if right else wrong
        body = round_body(state, **{"if": condition})
        body["tree"]["tokens"][0] = condition["pending"]
        self.post(state, "verify", body)
        self.guesses["hit" if right else "skip"] += 1

    def others(self, state):
        head = {"seq": state["next_seq"], "epoch": state["epoch"], "expected_len": state["committed_len"]}
        kind = self.random.randrange(3)
        if kind == 0:
            self.post(state, "decode", dict(head, max_tokens=self.random.randrange(1, 5)))
        elif kind == 1:
            tokens = [self.random.randrange(250) for _ in range(self.random.randrange(1, 9))]
            self.post(state, "extend", dict(head, tokens=tokens))
            self.prompt_tokens += len(tokens)
        elif state["committed_len"] > 1:
            length = self.random.randrange(1, state["committed_len"])
            self.post(state, "rollback", dict(head, len=length))

    def wrong(self, state):
        """One of many refusals."""
        path = verify_path(state)
        body = round_body(state, [5], [0])
        calls = [
            ("GET", "/v1/nothing", None),
            ("GET", "/v1/sessions/s_0000000000000000000000", None),
            ("DELETE", "/v1/model", None),
            ("POST", path, b"{"),
            ("POST", path, dict(body, expected_len=9999)),
            ("POST", path, dict(body, seq=9999)),
            ("POST", path, dict(body, epoch="0" * 16)),
            ("POST", path, dict(body, tree={"tokens": [state["pending"], 5, 5], "parents": [-1, 0, 0]})),
            ("POST", path, dict(body, extra=1)),
            ("GET", f"/v1/sessions/{state['session']}/rounds/9999", None),
        ]
        answer = self.call(*self.random.choice(calls))
        assert answer.status >= 400, answer.body

    def step(self):
        if len(self.open) < 3:
            self.create()
        state = self.random.choice(self.open)
        kind = self.random.choices(
            ("verify", "hold", "guess", "others", "wrong", "delete", "look"), (8, 3, 3, 4, 4, 1, 1)
        )[0]
        if kind == "delete" or state["committed_len"] > 400:
            self.call("DELETE", f"/v1/sessions/{state['session']}")
            self.open.remove(state)
            self.deleted += 1
        elif kind == "look":
            self.call("GET", "/v1/sessions")
        else:
            getattr(self, kind)(state)


def laws(families):
    """What holds at rest, whatever has happened."""
    value = {name: family.total() for name, family in families.items() if family.type != "histogram"}
    pages = families[PREFIX + "kv_pages"].by("state")
    assert min(pages.values()) >= 0, pages
    assert sum(pages.values()) == value[PREFIX + "kv_pool_pages"], pages
    live = value[PREFIX + "sessions"]
    ended = value[PREFIX + "sessions_closed_total"] + value[PREFIX + "lease_expired_total"]
    assert value[PREFIX + "sessions_created_total"] == live + ended
    requests = value[PREFIX + "http_requests_total"]
    running = value[PREFIX + "http_running"]
    assert running == 1, running  # the scrape itself
    assert value[PREFIX + "http_received_total"] == requests + running + value[PREFIX + "http_given_up_total"]
    by_code = families[PREFIX + "http_requests_total"].by("code")
    refused = sum(count for code, count in by_code.items() if code >= "400")
    assert value[PREFIX + "problems_total"] == refused, (by_code, value[PREFIX + "problems_total"])
    spec = PREFIX + "spec_decode_num_"
    assert value[spec + "accepted_tokens_per_pos_total"] == value[spec + "accepted_tokens_total"]
    assert value[spec + "accepted_tokens_total"] <= value[spec + "draft_tokens_total"]
    places = families[spec + "accepted_tokens_per_pos_total"].samples
    counts = [count for _, count in sorted(places.items(), key=lambda item: int(dict(item[0])["position"]))]
    assert counts == sorted(counts, reverse=True), counts
    assert value[spec + "drafts_total"] >= counts[0]
    assert value[PREFIX + "num_requests_waiting"] == value[PREFIX + "num_requests_running"] == 0
    trees = families[PREFIX + "tree_nodes"].counts()[()]
    stages = families[PREFIX + "round_seconds"].counts()
    for stage in ("queue", "gpu", "sample", "encode"):
        assert stages[(("stage", stage),)] == trees, (stage, stages, trees)
    assert stages[(("stage", "parse"),)] >= trees


def come_to_rest(daemon, within_s=60):
    """The laws, as soon as the daemon has seen the end of the last connection."""
    until = time.monotonic() + within_s
    while True:
        try:
            return laws(parse(scrape(daemon)))
        except AssertionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


class MetricsTest(unittest.TestCase):
    def check_books(self, books, families):
        names = {name[len(PREFIX) :]: family for name, family in families.items() if name.startswith(PREFIX)}
        answers = {(dict(k)["route"], dict(k)["code"]): v for k, v in names["http_requests_total"].samples.items()}
        for key in [key for key in answers if key[0] == "/metrics"]:
            del answers[key]
        self.assertEqual(answers, dict(books.answers))
        nonzero = lambda counter: {key: value for key, value in counter.items() if value}
        self.assertEqual(nonzero(names["problems_total"].by("code")), dict(books.problems))
        conflicts = names["conflicts_total"].by("code")
        self.assertEqual(conflicts, {code: books.problems[code] for code in conflicts})
        self.assertEqual(nonzero(names["rounds_total"].by("status")), nonzero(books.rounds))
        self.assertEqual(set(nonzero(names["rounds_total"].by("rule"))), {"greedy"})
        self.assertEqual(nonzero(names["replays_total"].by("kind")), nonzero(books.replays))
        self.assertEqual(nonzero(names["conditional_total"].by("outcome")), nonzero(books.guesses))
        places = names["spec_decode_num_accepted_tokens_per_pos_total"].by("position")
        self.assertEqual(nonzero(places), dict(books.places))
        for name, mine in (
            ("spec_decode_num_drafts_total", books.drafts),
            ("spec_decode_num_draft_tokens_total", books.draft_tokens),
            ("spec_decode_num_accepted_tokens_total", books.accepted),
            ("generation_tokens_total", books.new_tokens),
            ("prompt_tokens_total", books.prompt_tokens),
            ("sessions_created_total", books.created),
            ("sessions_closed_total", books.deleted),
        ):
            self.assertEqual(names[name].total(), mine, name)
        nodes = names["tree_nodes"].samples
        self.assertEqual(nodes[("_sum",)], sum(books.nodes))
        self.assertEqual(nodes["_bucket", ("le", "4")], sum(n <= 4 for n in books.nodes))

    def test_books(self):
        """Random traffic; every scrape meanwhile is well formed and nothing shrinks."""
        with FixedDaemon() as daemon:
            books = Books(daemon, 11)
            books.vocab = books.call("GET", "/v1/model", check=False).json["vocab"]
            last = parse(scrape(daemon))
            for step in range(sized(400, 4000, 60)):
                books.step()
                if step % 50 == 0:
                    now = parse(scrape(daemon, admin=step % 100 == 0))
                    self.assertEqual(growing(last, now), [])
                    laws(now)
                    last = now
            families = parse(scrape(daemon))
            laws(families)
            self.check_books(books, families)
            self.assertGreater(books.accepted, 0)
            self.assertGreater(books.guesses["hit"] * books.guesses["skip"], 0)
            books.caller.close()

    def test_joined_and_gone(self):
        """A retry joins the round under way; a client that leaves is counted as one without an answer."""
        with FixedDaemon() as daemon:
            caller, twin = Caller(daemon), Caller(daemon)
            state = caller.session()
            body = round_body(state, [9], [0])
            daemon.hold()
            answers = []
            threads = [
                threading.Thread(target=lambda c=c: answers.append(c.call("POST", verify_path(state), body)))
                for c in (caller, twin)
            ]
            for thread in threads:
                thread.start()
            attached = lambda: parse(scrape(daemon))[PREFIX + "replays_total"].by("kind")["attached"]
            wait_until(lambda: attached() == 1, 30, "the second call joins")
            self.assertEqual(parse(scrape(daemon))[PREFIX + "http_running"].total(), 3)
            sock = daemon.connect()
            sock.sendall(request_bytes("POST", verify_path(state), b"{"))
            Reader(sock).answer()  # no JSON: refused and closed
            sock.close()
            sock = daemon.connect()
            sock.sendall(request_bytes("POST", verify_path(state), b"x" * 100)[:-50])
            wait_until(
                lambda: parse(scrape(daemon))[PREFIX + "http_running"].total() == 4, 30, "half a body has come"
            )
            sock.close()
            gone = lambda: parse(scrape(daemon))[PREFIX + "http_given_up_total"].total()
            wait_until(lambda: gone() == 1, 30, "the one that left is given up")
            daemon.release()
            for thread in threads:
                thread.join()
            self.assertEqual(sorted(answer.json["replayed"] for answer in answers), [False, True])
            caller.close()
            twin.close()
            families = parse(scrape(daemon))
            laws(families)
            self.assertEqual(families[PREFIX + "rounds_total"].total(), 1)

    def test_failed_rounds(self):
        """A round that is refused after it was admitted is a failed one, and changes nothing else."""
        with FixedDaemon("--queue-max", "1") as daemon:
            caller, late = Caller(daemon), Caller(daemon)
            first, second = caller.session(), caller.session()
            daemon.hold()
            thread = threading.Thread(target=lambda: caller.call("POST", verify_path(first), round_body(first)))
            thread.start()
            running = lambda: parse(scrape(daemon))[PREFIX + "num_requests_running"].total()
            wait_until(lambda: running() == 1, 30, "the worker has the first")
            answers = []
            body = round_body(second, deadline_ms=1)
            behind = threading.Thread(target=lambda: answers.append(late.call("POST", verify_path(second), body)))
            behind.start()
            behind.join()  # it is answered in time, however long the first one's launch lasts
            families = parse(scrape(daemon))
            self.assertEqual(families[PREFIX + "num_requests_waiting"].total(), 0)
            self.assertEqual(families[PREFIX + "num_requests_running"].total(), 1)
            daemon.release()
            thread.join()
            self.assertEqual(answers[0].code, "deadline")
            families = parse(scrape(daemon))
            laws(families)
            by_status = families[PREFIX + "rounds_total"].by("status")
            self.assertEqual((by_status["failed"], by_status["committed"]), (1, 1))
            caller.close()
            late.close()

    def test_real(self):
        """Pages and verdicts of the shipped daemon; every round is judged, each once. A checkpoint's folder may be
        called anything, and its name is a label."""
        name = 'we"ird\\ mo{d}el,le="1"'
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.realpath(MODEL), os.path.join(folder, name))
            self.real(os.path.join(folder, name), name)

    def real(self, folder, name):
        with RealDaemon("--shadow", "all", "--pages", "64", model=folder) as daemon:
            (labels,) = parse(scrape(daemon))[PREFIX + "build_info"].samples
            self.assertEqual(dict(labels)["model"], name)
            caller = Caller(daemon)
            states = [caller.session(tokens=list(range(1, 150)), lease_s=1 if i == 2 else 3600) for i in range(3)]
            for _ in range(3):
                for state in states[:2]:
                    answer = caller.call("POST", verify_path(state), round_body(state, [5, 6, 7], [0, 0, 1]))
                    self.assertEqual(answer.status, 200)
                    state.update(answer.json)
            self.assertTrue(caller.call("POST", "/v1/parity", {}).json["ok"])
            judged = lambda: parse(scrape(daemon))[PREFIX + "parity_rounds_total"].total()
            wait_until(lambda: judged() == 7, 300, "all rounds are judged")  # by a thread that comes last
            expired = lambda: parse(scrape(daemon))[PREFIX + "lease_expired_total"].total()
            wait_until(lambda: expired() == 1, 60, "the short lease is over")
            text = scrape(daemon)
            families = parse(text)
            laws(families)
            pages = families[PREFIX + "kv_pages"].by("state")
            self.assertGreater(pages["shared"] + pages["private"], 0)
            self.assertEqual(families[PREFIX + "kv_pool_pages"].total(), 64)
            verdicts = families[PREFIX + "parity_rounds_total"].by("result")
            self.assertEqual(verdicts["violation"], 0)
            self.assertEqual(families[PREFIX + "parity_logit_abs_err"].counts()[()], 1)
            self.assertEqual(families[PREFIX + "up_self_test"].by("result"), {"passed": 1, "failed": 0})
            self.assertEqual(families[PREFIX + "ready"].total(), 1)
            with open(f"/proc/{daemon.process.pid}/limits") as limits:
                limit = float(re.search(r"Max open files\s+(\d+)", limits.read()).group(1))
            self.assertEqual(families["process_max_fds"].total(), limit)
            self.assertGreater(families["process_resident_memory_bytes"].total(), 1e7)
            caller.close()
            if shutil.which("promtool") is None:
                print("promtool is not installed (Debian: prometheus): its lint was skipped")
            else:
                lint = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
                self.assertEqual((lint.returncode, lint.stdout + lint.stderr), (0, ""))

    def test_parser_refuses(self):
        """The parser itself: one fault each."""
        good = "# HELP a_total x\n# TYPE a_total counter\na_total 1\n"
        parse(good)
        histogram = "# HELP h x\n# TYPE h histogram\n"
        for text in (
            good[:-1],
            good + "a_total 1\n",
            good + good,
            good + "b 1\n",
            good.replace(" 1\n", " one\n"),
            good.replace(" 1\n", " -1\n"),
            good.replace("a_total 1", 'a_total{b="\\x"} 1'),
            good.replace("a_total 1", 'a_total{b="1",b="2"} 1'),
            good.replace("a_total 1", 'a_total{b="1} 1'),
            good.replace("counter", "gauge"),
            good.replace("# TYPE a_total counter\n", ""),
            histogram + 'h_bucket{le="1"} 2\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1\n',
            histogram + 'h_bucket{le="1"} 1\nh_bucket{le="+Inf"} 2\nh_sum 1\nh_count 1\n',
            histogram + 'h_bucket{le="2"} 1\nh_bucket{le="1"} 1\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1\n',
            histogram + 'h_bucket{le="1"} 1\nh_sum 1\nh_count 1\n',
        ):
            with self.assertRaises((Malformed, IndexError), msg=text):
                parse(text)


if __name__ == "__main__":
    unittest.main(verbosity=1)
