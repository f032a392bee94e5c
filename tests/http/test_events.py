"""GET …/events: who follows a session knows what its rounds have done, however often the connection is lost.

A follower that knows nothing but its events must have the session's length, pending token and digest after every
event, and all of its tokens. Times are judged only where a clock of the daemon's is what is tested, and then from below.
"""

import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
import unittest

from harness import CONTRACT, Caller, FixedDaemon, request_bytes, round_body, sized, verify_path, wait_until
from events import Stream
from metrics import parse

PROMPT = [1, 2, 3]


def events_path(state):
    return f"/v1/sessions/{state['session']}/events"


def follow(daemon, state, last=None, headers=()):
    headers = list(headers) + ([] if last is None else [f"Last-Event-ID: {last}"])
    return Stream(daemon.connect(), CONTRACT, events_path(state), headers)


def refusal(daemon, state, last=None, headers=()):
    """(status, code) of a stream that is refused"""
    stream = follow(daemon, state, last, headers)
    stream.close()
    return stream.status, stream.problem["code"]


def numbers(daemon, headers=()):
    caller = Caller(daemon, admin=True)
    families = parse(caller.call("GET", "/metrics", headers=headers).body.decode())
    caller.close()
    return {
        "open": families["treeverify_event_streams"].total(),
        "opened": families["treeverify_event_streams_total"].total(),
        "ended": families["treeverify_event_streams_ended_total"].by("reason"),
        "told": families["treeverify_events_total"].total(),
        "missed": families["treeverify_events_missed_total"].total(),
    }


class Follower:
    """What the session is, by its events alone; the tokens need every new token to be told."""

    def __init__(self, prompt, state):
        self.tokens, self.pending, self.last = list(prompt), state["pending"], 0

    def take(self, event):
        assert event.id is not None and event.id > self.last, (event, self.last)
        self.last = event.id
        data = event.data
        assert data["seq"] == event.id, event
        if event.name == "rollback":
            assert data["op"] == "rollback" and data["new_tokens"] == [], event
            del self.tokens[data["committed_len"] :]
        else:
            assert data["new_tokens"] and data["new_tokens"][-1] == data["pending"], event
            self.tokens += [self.pending] + data["new_tokens"][:-1]
        self.pending = data["pending"]
        assert len(self.tokens) == data["committed_len"], (event, len(self.tokens))


class Rounds:
    """Random rounds of one session: verify, decode, rollback, hold with commit or commit_prev."""

    def __init__(self, caller, seed):
        self.caller, self.random, self.told = caller, random.Random(seed), []
        self.state = caller.session(tokens=PROMPT)

    def post(self, what, body):
        answer = self.caller.call("POST", f"/v1/sessions/{self.state['session']}/{what}", body)
        assert answer.status == 200, answer.body
        self.state.update(answer.json)
        return answer.json

    def head(self, **fields):
        length = self.state["committed_len"]
        return dict(seq=self.state["next_seq"], epoch=self.state["epoch"], expected_len=length, **fields)

    def tree(self):
        right = self.random.randrange(5)
        drafts = [(7 * (self.state["committed_len"] + 1 + i) + 3) % 512 for i in range(right)]
        return drafts, list(range(right))

    def step(self):
        kind = self.random.randrange(6)
        if kind == 0:
            self.told.append(self.post("decode", self.head(max_tokens=self.random.randrange(1, 40)))["seq"])
        elif kind == 1 and self.state["committed_len"] > 4:
            to = self.random.randrange(1, self.state["committed_len"] + 1)
            self.told.append(self.post("rollback", self.head(len=to))["seq"])
        elif kind == 2:
            self.hold()
        else:
            body = round_body(self.state, *self.tree())
            self.told.append(self.post("verify", body)["seq"])
            if kind == 3:
                assert self.post("verify", body)["replayed"]

    def hold(self):
        before = dict(self.state)
        held = self.post("verify", round_body(self.state, *self.tree(), commit="hold"))
        self.state.update(pending=before["pending"], committed_len=before["committed_len"])
        path, after = held["accepted"]["nodes"], held["pending"]
        if self.random.random() < 0.5:
            body = {"seq": self.state["next_seq"], "epoch": self.state["epoch"], "path": path, "next": after}
            self.told.append(self.post("commit", body)["seq"])
            return
        self.state.update(pending=after, committed_len=before["committed_len"] + len(path))
        body = round_body(self.state, commit_prev={"seq": held["seq"], "path": path, "next": after})
        self.told += [held["seq"], self.post("verify", body)["seq"]]


class EventsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = FixedDaemon("--event-readers-max", "40").__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.caller = Caller(self.daemon)
        self.addCleanup(self.caller.close)

    def test_a_life(self):
        state = self.caller.session()
        stream = follow(self.daemon, state)
        event = stream.next()
        self.assertEqual((event.name, event.id), ("state", 0))
        self.assertEqual(event.data["committed_len"], 3)
        self.assertGreater(stream.retry_ms, 0)
        answer = self.caller.call("POST", verify_path(state), round_body(state, [31, 38, 9], [0, 1, 0])).json
        event = stream.next()
        wanted = {name: answer[name] for name in ("seq", "new_tokens", "pending", "committed_len", "digest", "finish")}
        self.assertEqual((event.name, event.id, event.data), ("commit", 1, dict(wanted, op="verify")))
        body = dict(seq=2, epoch=state["epoch"], expected_len=answer["committed_len"], tokens=[7, 8, 9])
        answer = self.caller.call("POST", f"/v1/sessions/{state['session']}/extend", body).json
        event = stream.next()
        self.assertEqual((event.name, event.id, event.data["op"]), ("commit", 2, "extend"))
        self.assertEqual((event.data["committed_len"], event.data["digest"]), (answer["committed_len"], answer["digest"]))
        self.assertEqual(self.caller.call("DELETE", f"/v1/sessions/{state['session']}").status, 204)
        self.assertEqual(stream.rest(), [("end", None, {"reason": "deleted"})])
        self.assertEqual(refusal(self.daemon, state), (404, "session-not-found"))
        stream.close()

    def test_a_follower_knows_all(self):
        """Many rounds, one stream that stays and one that is lost again and again."""
        rounds = Rounds(self.caller, 3)
        stays, comes = (Follower(PROMPT, rounds.state) for _ in range(2))
        stream = follow(self.daemon, rounds.state)
        self.assertEqual(stream.next().name, "state")
        source, seen = random.Random(4), 0
        for turn in range(sized(60, 2000, 20)):
            rounds.step()
            while stays.last < rounds.told[-1]:
                stays.take(stream.next())
                seen += 1
            self.assertEqual(seen, len(rounds.told))
            if source.random() < 0.2:
                again = follow(self.daemon, rounds.state, comes.last)
                self.assertEqual(again.next().name, "lease")
                while comes.last < rounds.told[-1] and source.random() < 0.97:
                    comes.take(again.next())
                again.close()
            state = self.caller.call("GET", f"/v1/sessions/{rounds.state['session']}?tail=4096").json
            self.assertEqual((state["tail"], state["pending"]), (stays.tokens, stays.pending), turn)
        stream.close()

    def test_who_comes_late_is_told(self):
        """64 events are kept: of 70 the first six are missed, and nothing else."""
        state = self.caller.session()
        for _ in range(70):
            answer = self.caller.call("POST", verify_path(state), round_body(state))
            state.update(answer.json)
        late = follow(self.daemon, state, 0)
        self.assertEqual(late.next().name, "lease")
        self.assertEqual(late.next(), ("missed", 6, {"from": 1, "to": 6}))
        self.assertEqual([late.next().id for _ in range(64)], list(range(7, 71)))
        timely = follow(self.daemon, state, 6)
        self.assertEqual([timely.next().name for _ in range(2)], ["lease", "commit"])
        fresh = follow(self.daemon, state)
        self.assertEqual(fresh.next()[:2], ("state", 70))
        for stream in (late, timely, fresh):
            stream.close()

    def test_forms_that_are_refused(self):
        state = self.caller.session()
        for text in ("", "-1", "+1", "01", "1.0", "x", "2147483648", "1" * 30, "1", "7"):
            self.assertEqual(refusal(self.daemon, state, text), (400, "bad-request"), text)
        self.assertEqual(refusal(self.daemon, state, 0, ["Last-Event-ID: 0"]), (400, "bad-request"))
        target = events_path(state)
        self.assertEqual(self.caller.call("GET", target + "?x=1").status, 400)
        answer = self.caller.call("POST", target, {})
        self.assertEqual((answer.status, answer.headers["allow"]), (405, "GET, HEAD"))
        open_before = numbers(self.daemon)["opened"]
        self.assertEqual(self.caller.call("HEAD", target).status, 200)
        self.assertEqual(numbers(self.daemon)["opened"], open_before)
        other = Caller(self.daemon, admin=True)
        self.assertEqual(other.call("GET", target).code, "not-found")
        other.close()
        # elsewhere the header means nothing
        self.assertEqual(self.caller.call("GET", "/v1/sessions", headers=["Last-Event-ID: x"]).status, 200)

    def test_the_lease_ends_it(self):
        state = self.caller.session(lease_s=600)
        stream = follow(self.daemon, state)
        self.assertEqual(stream.next().name, "state")
        start = time.monotonic()
        self.assertEqual(self.caller.call("POST", f"/v1/sessions/{state['session']}/renew", {"lease_s": 1}).status, 200)
        events = stream.rest()
        self.assertGreaterEqual(time.monotonic() - start, 1.0)  # a stream keeps no session, and ends none
        self.assertEqual([event.name for event in events if event.name != "lease"], ["end"])
        self.assertEqual(events[-1].data, {"reason": "expired"})
        stream.close()

    def test_who_leaves_leaves_nothing(self):
        """Streams that are dropped at any moment while rounds go on: no descriptor, no stream, no round is lost."""
        rounds = Rounds(self.caller, 9)
        wait_until(lambda: numbers(self.daemon)["open"] == 0, 60, "no stream of another test")
        before, source = self.daemon.fds(), random.Random(5)
        total = sized(60, 2000, 12)
        streams = []
        for _ in range(total):
            streams.append(follow(self.daemon, rounds.state, source.choice([None, 0])))
            rounds.step()
            while len(streams) > source.randrange(20):
                stream = streams.pop(source.randrange(len(streams)))
                how = source.randrange(3)
                if how == 0:
                    stream.next()
                elif how == 1:
                    stream.shut()  # a half-close cannot be told from a close
                    try:
                        stream.rest()
                    except ConnectionError:
                        pass
                stream.close()
        for stream in streams:
            stream.close()
        wait_until(lambda: numbers(self.daemon)["open"] == 0, 60, "the streams have ended")
        wait_until(lambda: self.daemon.fds() <= before, 60, "and their descriptors are gone")
        found = numbers(self.daemon)
        self.assertEqual(found["opened"], sum(found["ended"].values()))
        self.assertGreaterEqual(found["ended"]["client"], total)

    def test_many_follow_one(self):
        state = self.caller.session()
        streams = [follow(self.daemon, state) for _ in range(30)]
        for stream in streams:
            self.assertEqual(stream.next().name, "state")
        count = sized(20, 60, 3)  # of 64 that are kept
        for _ in range(count):
            state.update(self.caller.call("POST", verify_path(state), round_body(state)).json)
        for stream in streams:
            self.assertEqual([stream.next().id for _ in range(count)], list(range(1, count + 1)))
            stream.close()


