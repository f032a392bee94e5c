"""Bearer keys: who may call what, whose sessions they are, and what a reload does.

A daemon with keys denies by default: every path is tried without a key, with a wrong one, and with each scope.
"""

import os
import signal
import subprocess
import tempfile
import unittest

from harness import CONTRACT, Caller, FixedDaemon, Reader, request_bytes, round_body, sized, verify_path, wait_until
from metrics import parse

SECRETS = {
    "alice": "alice-secret-0123456789",
    "bob": "bob-secret-9876543210",
    "meter": "meter-secret-000000000",
    "root": "root-secret-1111111111",
}
SCOPES = {"alice": "verify", "bob": "verify", "meter": "metrics", "root": "verify,metrics,admin"}
OPEN = ("/healthz", "/livez", "/health", "/v1/health", "/v2/health/live", "/readyz", "/v2/health/ready", "/")
ADMIN_ONLY = ("/", "/v1/admin/status", "/v1/admin/drain", "/v1/admin/undrain")


def key_text(**more):
    lines = ["# name:scopes:secret", ""]
    lines += [f"{name}:{SCOPES[name]}:{secret}" for name, secret in SECRETS.items()]
    lines += [f"{name.rstrip('_')}:{SCOPES[name.rstrip('_')]}:{secret}" for name, secret in more.items()]
    return "\n".join(lines) + "\n"


class Keyed(Caller):
    """A caller with a secret; every 401 must name the scheme."""

    def __init__(self, daemon, secret, admin=False):
        super().__init__(daemon, admin)
        self.headers = () if secret is None else (f"Authorization: Bearer {secret}",)

    def call(self, method, target, body=None, headers=(), check=True):
        answer = super().call(method, target, body, (*self.headers, *headers), check)
        assert (answer.status == 401) == ("www-authenticate" in answer.headers), answer.headers
        return answer


class KeysTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "keys")
        self.write(key_text())

    def write(self, text):
        """As an operator should: the new file takes the old one's place at once."""
        with open(self.path + ".new", "w") as file:
            file.write(text)
        os.chmod(self.path + ".new", 0o600)
        os.replace(self.path + ".new", self.path)

    def daemon(self, *options):
        return FixedDaemon("--api-key-file", self.path, *options)

    def once(self, daemon, secret, method, target, body=None, admin=False):
        caller = Keyed(daemon, secret, admin)
        answer = caller.call(method, target, body, check=target != "/v1/model")
        caller.close()
        return answer

    def operations(self):
        for path, item in CONTRACT.document["paths"].items():
            for method in item:
                if method in ("get", "post", "delete"):
                    target = path.replace("{id}", "s_0123456789abcdefghijAB").replace("{seq}", "1").replace("{n}", "1")
                    yield method.upper(), path, target

    def scope_of(self, path):
        if path in OPEN:
            return None
        if path.startswith("/v1/admin/"):
            return "admin"
        return {"/metrics": "metrics", "/v1/parity/violations/{n}": "admin"}.get(path, "verify")

    def test_every_path(self):
        with self.daemon() as daemon:
            tried = 0
            for method, path, target in self.operations():
                body = {} if method == "POST" and not path.startswith("/v1/admin/") else None
                scope = self.scope_of(path)
                for admin in (False, True):
                    for name in (None, "nobody", *SECRETS):
                        secret = "no-secret-of-anybody" if name == "nobody" else SECRETS.get(name)
                        answer = self.once(daemon, secret, method, target, body, admin)
                        hidden = path.startswith(("/v1/sessions", "/v1/verify", "/v1/score")) if admin else path in ADMIN_ONLY
                        routed = not hidden
                        where = (method, path, admin, name, answer.body)
                        if scope is None and routed:
                            self.assertEqual(answer.status, 200, where)
                        elif name in (None, "nobody"):
                            self.assertEqual((answer.status, answer.code), (401, "unauthenticated"), where)
                        elif not routed:
                            self.assertEqual(answer.code, "not-found", where)
                        elif scope not in SCOPES[name].split(","):
                            self.assertEqual((answer.status, answer.code), (403, "forbidden"), where)
                        else:
                            self.assertNotIn(answer.status, (401, 403), where)
                        tried += 1
            self.assertGreater(tried, 200)
            for target in ("/", "/v1/nothing", "/v1/admin/drain"):
                self.assertEqual(self.once(daemon, None, "GET", target).code, "unauthenticated")
                self.assertEqual(self.once(daemon, SECRETS["alice"], "GET", target).code, "not-found")
            self.assertEqual(self.once(daemon, None, "DELETE", "/healthz").code, "unauthenticated")

    def test_schemes_and_forms(self):
        alice = SECRETS["alice"]
        with self.daemon() as daemon:
            caller = Caller(daemon)
            for header, status in (
                (f"Authorization: Bearer {alice}", 200),
                (f"authorization: bearer   {alice}", 200),
                (f"Authorization: {alice}", 401),
                (f"Authorization: Basic {alice}", 401),
                ("Authorization: Bearer", 401),
                ("Authorization: Bearer ", 401),
                (f"Authorization: Bearer {alice}x", 401),
                (f"Authorization: Bearer {alice[:-1]}", 401),
                (f"Authorization: Bearer {alice} {alice}", 401),
                (f"Authorization: Bearer {alice.upper()}", 401),
                (f"Authorization: Bearer {'x' * 257}", 401),
                (f"Authorization: Bearer {'x' * 8000}", 401),
                (f"X-Authorization: Bearer {alice}", 401),
            ):
                self.assertEqual(caller.call("GET", "/v1/sessions", headers=(header,)).status, status, header)
            twice = (f"Authorization: Bearer {alice}", f"Authorization: Bearer {alice}")
            self.assertEqual(caller.call("GET", "/v1/sessions", headers=twice).code, "bad-request")
            caller.close()

    def test_refused_before_the_body(self):
        """Who has no key is told so before anything of his body is read, and the connection ends."""
        with self.daemon() as daemon:
            sock = daemon.connect()
            sock.sendall(request_bytes("POST", "/v1/sessions", b"x" * 1000000)[:2000])
            answer = Reader(sock).answer("POST", "/v1/sessions")
            self.assertEqual((answer.status, answer.code), (401, "unauthenticated"))
            self.assertIn("www-authenticate", answer.headers)
            sock.close()

    def test_sessions_belong_to_a_name(self):
        with self.daemon() as daemon:
            alice, bob = Keyed(daemon, SECRETS["alice"]), Keyed(daemon, SECRETS["bob"])
            state = alice.session()
            path = f"/v1/sessions/{state['session']}"
            head = {"seq": 1, "epoch": state["epoch"], "expected_len": state["committed_len"]}
            never = "/v1/sessions/s_0123456789abcdefghijAB"
            for method, what, body in (
                ("GET", "", None),
                ("POST", "/verify", round_body(state)),
                ("POST", "/decode", dict(head, max_tokens=1)),
                ("POST", "/fork", {"epoch": state["epoch"], "len": 3}),
                ("POST", "/renew", {"lease_s": 5}),
                ("GET", "/rounds/1", None),
                ("GET", "/rounds/1/tensor", None),
            ):
                theirs, none = bob.call(method, path + what, body), bob.call(method, never + what, body)
                self.assertEqual((theirs.status, theirs.code), (404, "session-not-found"), (what, theirs.body))
                mask = lambda answer: dict(answer.json, instance="")
                self.assertEqual(mask(theirs), mask(none))  # no oracle for ids
            self.assertEqual(bob.call("DELETE", path).status, 204)
            self.assertEqual(bob.call("GET", "/v1/sessions").json["sessions"], [])
            self.assertEqual(alice.call("GET", path).status, 200)
            self.assertEqual(alice.call("POST", verify_path(state), round_body(state)).status, 200)
            alice.close()
            bob.close()

    def reloaded(self, daemon, wanted):
        root = Keyed(daemon, SECRETS["root"])

        def count():
            text = root.call("GET", "/metrics").body.decode()
            return parse(text)["treeverify_config_reloads_total"].by("result")

        wait_until(lambda: count() == wanted, 60, wanted)
        root.close()

    def test_f14_rotation_and_broken_file(self):
        """A new key of a name reaches its sessions; a broken file changes nothing; an old key ends."""
        fresh = "alice-second-secret-42"
        with self.daemon() as daemon:
            alice = Keyed(daemon, SECRETS["alice"])
            state = alice.session()
            self.write(key_text(alice_=fresh))
            daemon.process.send_signal(signal.SIGHUP)
            self.reloaded(daemon, {"done": 1, "failed": 0})
            second = Keyed(daemon, fresh)
            for caller in (alice, second):
                answer = caller.call("POST", verify_path(state), round_body(state))
                self.assertEqual(answer.status, 200)
                state.update(answer.json)
            failed = 0
            for text in ("", "alice:verify:short\n", key_text() + "broken\n"):
                self.write(text)
                daemon.process.send_signal(signal.SIGHUP)
                failed += 1
                self.reloaded(daemon, {"done": 1, "failed": failed})
                self.assertEqual(second.call("GET", "/v1/sessions").status, 200)
            self.assertEqual(daemon.text().count("everything stays as it was"), failed)
            os.unlink(self.path)
            daemon.process.send_signal(signal.SIGHUP)
            self.reloaded(daemon, {"done": 1, "failed": failed + 1})
            self.write(key_text().replace(SECRETS["alice"], fresh))
            daemon.process.send_signal(signal.SIGHUP)
            self.reloaded(daemon, {"done": 2, "failed": failed + 1})
            self.assertEqual(alice.call("GET", "/v1/sessions").status, 401)
            self.assertEqual(second.call("POST", verify_path(state), round_body(state)).status, 200)
            for secret in (*SECRETS.values(), fresh):
                self.assertNotIn(secret, daemon.text())
            alice.close()
            second.close()

    def test_f41_storm(self):
        """Many reloads under calls: no descriptor more, no call lost, the last file in force."""
        with self.daemon() as daemon:
            alice = Keyed(daemon, SECRETS["alice"])
            self.assertEqual(alice.call("GET", "/v1/sessions").status, 200)
            before = daemon.fds()
            for _ in range(sized(100, 1000, 10)):
                daemon.process.send_signal(signal.SIGHUP)
                self.assertEqual(alice.call("GET", "/v1/sessions").status, 200)
            wait_until(lambda: daemon.fds() == before, 60, "no descriptor more")
            self.write(key_text().replace(SECRETS["bob"], "bob-another-secret-77"))
            daemon.process.send_signal(signal.SIGHUP)
            gone = lambda: self.once(daemon, SECRETS["bob"], "GET", "/v1/sessions").status == 401
            wait_until(gone, 60, "bob's old key is gone")
            alice.close()

    def start_fails(self, *options, code=78):
        command = [os.environ["TREEVERIFYD"], "--model", "m", "--check-config", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def test_f15_f16_files(self):
        """Never a start without the keys that were asked for; no message quotes a secret."""
        good = "alice:verify:alice-secret-0123456789"
        for text, says in (
            (None, "No such file"),
            ("", "it has no key"),
            ("# nothing\n\n", "it has no key"),
            ("alice:verify\n", "line 1"),
            (":verify:alice-secret-0123456789\n", "line 1"),
            ("al ice:verify:alice-secret-0123456789\n", "line 1"),
            ("a" * 33 + ":verify:alice-secret-0123456789\n", "line 1"),
            ("alice::alice-secret-0123456789\n", "line 1"),
            ("alice:verify,:alice-secret-0123456789\n", "line 1"),
            ("alice:verify,verify:alice-secret-0123456789\n", "line 1"),
            ("alice:write:alice-secret-0123456789\n", "line 1"),
            ("alice:verify:alice-secret-0\n".replace("-0", ""), "line 1"),
            ("alice:verify:alice secret 0123456789\n", "line 1"),
            ("alice:verify:alice:secret-0123456789\n", "line 1"),
            ("alice:verify:" + "x" * 257 + "\n", "line 1"),
            (good + "\nbob:verify:alice-secret-0123456789\n", "line 2"),
            (good + "\n" + "x" * 600 + "\n", "line 2"),
            (good + "\0\n", "line 1"),
        ):
            if text is None:
                os.unlink(self.path)
            else:
                self.write(text)
            error = self.start_fails("--api-key-file", self.path)
            self.assertIn(says, error, (text, error))
            self.assertNotIn("alice-secret", error)
        for text in (good, good + "\n", "# note\r\n" + good + "\r\n", good + "\nalice:metrics:alice-secret-other-one\n"):
            self.write(text)
            self.start_fails("--api-key-file", self.path, code=0)
        os.chmod(self.path, 0o644)
        self.assertIn("others may read", self.start_fails("--api-key-file", self.path, code=0))

    def test_other_addresses_need_keys(self):
        self.assertIn("api_key_file", self.start_fails("--listen", "0.0.0.0:0"))
        self.assertIn("api_key_file", self.start_fails("--listen-admin", "0.0.0.0:0"))
        self.start_fails("--listen", "0.0.0.0:0", "--api-key-file", self.path, code=0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
