"""The status page and what it fetches: the policy fits the bytes, nothing comes from outside, and the numbers are right.

test_status_browser.py shows the page to a browser; this needs none.
"""

import base64
import hashlib
import os
import re
import tempfile
import unittest
from html.parser import HTMLParser

from harness import Caller, FixedDaemon, round_body, verify_path

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(HERE, "..", "..", "daemon", "http", "status.html")
KEYS = "eve:verify:eve-secret-0123456789\nroot:verify,metrics,admin:root-secret-1111111111\n"
VOID = {"meta", "link", "input"}


class Elements(HTMLParser):
    """Every element and its attributes; the text of style and script; that each is closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self.stack = [], {}, []
        self.feed(text)
        self.close()
        assert self.stack == [], self.stack

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("style", "script"):
            self.texts[self.stack[-1]] = self.texts.get(self.stack[-1], "") + data


def status(daemon):
    caller = Caller(daemon, admin=True)
    answer = caller.call("GET", "/v1/admin/status")
    caller.close()
    assert answer.status == 200, answer.body
    return answer.json


class StatusTest(unittest.TestCase):
    def test_page(self):
        """It is the file of the tree, and its policy allows exactly its own style and script."""
        with FixedDaemon() as daemon:
            caller = Caller(daemon, admin=True)
            answer = caller.call("GET", "/")
            self.assertEqual(answer.status, 200)
            with open(PAGE, "rb") as file:
                self.assertEqual(answer.body, file.read())
            head = caller.call("HEAD", "/")
            self.assertEqual((head.status, head.body), (200, b""))
            self.assertEqual(head.headers["content-length"], str(len(answer.body)))
            self.assertEqual(caller.call("POST", "/").code, "method-not-allowed")
            self.assertEqual(caller.call("GET", "/?key=x").code, "bad-request")
            caller.close()
        page = Elements(answer.body.decode())
        policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        for name in ("script", "style"):
            digest = hashlib.sha256(page.texts[name].encode()).digest()
            self.assertEqual(policy.pop(name + "-src"), f"'sha256-{base64.b64encode(digest).decode()}'")
        none = ("default-src", "base-uri", "form-action", "frame-ancestors")
        self.assertEqual(policy, {**dict.fromkeys(none, "'none'"), "connect-src": "'self'", "img-src": "data:"})
        ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
        self.assertEqual(len(ids), len(set(ids)))
        for tag, attributes in page.found:
            self.assertNotIn("style", attributes)
            self.assertEqual([name for name in attributes if name.startswith("on")], [])
            self.assertNotIn("src", attributes)
            self.assertIn(attributes.get("href", "data:,"), ("data:,",))
            for name in ("for", "aria-labelledby"):
                self.assertIn(attributes.get(name, ids[0]), ids)
        used = set(re.findall(r'byId\("([^"]+)"\)', page.texts["script"]))
        made = set(re.findall(r'id: "([^"]+)"', page.texts["script"]))
        self.assertEqual(used - set(ids) - made, set())

    def test_metric_names(self):
        """Every family that the page reads is in a scrape."""
        with open(PAGE, encoding="utf-8") as file:
            names = set(re.findall(r'(?:family|one)\([\w.]+, "(\w+)"\)', file.read()))
        self.assertGreater(len(names), 6)
        with FixedDaemon() as daemon:
            caller = Caller(daemon, admin=True)
            samples = {line.split("{")[0].split(" ")[0] for line in caller.call("GET", "/metrics").body.decode().split("\n")}
            caller.close()
        self.assertEqual({name for name in names if "treeverify_" + name not in samples}, set())

    def test_trees(self):
        """Trees as they were sent, the newest first, with the path that was answered; held and client rounds too."""
        with FixedDaemon() as daemon:
            self.assertEqual(status(daemon)["trees"], [])
            caller, expected = Caller(daemon), []
            states = [caller.session(), caller.session(sampling={"rule": "client"})]
            for number in range(11):
                state = states[number % 2]
                drafts, parents = [7, 9, 11, 13][: 1 + number % 4], [0, 0, 1, 3][: 1 + number % 4]
                fields = {"commit": "hold"} if number % 2 or number == 4 else {}
                body = round_body(state, drafts, parents, **fields)
                answer = caller.call("POST", verify_path(state), body)
                self.assertEqual(answer.status, 200, answer.body)
                answer = answer.json
                is_client = number % 2 == 1
                expected.insert(0, {
                    "session": state["session"], "seq": answer["seq"], "held": answer["status"] == "held",
                    "rule": "client" if is_client else "target_walk", **body["tree"],
                    "accepted": [] if is_client else answer["accepted"]["nodes"], "pending": answer["pending"],
                })
                if answer["status"] == "held":
                    commit = {"seq": answer["next_seq"], "epoch": state["epoch"], "path": [0], "next": 5}
                    done = caller.call("POST", f"/v1/sessions/{state['session']}/commit", commit)
                    self.assertEqual(done.status, 200, done.body)
                    answer = done.json
                state.update({name: answer[name] for name in ("next_seq", "committed_len", "pending")})
            said = status(daemon)
            names = expected[0].keys()
            self.assertEqual([{name: tree[name] for name in names} for tree in said["trees"]], expected[:8])
            again = caller.call("POST", verify_path(states[0]), {})  # refused: no tree
            self.assertEqual(again.status, 400)
            self.assertEqual(status(daemon)["trees"], said["trees"])
            by_id = {session["session"]: session for session in said["sessions"]}
            for state in states:
                session = by_id[state["session"]]
                self.assertEqual(session["committed_len"], state["committed_len"])
                self.assertEqual(session["next_seq"], state["next_seq"])
            self.assertEqual([by_id[state["session"]]["rounds"] for state in states], [6, 5])
            caller.close()

    def test_sessions(self):
        """Those of every key, under its name; the page is open, the status is not."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "keys")
            with open(path, "w") as file:
                file.write(KEYS)
            os.chmod(path, 0o600)
            eve = ("Authorization: Bearer eve-secret-0123456789",)
            root = ("Authorization: Bearer root-secret-1111111111",)
            with FixedDaemon("--api-key-file", path) as daemon:
                caller, admin = Caller(daemon), Caller(daemon, admin=True)
                for headers in (eve, root):
                    self.assertEqual(caller.call("POST", "/v1/sessions", {"tokens": [1]}, headers).status, 201)
                self.assertEqual(admin.call("GET", "/").status, 200)
                self.assertEqual(admin.call("GET", "/v1/admin/status").status, 401)
                self.assertEqual(admin.call("GET", "/v1/admin/status", headers=eve).status, 403)
                said = admin.call("GET", "/v1/admin/status", headers=root).json
                self.assertEqual([session["principal"] for session in said["sessions"]], ["root", "eve"])
                caller.close()
                admin.close()

    def test_many_sessions(self):
        """The ones used last first, and no more than 64."""
        with FixedDaemon() as daemon:
            caller = Caller(daemon)
            states = [caller.session() for _ in range(70)]
            answer = caller.call("POST", verify_path(states[3]), round_body(states[3], [5], [0], commit="hold"))
            self.assertEqual(answer.status, 200)
            said = status(daemon)
            self.assertEqual(said["open_sessions"], 70)
            order = [states[3], *reversed(states[4:]), *reversed(states[:3])][:64]
            self.assertEqual([s["session"] for s in said["sessions"]], [state["session"] for state in order])
            self.assertEqual([s["state"] for s in said["sessions"]], ["held"] + 63 * ["idle"])
            caller.call("DELETE", f"/v1/sessions/{states[3]['session']}")
            said = status(daemon)
            self.assertEqual(said["open_sessions"], 69)
            self.assertNotIn(states[3]["session"], [s["session"] for s in said["sessions"]])
            self.assertEqual(said["trees"][0]["session"], states[3]["session"])  # it was verified, whatever came then
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
