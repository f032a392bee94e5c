"""POST /v1/admin/drain and undrain: what goes on, what is refused, who may, and what a stop makes of it."""

import json
import os
import signal
import tempfile
import unittest

from harness import Caller, FixedDaemon, request_bytes, round_body, verify_path, wait_until

NEW = (
    ("/v1/sessions", {"tokens": [1, 2, 3]}),
    ("/v1/verify", {"tokens": [1], "tree": {"tokens": [2], "parents": [-1]}}),
    ("/v1/score", {"tokens": [1], "tree": {"tokens": [2], "parents": [-1]}}),
)


class DrainTest(unittest.TestCase):
    def ready(self, admin):
        answer = admin.call("GET", "/readyz")
        check = next(check for check in answer.json["checks"] if check["name"] == "draining")
        self.assertEqual(answer.status == 200, check["ok"])
        return check["ok"]

    def test_open_sessions_go_on_and_others_go_elsewhere(self):
        with FixedDaemon() as daemon:
            caller, admin = Caller(daemon), Caller(daemon, admin=True)
            state, running = caller.session(), caller.session()
            again = ("Idempotency-Key: before",)
            kept = caller.call("POST", "/v1/sessions", {"tokens": [7]}, again)
            daemon.hold()
            launches = daemon.stat()[0]
            other = Caller(daemon)
            body = json.dumps(round_body(running)).encode()
            other.call("GET", "/healthz")
            other.sock.sendall(request_bytes("POST", verify_path(running), body))
            wait_until(lambda: daemon.stat()[0] == launches + 1, 10, "the round is launched")
            answer = admin.call("POST", "/v1/admin/drain")
            self.assertEqual((answer.status, answer.json), (200, {"draining": True, "sessions": 3, "in_flight": 1}))
            self.assertFalse(self.ready(admin))
            self.assertEqual(admin.call("GET", "/healthz").status, 200)
            daemon.release()
            self.assertEqual(other.reader.answer("POST", verify_path(running)).status, 200)
            for path, fields in (*NEW, (f"/v1/sessions/{state['session']}/fork", {"epoch": state["epoch"]})):
                refused = caller.call("POST", path, fields)
                self.assertEqual((refused.status, refused.code), (503, "draining"), path)
                self.assertEqual(refused.headers["content-type"], "application/problem+json")
                self.assertEqual(refused.headers["retry-after"], "10")
                self.assertEqual((refused.json["committed"], refused.json["retryable"]), (False, True))
            for _ in range(2):
                done = caller.call("POST", verify_path(state), round_body(state))
                self.assertEqual(done.status, 200)
                state.update(done.json)
            self.assertEqual(caller.call("POST", f"/v1/sessions/{state['session']}/renew", {"lease_s": 60}).status, 200)
            scored = {"session": state["session"], "tree": {"tokens": [state["pending"]], "parents": [-1]}}
            self.assertEqual(caller.call("POST", "/v1/score", scored).status, 200)
            self.assertEqual(caller.call("POST", "/v1/sessions", {"tokens": [7]}, again).body, kept.body)
            self.assertEqual(caller.call("DELETE", f"/v1/sessions/{running['session']}").status, 204)
            repeated = admin.call("POST", "/v1/admin/drain")
            self.assertEqual(repeated.json, {"draining": True, "sessions": 2, "in_flight": 0})
            self.assertEqual(daemon.text().count("no new session is taken"), 1)
            for _ in range(2):
                answer = admin.call("POST", "/v1/admin/undrain")
                self.assertEqual((answer.status, answer.json["draining"]), (200, False))
            self.assertTrue(self.ready(admin))
            for path, fields in NEW:
                self.assertIn(caller.call("POST", path, fields).status, (200, 201), path)
            for one in (caller, admin, other):
                one.close()

    def test_form(self):
        with FixedDaemon() as daemon:
            caller, admin = Caller(daemon), Caller(daemon, admin=True)
            for path in ("/v1/admin/drain", "/v1/admin/undrain"):
                self.assertEqual(caller.call("POST", path).code, "not-found")
                self.assertEqual(admin.call("GET", path).status, 405)
                self.assertEqual(admin.call("POST", path, {}).code, "bad-request")
            self.assertTrue(self.ready(admin))
            for one in (caller, admin):
                one.close()

    def test_scope(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = os.path.join(folder, "keys")
            with open(keys, "w") as out:
                out.write("root:admin:root-secret-0123456789\nalice:verify:alice-secret-0123456789\n")
            os.chmod(keys, 0o600)
            with FixedDaemon("--api-key-file", keys) as daemon:
                admin = Caller(daemon, admin=True)
                for secret, status in ((None, 401), ("alice-secret-0123456789", 403), ("root-secret-0123456789", 200)):
                    headers = () if secret is None else (f"Authorization: Bearer {secret}",)
                    self.assertTrue(self.ready(admin))
                    self.assertEqual(admin.call("POST", "/v1/admin/drain", headers=headers).status, status)
                self.assertFalse(self.ready(admin))
                self.assertIn("drain by root", daemon.text())
                admin.close()

    def test_a_stop_is_not_taken_back(self):
        with FixedDaemon("--drain-grace-s", "30") as daemon:
            admin, other = Caller(daemon, admin=True), Caller(daemon)
            state = other.session()
            daemon.hold()
            launches = daemon.stat()[0]
            other.sock.sendall(request_bytes("POST", verify_path(state), json.dumps(round_body(state)).encode()))
            wait_until(lambda: daemon.stat()[0] == launches + 1, 10, "the round is launched")
            daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not self.ready(admin), 10, "readiness fails")
            refused = admin.call("POST", "/v1/admin/undrain")
            self.assertEqual((refused.status, refused.code), (503, "draining"))
            self.assertFalse(self.ready(admin))
            daemon.release()
            self.assertEqual(other.reader.answer("POST", verify_path(state)).status, 200)
            for one in (admin, other):
                one.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
