"""SIGHUP: which settings of a running daemon change, all of them together or none; what waits for a restart.

A reload that finds anything wrong in the file, a drop-in or the keys changes nothing, is counted and logged.
"""

import os
import signal
import tempfile
import unittest

from harness import Caller, FixedDaemon, sized, wait_until
from metrics import parse

KEYS = "alice:verify,metrics:alice-secret-0123456789\nbob:verify:bob-secret-0123456789\n"
ALICE = ("Authorization: Bearer alice-secret-0123456789",)
BOB = ("Authorization: Bearer bob-secret-0123456789",)


class ReloadTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path, self.keys = os.path.join(folder.name, "d.conf"), os.path.join(folder.name, "keys")
        os.mkdir(self.path + ".d")
        self.write(self.path, "")
        self.write(self.keys, KEYS)

    def write(self, path, text):
        with open(path + ".new", "w") as file:
            file.write(text)
        os.chmod(path + ".new", 0o600)
        os.replace(path + ".new", path)

    def daemon(self, *options, env=None):
        return FixedDaemon("--config", self.path, "--api-key-file", self.keys, *options, env=env)

    def reload(self, daemon, done=0, failed=0):
        """Until the daemon has counted this one; both numbers are since its start."""
        caller = Caller(daemon, admin=True)

        def seen():
            text = caller.call("GET", "/metrics", headers=ALICE).body.decode()
            return parse(text)["treeverify_config_reloads_total"].by("result") == {"done": done, "failed": failed}

        daemon.process.send_signal(signal.SIGHUP)
        wait_until(seen, 60, (done, failed))
        caller.close()

    def create(self, daemon, headers=ALICE):
        caller = Caller(daemon)
        answer = caller.call("POST", "/v1/sessions", {"tokens": [1, 2, 3]}, headers)
        caller.close()
        return answer

    def test_limits_change(self):
        """Both ways, for a principal and for all; sessions above a new limit stay."""
        with self.daemon() as daemon:
            first = [self.create(daemon) for _ in range(3)]
            self.assertEqual([answer.status for answer in first], [201] * 3)
            self.write(self.path, "principal_sessions = 3\n")
            self.reload(daemon, 1)
            refused = self.create(daemon)
            self.assertEqual((refused.status, refused.code), (429, "rate-limited"))
            self.assertIn('"sessions";q=3', refused.headers["ratelimit-policy"])
            self.assertEqual(self.create(daemon, BOB).status, 201)
            self.write(os.path.join(self.path + ".d", "10-more.conf"), "principal_sessions = 4\nmax_sessions = 5\n")
            self.reload(daemon, 2)
            self.assertEqual(self.create(daemon).status, 201)
            refused = self.create(daemon, BOB)
            self.assertEqual((refused.status, refused.code), (429, "rate-limited"))
            self.write(os.path.join(self.path + ".d", "10-more.conf"), "max_sessions = 1000\n")
            self.write(self.path, "")
            self.reload(daemon, 3)
            answers = [self.create(daemon, who) for who in (ALICE, BOB)]
            self.assertEqual([answer.status for answer in answers], [201, 201])
            caller = Caller(daemon)
            model = caller.call("GET", "/v1/model", headers=ALICE, check=False).json
            self.assertEqual(model["limits"]["max_sessions"], 1000)
            for answer in first:
                path = f"/v1/sessions/{answer.json['session']}"
                self.assertEqual(caller.call("GET", path, headers=ALICE).status, 200)
            caller.close()
            self.assertNotIn("waits for a restart", daemon.text())

    def test_log_level(self):
        with self.daemon() as daemon:
            self.create(daemon)
            self.assertNotIn("<7>", daemon.text())
            self.write(self.path, "log_level = debug\n")
            self.reload(daemon, 1)
            self.create(daemon)
            wait_until(lambda: "<7>debug: http: request" in daemon.text(), 60, "lines of requests")
            self.write(self.path, "log_level = error\n")
            self.reload(daemon, 2)
            before = len(daemon.text())
            self.create(daemon)
            self.reload(daemon, 3)
            # the probes of the second reload may have been under way when the level changed
            self.assertNotIn("<6>", daemon.text()[before:])

    def test_drain_times(self):
        """A stop takes the times of the newest file."""
        self.write(self.path, "drain_grace_s = 100\ndrain_max_s = 200\n")
        with self.daemon() as daemon:
            self.write(self.path, "drain_grace_s = 0\ndrain_max_s = 50\n")
            self.reload(daemon, 1)
            caller = Caller(daemon)
            caller.call("GET", "/v1/sessions", headers=ALICE)
            self.assertEqual(daemon.stop(), 0)
            caller.close()
            self.assertIn("new work is refused in 0 s at the latest", daemon.text())

    def test_higher_rank_wins(self):
        """The command line and the environment mean at a reload what they meant at the start."""
        with self.daemon("--principal-sessions", "2", env={"TREEVERIFY_LOG_LEVEL": "info"}) as daemon:
            self.write(self.path, "principal_sessions = 1\nlog_level = debug\n")
            self.reload(daemon, 1)
            self.assertEqual([self.create(daemon).status for _ in range(3)], [201, 201, 429])
            self.assertNotIn("<7>", daemon.text())

    def test_what_waits(self):
        with self.daemon() as daemon:
            self.write(self.path, "max_nodes = 17\nhttp_threads = 3\nprincipal_sessions = 1\n")
            self.reload(daemon, 1)
            wait_until(lambda: "max_nodes, http_threads changed too" in daemon.text(), 60, "it is said")
            answer = self.create(daemon)
            self.assertEqual((answer.status, answer.json["limits"]["max_nodes"]), (201, 256))
            self.assertEqual(self.create(daemon).status, 429)  # what can change has changed

    def test_f14_anything_wrong_changes_nothing(self):
        good = "principal_sessions = 2\n"
        self.write(self.path, good)
        dropin = os.path.join(self.path + ".d", "10-x.conf")
        failed = 0
        with self.daemon() as daemon:
            for path, text in (
                (self.path, "principal_sessions = 5\nno_such_key = 1\n"),
                (self.path, "principal_sessions = five\n"),
                (self.path, "principal_sessions = 5\nprincipal_sessions = 5\n"),
                (self.path, "principal_sessions = 5\ndrain_grace_s = 100\n"),
                (self.path, "principal_sessions = 5\n[other]\nx = 1\n"),
                (self.path, None),
                (dropin, "principal_sessions = 5\nlog_level = loud\n"),
                (self.keys, ""),
                (self.keys, None),
            ):
                if text is None:
                    os.unlink(path)
                else:
                    self.write(path, text)
                if path == self.keys:
                    self.write(self.path, "principal_sessions = 5\n")  # good, and still not taken
                failed += 1
                self.reload(daemon, 0, failed)
                if path == dropin:
                    os.unlink(dropin)
                else:
                    self.write(path, KEYS if path == self.keys else good)
            self.assertEqual(daemon.text().count("everything stays as it was"), failed)
            self.assertEqual([self.create(daemon).status for _ in range(3)], [201, 201, 429])
            self.write(self.path, "principal_sessions = 3\n")
            self.reload(daemon, 1, failed)
            self.assertEqual([self.create(daemon).status for _ in range(2)], [201, 429])

    def test_f41_storm_of_files(self):
        """Files change under calls: no descriptor more, every call answered by the old rule or the new one."""
        with self.daemon() as daemon:
            caller = Caller(daemon)
            self.assertEqual(caller.call("GET", "/v1/sessions", headers=ALICE).status, 200)
            before = daemon.fds()
            for i in range(sized(100, 1000, 10)):
                limit = 1 + i % 2
                self.write(self.path, f"principal_sessions = {limit}\nqueue_max = {100 + i}\n" + "x = 1\n" * (i % 5 == 4))
                daemon.process.send_signal(signal.SIGHUP)
                answer = caller.call("POST", "/v1/sessions", {"tokens": [1]}, ALICE)
                self.assertIn(answer.status, (201, 429))
                if answer.status == 201:
                    path = f"/v1/sessions/{answer.json['session']}"
                    self.assertEqual(caller.call("DELETE", path, headers=ALICE).status, 204)
            wait_until(lambda: daemon.fds() <= before, 60, "no descriptor more")
            self.write(self.path, "principal_sessions = 7\n")
            caller.close()
            daemon.process.send_signal(signal.SIGHUP)

            def last_one():
                answer = self.create(daemon)
                return answer.status == 429 and "q=7" in answer.headers["ratelimit-policy"]

            wait_until(last_one, 60, "the last file is in force")


if __name__ == "__main__":
    unittest.main(verbosity=1)
