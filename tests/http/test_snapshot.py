"""Sessions over a restart: what is kept, under which epoch, bit for bit; what is refused, and what a kill leaves."""

import datetime
import os
import signal
import stat
import tempfile
import unittest

from harness import Caller, round_body, verify_path, wait_until
from real import MODEL, RealDaemon

PROMPT = [(37 * i + 5) % 250 for i in range(70)]
WANT = {"logits": {"rows": "all", "dtype": "f32"}}
SIZES = ("--page-size", "16", "--pages", "60", "--drain-grace-s", "0", "--snapshot-bytes", str(1 << 30))
KEYS = "alice:verify:alice-secret-0123456789\nbob:verify:bob-secret-0123456789\n"
FILE = "sessions.snapshot"


def round_of(caller, state, headers=()):
    """One round of a small tree, with all its logits; the state goes on."""
    drafts = [(state["pending"] + i) % 250 for i in (1, 2, 3)]
    answer = caller.call("POST", verify_path(state), round_body(state, drafts, [0, 0, 1], want=WANT), headers)
    assert answer.status == 200, answer.body
    state.update({name: answer.json[name] for name in ("pending", "next_seq", "committed_len", "digest")})
    return {name: answer.json[name] for name in ("accepted", "new_tokens", "pending", "digest", "margin", "logits", "seq")}


def seconds_left(state):
    """Of the lease, which is told in whole seconds."""
    end = datetime.datetime.fromisoformat(state["lease_expires_at"].replace("Z", "+00:00"))
    return (end - datetime.datetime.now(datetime.timezone.utc)).total_seconds()


class SnapshotTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.dir = self.folder.name
        self.options = (*SIZES, "--state-dir", self.dir)

    def tearDown(self):
        self.folder.cleanup()

    def path(self, suffix=""):
        return os.path.join(self.dir, FILE + suffix)

    def moved(self, caller, state, headers=()):
        """A call of the old epoch tells where the session is; the client takes that over."""
        answer = caller.call("POST", verify_path(state), round_body(state), headers)
        self.assertEqual((answer.status, answer.code), (409, "epoch-changed"))
        known = answer.json.get("session_state")
        if known is not None:
            self.assertNotEqual(known["epoch"], state["epoch"])
            self.assertEqual(known["session"], state["session"])
            state.update(known)
        return known

    def test_next_rounds_are_those_of_a_daemon_that_never_ended(self):
        keys = os.path.join(self.dir, "keys")
        with open(keys, "w") as out:
            out.write(KEYS)
        os.chmod(keys, 0o600)
        options = (*self.options, "--api-key-file", keys)
        alice, bob = (("Authorization: Bearer " + line.split(":")[2],) for line in KEYS.splitlines())
        create = {"tokens": PROMPT, "sampling": {"temperature": 0.8, "seed": "77"}, "lease_s": 600}
        with RealDaemon(*options) as daemon:
            caller = Caller(daemon)
            state, twin = self.create(caller, alice, **create), self.create(caller, alice, **create)
            other = self.create(caller, alice, **create, cache_salt="other")
            short = self.create(caller, alice, **dict(create, lease_s=1))
            fork = caller.call("POST", f"/v1/sessions/{state['session']}/fork", {"epoch": state["epoch"]}, alice)
            self.assertEqual(fork.status, 201)
            for one in (state, twin, other):
                for _ in range(3):
                    round_of(caller, one, alice)
            kept = f"/v1/sessions/{state['session']}/rounds/{state['next_seq'] - 1}"
            answer = caller.call("GET", kept, headers=alice).body
            unbroken = [round_of(caller, twin, alice) for _ in range(4)]
            before = dict(other)
            caller.close()
        self.assertEqual(sorted(os.listdir(self.dir)), ["keys", FILE])
        self.assertEqual(stat.S_IMODE(os.stat(self.path()).st_mode), 0o600)
        wait_until(lambda: seconds_left(short) < -1, 10, "the lease of a second is over")
        with RealDaemon(*options) as daemon:
            caller = Caller(daemon)
            self.assertEqual(os.listdir(self.dir), ["keys"])
            self.assertIsNone(self.moved(caller, short, alice), "its lease is over")
            self.assertEqual(len(caller.call("GET", "/v1/sessions", headers=alice).json["sessions"]), 4)
            self.assertEqual(caller.call("GET", "/v1/sessions", headers=bob).json["sessions"], [])
            self.assertIsNone(self.moved(caller, state, bob), "another key's session is none")
            known = self.moved(caller, state, alice)
            self.assertEqual((known["next_seq"], known["held_seq"], known["tail"]), (4, None, []))
            self.assertTrue(590 < seconds_left(state) <= 600, state["lease_expires_at"])
            self.assertIsNotNone(self.moved(caller, other, alice))
            same = ("pending", "digest", "committed_len", "session")
            self.assertEqual([other[name] for name in same], [before[name] for name in same])
            self.assertEqual(caller.call("GET", kept, headers=alice).body, answer)
            self.assertEqual([round_of(caller, state, alice) for _ in range(4)], unbroken)
            self.assertEqual(self.create(caller, alice, **create)["cached_len"], 64)
            self.assertEqual(self.create(caller, bob, **create)["cached_len"], 0)
            caller.close()

    def test_held_rounds_and_keys(self):
        """A round that waits for its client, and calls that may have been answered before the end."""
        keyed = [("Idempotency-Key: " + name,) for name in ("c-1", "f-1")]
        create = {"tokens": PROMPT, "sampling": {"temperature": 0.8, "seed": "77"}, "lease_s": 600}
        with RealDaemon(*self.options) as daemon:
            caller = Caller(daemon)
            state, twin = self.create(caller, keyed[0], **create), self.create(caller, (), **create)
            fork = {"epoch": state["epoch"], "len": 40}
            path = f"/v1/sessions/{state['session']}/fork"
            child = caller.call("POST", path, fork, keyed[1]).json
            drafts, parents = [(state["pending"] + i) % 250 for i in range(1, 18)], [0, 0, 1, *range(3, 17)]
            for one in (state, twin):
                body = round_body(one, drafts, parents, commit="hold")
                answer = caller.call("POST", verify_path(one), body)
                self.assertEqual((answer.status, answer.json["status"]), (200, "held"), answer.body)
                one["next_seq"] += 1
            choice = {"path": [0, 1, 3, 4], "next": 9}
            settle = {"seq": 2, "epoch": twin["epoch"], **choice}
            answer = caller.call("POST", f"/v1/sessions/{twin['session']}/commit", settle)
            self.assertEqual(answer.status, 200, answer.body)
            twin.update({name: answer.json[name] for name in ("pending", "next_seq", "committed_len", "digest")})
            unbroken = [round_of(caller, twin) for _ in range(2)]
            caller.close()
        with RealDaemon(*self.options) as daemon:
            caller = Caller(daemon)
            again = caller.call("POST", path, fork, keyed[1])
            self.assertEqual((again.status, again.code), (409, "epoch-changed"))
            known = self.moved(caller, state)
            self.assertEqual((known["held_seq"], known["next_seq"], known["committed_len"]), (1, 2, len(PROMPT)))
            again = self.create(caller, keyed[0], **create)
            self.assertEqual((again["session"], again["epoch"]), (state["session"], state["epoch"]))
            again = caller.call("POST", path, {**fork, "epoch": state["epoch"]}, keyed[1])
            self.assertEqual((again.status, again.json["session"]), (201, child["session"]))
            self.assertEqual(len(caller.call("GET", "/v1/sessions").json["sessions"]), 3)
            refused = caller.call("POST", verify_path(state), round_body(state))
            self.assertEqual((refused.status, refused.code, refused.json["committed"]), (409, "round-held", False))
            settle = {"seq": 2, "epoch": state["epoch"], **choice}
            answer = caller.call("POST", f"/v1/sessions/{state['session']}/commit", settle)
            self.assertEqual(answer.status, 200, answer.body)
            state.update({name: answer.json[name] for name in ("pending", "next_seq", "committed_len", "digest")})
            self.assertEqual([round_of(caller, state) for _ in range(2)], unbroken)
            caller.close()

    @staticmethod
    def create(caller, key, **fields):
        answer = caller.call("POST", "/v1/sessions", fields, key)
        assert answer.status == 201, answer.body
        return answer.json

    def stopped_with_sessions(self, *options, count=1):
        with RealDaemon(*self.options, *options) as daemon:
            caller = Caller(daemon)
            states = [caller.session(tokens=[i + 1, *PROMPT], lease_s=600) for i in range(count)]
            caller.close()
            self.assertEqual(daemon.stop(), 0)
            return states, daemon.text()

    def test_what_does_not_fit(self):
        """Another page size, and a limit of the file's bytes."""
        (state,), _ = self.stopped_with_sessions()
        size = os.path.getsize(self.path())
        with RealDaemon(*self.options, "--page-size", "32") as daemon:
            self.assertIn("its page_size is 16, here it is 32", daemon.text())
            caller = Caller(daemon)
            self.assertIsNone(self.moved(caller, state))
            caller.close()
        self.assertEqual(os.listdir(self.dir), [FILE + ".refused"])
        self.options = (*SIZES[:-1], str(2 * size), "--state-dir", self.dir)
        states, log = self.stopped_with_sessions(count=3)
        self.assertIn(f"session {states[0]['session']} of 71 tokens is not kept: it does not fit into snapshot_bytes", log)
        self.assertIn("2 sessions are kept for the next start", log)
        self.assertTrue(size < os.path.getsize(self.path()) <= 2 * size)

    def test_a_kill_leaves_nothing_that_is_read(self):
        states, _ = self.stopped_with_sessions(count=2)
        with open(self.path(), "rb") as file:
            whole = file.read()
        with open(self.path(".new"), "wb") as file:
            file.write(whole[: len(whole) // 2])  # a stop that was cut
        daemon = RealDaemon(*self.options).__enter__()
        caller = Caller(daemon)
        for state in states:
            self.assertIsNotNone(self.moved(caller, state))
            round_of(caller, state)
        metrics = caller.call("GET", "/metrics").body.decode()
        self.assertIn("\ntreeverify_sessions_restored_total 2\n", metrics)
        self.assertIn("\ntreeverify_sessions_not_restored_total 0\n", metrics)
        caller.close()
        self.assertEqual(os.listdir(self.dir), [])
        with RealDaemon(*self.options) as second:
            self.assertIn("another process keeps its sessions there", second.text())
        self.assertEqual(daemon.stop(signal.SIGKILL), -signal.SIGKILL)
        daemon.process.stdin.close()
        daemon.log.close()
        with open(self.path(".reading"), "wb") as file:
            file.write(whole)  # a start that was cut in the middle of it
        with RealDaemon(*self.options) as daemon:
            self.assertIn("an earlier start did not come to the end of it", daemon.text())
            caller = Caller(daemon)
            self.assertIsNone(self.moved(caller, states[0]), "an older state of it must not come back")
            caller.close()
        self.assertEqual(os.listdir(self.dir), [FILE + ".refused"])

    def test_a_kill_while_it_is_written(self):
        """Each session whole or not at all, whenever it comes: those that were written by then."""
        daemon = RealDaemon(*self.options).__enter__()
        caller = Caller(daemon)
        states = [caller.session(tokens=[i + 1, *PROMPT], lease_s=600) for i in range(10)]
        caller.close()
        daemon.process.send_signal(signal.SIGTERM)
        while not os.listdir(self.dir) and daemon.process.poll() is None:
            pass  # the file is begun within its stop's limit
        daemon.process.kill()
        daemon.process.wait(timeout=60)
        for stream in (daemon.process.stdin, daemon.process.stdout, daemon.log):
            stream.close()
        whole = os.path.exists(self.path())
        self.assertNotEqual(os.path.exists(self.path(".new")), whole)
        with RealDaemon(*self.options) as daemon:
            self.assertEqual(os.listdir(self.dir), [])
            self.assertNotIn("error", daemon.text())
            caller = Caller(daemon)
            there = [self.moved(caller, state) is not None for state in states]
            self.assertEqual(there, sorted(there), "those used last are written first")
            self.assertTrue(all(there) or not whole)
            caller.close()

    def test_the_longest_session(self):
        """Up to the last position that the checkpoint has."""
        limit = 4096
        options = ("--state-dir", self.dir, "--drain-grace-s", "0", "--pages", "70", "--snapshot-bytes", str(1 << 30))
        small = os.path.join(os.path.dirname(MODEL), "v2lite")
        with RealDaemon(*options, model=small) as daemon:
            caller = Caller(daemon)
            state = caller.session(tokens=[i % 250 for i in range(limit - 2)], lease_s=600)
            caller.close()
        with RealDaemon(*options, model=small) as daemon:
            caller = Caller(daemon)
            self.assertEqual(self.moved(caller, state)["committed_len"], limit - 2)
            answer = caller.call("POST", verify_path(state), round_body(state))
            self.assertEqual((answer.status, answer.json["finish"]), (200, "length"), answer.body)
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
