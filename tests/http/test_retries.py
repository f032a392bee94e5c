"""B52: no round runs twice, whatever happens between client and daemon.

100,000 rounds at scale 1 through tests/support/fault_proxy.py, a million with TV_TEST_SCALE=10; below 1 it is shorter.
"""

import json
import multiprocessing
import random
import socket
import sys
import threading
import time
import unittest

from harness import CONTRACT, SCALE, Caller, FixedDaemon, request_bytes, round_body, verify_path, wait_until
from fault_proxy import FAULTS, FaultProxy, Stream
from test_metrics import come_to_rest

CLIENTS, PROXIES = 4, 2
ROUNDS = max(200, round(100000 / CLIENTS * min(SCALE, 10.0)))
VOCAB = 512
HEAD = "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def token(position):
    """What the engine of fixed answers draws."""
    return (7 * position + 3) % VOCAB


class Client:
    """One session through the proxy. A request is sent again, the same bytes, until it is answered."""

    def __init__(self, port, state, seed):
        self.port, self.stream = port, None
        self.path = f"/v1/sessions/{state['session']}/verify"
        self.epoch, self.seq, self.len = state["epoch"], state["next_seq"], state["committed_len"]
        self.random = random.Random(seed)
        self.tries = self.replayed = self.refused = 0

    def answer(self, data):
        while True:
            self.tries += 1
            try:
                if self.stream is None:
                    self.stream = Stream(socket.create_connection(("127.0.0.1", self.port), timeout=60))
                self.stream.sock.sendall(data)
                got = self.stream.message()
                if got is not None:
                    return self.read(*got)
            except ConnectionError:
                pass
            self.stream.sock.close()
            self.stream = None

    def read(self, message, at):
        """(status, decoded body)."""
        status = int(message[9:12])
        lines = message[: at - 4].decode("ascii").split("\r\n")[1:]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        CONTRACT.check("POST", self.path, status, headers, message[at:])
        return status, json.loads(message[at:])

    def request(self, drafts):
        tokens = [token(self.len), *drafts]
        parents = [-1, *range(len(drafts))]
        body = '{"seq":%d,"epoch":"%s","expected_len":%d,"tree":{"tokens":%s,"parents":%s}}' % (
            self.seq,
            self.epoch,
            self.len,
            tokens,
            parents,
        )
        return (HEAD % (self.path, len(body), body)).encode()

    def round(self):
        right = self.random.randrange(3)
        drafts = [token(self.len + 1 + i) for i in range(right)] + [(token(self.len + 1 + right) + 1) % VOCAB]
        status, answer = self.answer(self.request(drafts))
        assert status == 200, answer
        expected = [token(self.len + 1 + i) for i in range(right + 1)]
        assert answer["new_tokens"] == expected and answer["seq"] == self.seq, answer
        assert answer["committed_len"] == self.len + right + 1, answer
        self.replayed += answer["replayed"]
        if self.random.random() < 0.01:  # the same number with another body
            status, problem = self.answer(self.request(drafts[:-1]))
            assert (status, problem["code"]) == (422, "seq-reused"), problem
            assert problem["committed"] is False
            self.refused += 1
        self.seq, self.len = answer["next_seq"], answer["committed_len"]


def play(port, state, seed, pipe):
    client = Client(port, state, seed)
    try:
        for _ in range(ROUNDS):
            client.round()
        pipe.send((client.len, client.seq, client.tries, client.replayed, client.refused))
    except BaseException as error:
        pipe.send(repr(error)[:2000])
        sys.exit(1)