class StopTest(unittest.TestCase):
    def test_a_stop_is_told_and_waits_for_no_stream(self):
        """100 s of grace are there for those in rounds; streams are told, go on, and hold up nothing."""
        with FixedDaemon("--drain-grace-s", "100", "--drain-max-s", "200") as daemon:
            caller, other, probe = Caller(daemon), Caller(daemon), Caller(daemon, admin=True)
            state, running = caller.session(), other.session()
            stream = follow(daemon, state)
            self.assertEqual(stream.next().name, "state")
            launches = daemon.stat()[0]
            daemon.hold()  # a round that runs: the stop waits for it, however slow this test is
            other.sock.sendall(request_bytes("POST", verify_path(running), json.dumps(round_body(running)).encode()))
            wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the round is launched")
            start = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            event = stream.next()
            self.assertEqual((event.name, event.id), ("draining", None))
            caller.sock.sendall(request_bytes("POST", verify_path(state), json.dumps(round_body(state)).encode()))
            wait_until(lambda: "; 1 calls" in probe.call("GET", "/readyz").body.decode(), 60, "one in the grace waits")
            daemon.release()
            for one, its in ((caller, state), (other, running)):
                self.assertEqual(one.reader.answer("POST", verify_path(its)).status, 200)
                one.close()
            probe.close()
            self.assertEqual(stream.next().name, "commit")
            self.assertEqual(stream.rest(), [("end", None, {"reason": "stopping"})])
            self.assertEqual(daemon.stop(), 0)
            self.assertLess(time.monotonic() - start, 60)
            stream.close()

    def test_who_reads_nothing_holds_up_no_stop(self):
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            streams = [follow(daemon, state) for _ in range(8)]
            caller.close()
            daemon.process.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.stop(), 0, daemon.text())
            for stream in streams:
                self.assertEqual([event.name for event in stream.rest()], ["state", "draining", "end"])
                stream.close()


class LimitsTest(unittest.TestCase):
    def test_at_most_so_many(self):
        with FixedDaemon("--event-readers-max", "2", "--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            streams = [follow(daemon, state) for _ in range(2)]
            for _ in range(3):
                self.assertEqual(refusal(daemon, state), (503, "overloaded"))
            streams.pop().close()
            found = []

            def free():
                stream = follow(daemon, state)
                found.append(stream)
                return stream.status == 200

            wait_until(free, 60, "a place is free again")
            for stream in (*streams, *found):
                stream.close()
            caller.close()

    def test_none(self):
        with FixedDaemon("--event-readers-max", "0", "--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            self.assertEqual(refusal(daemon, caller.session()), (503, "overloaded"))
            caller.close()

    def test_of_one_key_half(self):
        secrets = {"alice": "alice-secret-0123456789", "bob": "bob-secret-9876543210"}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "keys")
            with open(path, "w", encoding="ascii") as file:
                file.writelines(f"{name}:verify,metrics:{secret}\n" for name, secret in secrets.items())
            os.chmod(path, 0o600)
            options = ("--api-key-file", path, "--event-readers-max", "4", "--drain-grace-s", "0")
            with FixedDaemon(*options) as daemon:
                caller, streams = Caller(daemon), []
                alice, bob = ([f"Authorization: Bearer {secrets[name]}"] for name in ("alice", "bob"))
                state = caller.call("POST", "/v1/sessions", {"tokens": [1]}, headers=alice).json
                other = caller.call("POST", "/v1/sessions", {"tokens": [1]}, headers=bob).json
                self.assertEqual(refusal(daemon, state), (401, "unauthenticated"))
                self.assertEqual(refusal(daemon, state, headers=bob), (404, "session-not-found"))
                streams += [follow(daemon, state, headers=alice) for _ in range(2)]
                refused = follow(daemon, state, headers=alice)
                self.assertEqual((refused.status, refused.problem["code"]), (429, "rate-limited"))
                self.assertEqual(refused.headers["ratelimit-policy"], '"streams";q=2')
                streams += [follow(daemon, other, headers=bob) for _ in range(2)]
                self.assertEqual([stream.status for stream in streams], [200] * 4)
                self.assertEqual(numbers(daemon, alice)["open"], 4)
                for stream in (*streams, refused):
                    stream.close()
                caller.close()


    def test_a_reload(self):
        """More streams at once; and whose name has gone from the key file is cut, while a new secret changes nothing."""
        with tempfile.TemporaryDirectory() as folder:
            keys, conf = os.path.join(folder, "keys"), os.path.join(folder, "conf")

            def write(names, most):
                with open(keys, "w", encoding="ascii") as file:
                    file.writelines(f"{name}:verify,metrics:{name}-0123456789abcdef{most}\n" for name in names)
                os.chmod(keys, 0o600)
                with open(conf, "w", encoding="ascii") as file:
                    file.write(f"event_readers_max = {most}\n")

            def header(name, most):
                return [f"Authorization: Bearer {name}-0123456789abcdef{most}"]

            write(["alice", "bob"], 2)
            with FixedDaemon("--config", conf, "--api-key-file", keys, "--drain-grace-s", "0") as daemon:
                caller, streams = Caller(daemon), {}
                for name in ("alice", "bob"):
                    answer = caller.call("POST", "/v1/sessions", {"tokens": [1]}, headers=header(name, 2))
                    streams[name] = follow(daemon, answer.json, headers=header(name, 2))
                    self.assertEqual(streams[name].next().name, "state")
                    state = answer.json if name == "alice" else state
                self.assertEqual(refusal(daemon, state, headers=header("alice", 2)), (503, "overloaded"))
                write(["alice"], 4)
                daemon.process.send_signal(signal.SIGHUP)
                with self.assertRaises(ConnectionError):
                    streams["bob"].rest()
                more = follow(daemon, state, headers=header("alice", 4))
                self.assertEqual(more.status, 200)
                answer = caller.call("POST", verify_path(state), round_body(state), headers=header("alice", 4))
                self.assertEqual(answer.status, 200)
                self.assertEqual(streams["alice"].next().name, "commit")
                caller.close()
                for stream in (more, *streams.values()):
                    stream.close()


class SlowTest(unittest.TestCase):
    def setUp(self):
        self.daemon = FixedDaemon("--drain-grace-s", "0", "--max-len", "4096")
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)
        self.caller = Caller(self.daemon)
        self.addCleanup(self.caller.close)

    def deaf(self, state):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect((self.daemon.host, self.daemon.port))
        return Stream(sock, CONTRACT, events_path(state))

    def talk(self, state, rounds):
        """Rounds that have much to tell."""
        path = f"/v1/sessions/{state['session']}"
        for _ in range(rounds):
            head = dict(seq=state["next_seq"], epoch=state["epoch"], expected_len=state["committed_len"])
            if state["committed_len"] > 2000:
                answer = self.caller.call("POST", path + "/rollback", dict(head, len=3))
            else:
                answer = self.caller.call("POST", path + "/decode", dict(head, max_tokens=1000))
            self.assertEqual(answer.status, 200, answer.body)
            state.update(answer.json)

    def silence(self, quiet, renewed):
        """After 10 s: a comment, or where the lease ends now."""
        start = time.monotonic()
        still, moved = follow(self.daemon, quiet), follow(self.daemon, renewed)
        first = moved.next().data["lease_expires_at"]
        still.next()
        self.caller.call("POST", f"/v1/sessions/{renewed['session']}/renew", {"lease_s": 3000})
        event = moved.next()
        self.assertEqual(event.name, "lease")
        self.assertGreater(event.data["lease_expires_at"], first)
        self.assertEqual(still.block(), [":"])
        self.assertGreater(time.monotonic() - start, 9.0)
        still.close()
        moved.close()

    def test_rounds_do_not_wait_for_readers(self):
        """Readers that take nothing, more to tell than any buffer holds: every round is answered, who reads on is told
        all, the others are cut after a while, and one that comes back is told what it has missed."""
        state, quiet, renewed = (self.caller.session(lease_s=lease) for lease in (3600, 600, 600))
        deaf = [self.deaf(state) for _ in range(8)]
        stream, seen, missed = follow(self.daemon, state), [], []

        def read():
            while (event := stream.next()) is not None:
                if event.name == "missed":
                    missed.append(event)
                elif event.id is not None and event.name != "state":
                    seen.append(event.id)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        resident = self.daemon.resident_kib()
        self.talk(state, sized(300, 2000, 130))
        grown = self.daemon.resident_kib() - resident
        last = state["next_seq"] - 1
        wait_until(lambda: seen and seen[-1] == last, 120, "who reads on has the last one")
        lost = sum(event.data["to"] - event.data["from"] + 1 for event in missed)
        self.assertEqual(len(seen) + lost, last)
        found = numbers(self.daemon)
        print(f"{last} rounds; {found}; resident +{grown} KiB")
        self.assertLess(found["told"], len(seen) + 8 * last)  # what the deaf ones are not told of is in nobody's memory
        self.silence(quiet, renewed)
        wait_until(lambda: numbers(self.daemon)["ended"]["slow"] == 8, 120, "who takes nothing is cut")
        back = follow(self.daemon, state, 1)
        self.assertEqual(back.next().name, "lease")
        event = back.next()
        self.assertEqual((event.name, event.data["from"]), ("missed", 2))
        self.assertEqual(back.next().id, event.data["to"] + 1)
        back.close()
        self.caller.call("DELETE", f"/v1/sessions/{state['session']}")
        thread.join(timeout=120)
        self.assertFalse(thread.is_alive())
        for reader in (stream, *deaf):
            reader.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