class RetryTest(unittest.TestCase):
    def test_b52_rounds_through_a_faulty_link(self):
        """Every round once: by the client's text, the session's, and the engine's own count of commits."""
        fork = multiprocessing.get_context("fork")
        daemon = FixedDaemon("--drain-grace-s", "0").__enter__()
        caller = Caller(daemon)
        states = [caller.session(tokens=[1, 2, 3], lease_s=3600) for _ in range(CLIENTS)]
        caller.close()  # the daemon would end a connection that is idle while the rounds run
        proxies = [FaultProxy("127.0.0.1", daemon.port, seed) for seed in range(PROXIES)]
        start, players = time.monotonic(), []
        for number, state in enumerate(states):
            ours, theirs = multiprocessing.Pipe()
            proxy = proxies[number % PROXIES]
            process = fork.Process(target=play, args=(proxy.port, state, number, theirs), daemon=True)
            process.start()
            players.append((process, ours))
        ends = [pipe.recv() for _, pipe in players]
        seconds = time.monotonic() - start
        counts = [proxy.close() for proxy in proxies]
        total = {name: sum(one[name] for one in counts) for name in counts[0]}
        for end, state, (process, _) in zip(ends, states, players):
            process.join(timeout=20)
            self.assertIsInstance(end, tuple, end)
            committed_len, next_seq = end[:2]
            self.assertEqual(next_seq, ROUNDS + 1)
            now = caller.call("GET", f"/v1/sessions/{state['session']}?tail=4096").json
            self.assertEqual((now["committed_len"], now["next_seq"]), (committed_len, next_seq))
            first = max(0, committed_len - 4096)
            whole = [1, 2, 3] + [token(p) for p in range(3, committed_len)]
            self.assertEqual(now["tail"], whole[first:])
            self.assertEqual(now["pending"], token(committed_len))
        caller.close()
        come_to_rest(daemon)
        launches, contexts = daemon.stat()
        self.assertLessEqual(launches, CLIENTS * ROUNDS)
        daemon.process.terminate()
        self.assertEqual(daemon.process.stdout.readline(), f"end commits {CLIENTS * ROUNDS}\n")
        self.assertEqual((daemon.stop(), contexts), (0, CLIENTS))
        daemon.log.close()
        for name in FAULTS:
            self.assertGreater(total[name], 0, name)
        self.assertGreater(total["stored"], ROUNDS // 100)
        self.assertGreater(sum(end[3] for end in ends), 0)
        self.assertGreater(sum(end[4] for end in ends), 0)
        print(f"{CLIENTS * ROUNDS} rounds in {seconds:.1f} s, {launches} launches, {total}")

    def test_a_key_is_one_session(self):
        """Idempotency-Key of create and fork: forms that are taken, the same bytes again, another body."""
        body, other = {"tokens": [1, 2, 3]}, {"tokens": [1, 2, 4]}
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            for bad in ([""], ["x" * 65], ["a b"], ["\xe9"], ["one", "two"]):
                headers = [f"Idempotency-Key: {key}" for key in bad]
                answer = caller.call("POST", "/v1/sessions", body, headers)
                self.assertEqual((answer.status, answer.json["code"]), (400, "bad-request"), bad)
            for good in ("k", '"9f1c0b1e-7d0b"', "~" * 64):
                headers = [f"idempotency-key: {good}"]
                first = caller.call("POST", "/v1/sessions", body, headers)
                again = caller.call("POST", "/v1/sessions", body, headers)
                self.assertEqual((first.status, again.status, again.body), (201, 201, first.body))
                where = {answer.headers["location"] for answer in (first, again)}
                self.assertEqual(where, {"/v1/sessions/" + first.json["session"]})
                answer = caller.call("POST", "/v1/sessions", other, headers)
                self.assertEqual((answer.status, answer.json["code"]), (422, "seq-reused"))
            state = first.json
            path, fork = f"/v1/sessions/{state['session']}", {"epoch": state["epoch"], "len": 2}
            first = caller.call("POST", path + "/fork", fork, ["Idempotency-Key: f"])
            again = caller.call("POST", path + "/fork", fork, ["Idempotency-Key: f"])
            self.assertEqual((first.status, again.status, again.body), (201, 201, first.body))
            self.assertEqual(first.headers["location"], "/v1/sessions/" + first.json["session"])
            back = {"seq": 1, "epoch": state["epoch"], "expected_len": 3, "len": 2}
            answer = caller.call("POST", path + "/rollback", back, ["Idempotency-Key: of no effect"])
            self.assertEqual((answer.status, answer.json["pending"]), (200, 3))
            self.assertEqual(answer.json["digest"], first.json["digest"])
            self.assertTrue(caller.call("POST", path + "/rollback", back).json["replayed"])
            self.assertEqual(len(caller.call("GET", "/v1/sessions").json["sessions"]), 4)
            now = dict(state, pending=3, next_seq=2, committed_len=2)
            item = dict(round_body(now), session=state["session"])
            batch = {"items": [item]}
            for key in ("", "x" * 65):
                answer = caller.call("POST", "/v1/verify:batch", batch, ["Idempotency-Key: " + key])
                self.assertEqual((answer.status, answer.json["code"]), (400, "bad-request"))
            first = caller.call("POST", "/v1/verify:batch", batch, ["Idempotency-Key: b"])
            again = caller.call("POST", "/v1/verify:batch", batch, ["Idempotency-Key: b"])
            self.assertEqual((first.status, again.status, again.body), (200, 200, first.body))
            self.assertEqual(first.json["items"][0]["status"], 200)
            answer = caller.call("POST", "/v1/verify:batch", {"items": [item, item]}, ["Idempotency-Key: b"])
            self.assertEqual((answer.status, answer.json["code"]), (422, "seq-reused"))
            caller.close()

    def test_b52_two_at_once_are_one_launch(self):
        """The same round on two connections while the engine works for it; and another body meanwhile."""
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            callers = [Caller(daemon) for _ in range(3)]
            state = callers[0].session()
            for caller in callers:
                caller.call("GET", "/healthz")
            launches = daemon.stat()[0]
            daemon.hold()
            data = request_bytes("POST", verify_path(state), json.dumps(round_body(state)).encode())
            callers[0].sock.sendall(data)
            wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the round is launched")
            answers = [None, None]

            def wait(which):
                answers[which] = callers[which].reader.answer("POST", verify_path(state))

            threads = [threading.Thread(target=wait, args=(which,)) for which in (0, 1)]
            callers[1].sock.sendall(data)
            for thread in threads:
                thread.start()
            other = callers[2].call("POST", verify_path(state), round_body(state, [9], [0]))
            self.assertEqual((other.status, other.code), (422, "seq-reused"))
            daemon.release()
            for thread in threads:
                thread.join(timeout=20)
            self.assertEqual([answer.status for answer in answers], [200, 200])
            bodies = [dict(answer.json, replayed=None) for answer in answers]
            self.assertEqual(bodies[0], bodies[1])
            self.assertEqual(daemon.stat()[0], launches + 1)
            again = callers[2].call("POST", verify_path(state), round_body(state))
            self.assertEqual(again.body, answers[0].body.replace(b'"replayed":false}', b'"replayed":true}'))
            self.assertEqual(daemon.stat()[0], launches + 1)
            for caller in callers:
                caller.close()

    def test_a_deadline_does_not_wait_for_the_launch_before(self):
        """504 while another session's launch lasts, nothing committed, and the same number is still free."""
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            busy, caller = Caller(daemon), Caller(daemon)
            first, second = busy.session(), caller.session()
            launches = daemon.stat()[0]
            daemon.hold()
            busy.sock.sendall(request_bytes("POST", verify_path(first), json.dumps(round_body(first)).encode()))
            wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the round is launched")
            start = time.monotonic()
            answer = caller.call("POST", verify_path(second), round_body(second, deadline_ms=200))
            seconds = time.monotonic() - start
            self.assertEqual((answer.status, answer.code), (504, "deadline"))
            self.assertFalse(answer.json["committed"])
            self.assertGreaterEqual(seconds, 0.2)
            state = caller.call("GET", f"/v1/sessions/{second['session']}").json
            self.assertEqual((state["next_seq"], state["committed_len"]), (1, second["committed_len"]))
            daemon.release()
            self.assertEqual(busy.reader.answer("POST", verify_path(first)).status, 200)
            self.assertEqual(daemon.stat()[0], launches + 1)  # it never ran
            again = caller.call("POST", verify_path(second), round_body(second))
            self.assertEqual((again.status, again.json["replayed"]), (200, False))
            busy.close()
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
