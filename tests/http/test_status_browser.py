"""The status page in headless Chromium: what it shows, with and without a key, on a phone, in the dark.

Pictures are kept in TV_SHOTS. Exit 77 with the reason where the browser is not installed, or shows not even an empty page.
"""

import os
import sys
import tempfile
import unittest

from harness import Caller, FixedDaemon, round_body, verify_path, wait_until
from real import RealDaemon
from test_planted import PlantedDaemon
from webdriver import Browser, Failed, Missing

SHOTS = os.environ.get("TV_SHOTS", "")
SECRET = "root-secret-1111111111"
KEYS = f"meter:metrics:meter-secret-000000000\nroot:verify,metrics,admin:{SECRET}\n"

# Every text's colour against the nearest background behind it, as WCAG counts contrast.
CONTRASTS = """
const part = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = (rgb) => 0.2126 * part(rgb[0] / 255) + 0.7152 * part(rgb[1] / 255) + 0.0722 * part(rgb[2] / 255);
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const found = [];
for (const node of document.querySelectorAll("h1, h2, p, li, span, th, td, caption, a, strong, code, label, button, select")) {
  if (node.textContent.trim() === "" || node.offsetParent === null) continue;
  let behind = node;
  while (behind !== null && (rgb(getComputedStyle(behind).backgroundColor)[3] === 0)) behind = behind.parentElement;
  const back = behind === null ? [255, 255, 255] : rgb(getComputedStyle(behind).backgroundColor);
  const [high, low] = [light(rgb(getComputedStyle(node).color)), light(back)].sort((a, b) => b - a);
  found.push([(high + 0.05) / (low + 0.05), node.tagName + " " + node.textContent.trim().slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]);
"""
# What the accessibility tree calls names: controls and pictures without one.
NAMELESS = """
const bad = [];
for (const node of document.querySelectorAll("input, select, svg, section, button, a, [role=img], [role=group]")) {
  const by = node.getAttribute("aria-labelledby");
  const name = node.getAttribute("aria-label") || (by && document.getElementById(by).textContent) ||
    (node.labels && node.labels.length > 0 && node.labels[0].textContent) || node.textContent.trim();
  if (!name && !node.closest("[aria-hidden=true]")) bad.push(node.outerHTML.slice(0, 100));
}
return bad;
"""


def traffic(daemon, headers=()):
    """Rounds of a session whose text is known from another: right drafts beside wrong ones; the last round is held."""
    caller, made = Caller(daemon), []
    for _ in range(2):
        prompt = {"tokens": [73, 110, 32, 116, 104, 101, 32], "sampling": {"rule": "greedy"}}
        answer = caller.call("POST", "/v1/sessions", prompt, headers)
        assert answer.status == 201, answer.body
        made.append(answer.json)
    first, state = made
    ask = {"seq": 1, "epoch": first["epoch"], "expected_len": first["committed_len"], "max_tokens": 60}
    answer = caller.call("POST", f"/v1/sessions/{first['session']}/decode", ask, headers)
    assert answer.status == 200, answer.body
    text, at = answer.json["new_tokens"], 0  # what follows the pending token
    for number in range(12):
        right = text[at : at + number % 4]
        wrong = [(token + 1) % 250 for token in (text[at], text[at], text[at + 1])]
        drafts, parents = [*right, wrong[0], (wrong[0] + 1) % 250, wrong[2]], [*range(len(right)), 0, 0, len(right) + 1]
        body = round_body(state, drafts, parents, commit="hold" if number == 11 else "auto")
        answer = caller.call("POST", verify_path(state), body, headers)
        assert answer.status == 200, answer.body
        assert answer.json["accepted"]["nodes"] == list(range(len(right) + 1)), (drafts, answer.body)
        at += len(right) + 1
        state.update(answer.json)
    caller.close()
    return state


class BrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = cls.enterClassContext(Browser())

    def setUp(self):
        self.browser.open("about:blank")
        self.browser.console()  # what a page before this one has left
        self.browser.screen(1280, 900)
        self.browser.scheme("light")

    def show(self, daemon):
        self.browser.open(f"http://127.0.0.1:{daemon.admin_port}/")
        self.looked(1)

    def looked(self, more):
        """Until the page has looked so many more times."""
        now = int(self.browser.run("return document.body.dataset.looks || 0"))
        self.browser.wait(f"Number(document.body.dataset.looks || 0) >= {now + more}", "another look")

    def text(self, selector):
        return self.browser.run("return document.querySelector(arguments[0]).innerText", selector)

    def shot(self, name):
        if SHOTS:
            os.makedirs(SHOTS, exist_ok=True)
            self.browser.shot(os.path.join(SHOTS, name + ".png"))

    def check_page(self):
        """Fits, can be read, has names, has asked nobody else, and nothing was refused by the policy."""
        wide, room = self.browser.run("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
        self.assertLessEqual(wide, room)
        contrasts = self.browser.run(CONTRASTS)
        self.assertGreater(len(contrasts), 30)
        self.assertGreaterEqual(contrasts[0][0], 4.5, contrasts[0])
        self.assertEqual(self.browser.run(NAMELESS), [])
        names = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        own = self.browser.run("return location.origin")
        self.assertEqual([name for name in self.browser.run(names) if not name.startswith(own + "/")], [])

    def quiet(self, allowed=()):
        said = [text for _, text in self.browser.console() if not text.startswith("chrome://")]  # the browser's own pages
        bad = [text for text in said if not any(part in text for part in allowed)]
        self.assertEqual(bad, [])

    def test_open(self):
        with RealDaemon("--pages", "64", "--shadow", "all") as daemon:
            self.show(daemon)
            self.assertEqual(self.text("#state"), "✓ ready")
            self.assertEqual(self.text("#sessions"), "No session is open.")
            self.assertEqual(self.text("#trees"), "No tree has been verified yet.")
            self.assertFalse(self.browser.run("return document.getElementById('keys').checkVisibility()"))
            state = traffic(daemon)
            self.browser.wait("/[1-9][0-9]* exact/.test(document.getElementById('parity').innerText)", "rounds are judged")
            self.looked(1)
            for check in ("model", "self_test", "device", "worker", "draining"):
                self.assertIn("✓ " + check, self.text("#ready"))
            self.assertIn("kjv-mla-8m, version", self.text("#model"))
            self.assertIn(state["session"][:10], self.text("#sessions"))
            self.assertIn("2 open", self.text("#sessions"))
            self.assertIn("held", self.text("#sessions"))
            self.assertIn("Of 64 pages", self.text("#pages"))
            bars = "return [...document.querySelectorAll('#pages svg rect')].map((bar) => Number(bar.getAttribute('width')))"
            self.assertAlmostEqual(sum(self.browser.run(bars)), 400)
            self.assertIn("11 trees, 48 drafts, 1.36 accepted a tree", self.text("#accept"))
            cells = """return [...document.querySelectorAll("#accept tbody tr")].map((row) =>
                [...row.cells].map((cell) => cell.textContent).join())"""
            self.assertEqual(self.browser.run(cells), ["1,,72.7 %,8", "2,,45.5 %,5", "3,,18.2 %,2"])
            self.assertIn("12 rounds", self.text("#stages"))
            for stage in ("parse", "queue", "gpu", "sample", "encode"):
                self.assertIn(stage, self.text("#stages"))
            self.assertIn("Shadow mode all", self.text("#parity"))
            self.check_tree(state)
            self.check_page()
            self.shot("wide-light")
            self.browser.scheme("dark")
            self.check_page()
            self.shot("wide-dark")
            for scheme in ("dark", "light"):
                self.browser.scheme(scheme)
                self.browser.screen(360, 740, is_phone=True)
                self.check_page()
                self.shot("phone-" + scheme)
            self.quiet()
        self.looked(2)  # the first of them may have begun while the daemon answered
        self.assertEqual(self.text("#state"), "✗ no answer")
        self.assertEqual(self.text("#sessions"), "No answer.")
        self.quiet(("net::ERR_CONNECTION_REFUSED", "net::ERR_EMPTY_RESPONSE", "net::ERR_CONNECTION_RESET"))

    def check_tree(self, state):
        """The newest round is the held one, then each that is chosen: nodes, edges and path as they were answered."""
        count = "return document.querySelectorAll('#trees svg ' + arguments[0]).length"
        self.assertIn(f"{state['session']}, round {state['seq']}", self.text("#trees"))
        self.assertIn("held (as proposed)", self.text("#trees"))
        self.assertEqual(self.browser.run("return document.getElementById('tree-pick').options.length"), 9)
        pick = """const pick = document.getElementById("tree-pick"); pick.selectedIndex = arguments[0];
            pick.dispatchEvent(new Event("change"));
            return pick.value"""
        chosen = self.browser.run(pick, 5)  # three right ones and three others
        self.assertIn(f"round {state['seq'] - 4}, rule greedy: 3 of 6 drafts accepted", self.text("#trees"))
        self.assertIn("accepted nodes 0, 1, 2, 3, tokens ", self.text("#trees"))
        self.assertEqual(self.browser.run(count, ".node:not(.next)"), 7)
        self.assertEqual(self.browser.run(count, ".edge"), 7)  # with that to the next token
        self.assertEqual(self.browser.run(count, ".node.taken"), 4)
        self.assertEqual(self.browser.run(count, ".edge.taken"), 4)
        self.looked(1)  # what was chosen stays chosen
        self.assertEqual(self.browser.run("return document.getElementById('tree-pick').value"), chosen)

    def test_keys(self):
        """Without a key the page says so; the key goes into a header, and into no URL, store or history."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "keys")
            with open(path, "w") as file:
                file.write(KEYS)
            os.chmod(path, 0o600)
            with FixedDaemon("--api-key-file", path) as daemon:
                traffic(daemon, (f"Authorization: Bearer {SECRET}",))
                self.show(daemon)
                self.browser.wait("document.getElementById('key').checkVisibility()", "the form")
                self.assertEqual(self.text("#state"), "✓ ready")
                self.assertEqual(self.text("#sessions"), "A key is needed.")
                self.check_page()
                self.shot("keys")
                self.enter("wrong-secret-0000000")
                self.browser.wait("document.getElementById('key-why').innerText === 'The key is not known.'", "a refusal")
                self.enter("meter-secret-000000000")
                self.browser.wait("document.getElementById('pages').innerText.startsWith('Of')", "the pages")
                self.assertIn("scope admin", self.text("#sessions"))
                self.assertIn("scope verify", self.text("#parity"))
                self.enter(SECRET)
                self.browser.wait("document.getElementById('sessions').innerText.includes('2 open')", "the sessions")
                self.assertFalse(self.browser.run("return document.getElementById('keys').checkVisibility()"))
                self.assertIn("root", self.text("#sessions"))
                left = """return location.href + document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) +
                    JSON.stringify(history.state) + document.documentElement.outerHTML + document.getElementById("key").value +
                    performance.getEntriesByType("resource").map((entry) => entry.name).join()"""
                self.assertNotIn(SECRET, self.browser.run(left))
                self.quiet(("status of 401", "status of 403"))
                self.assertNotIn(SECRET, daemon.text())
                self.browser.open("about:blank")

    def test_violation(self):
        """A planted fault is shown in red, and its reproducer is saved through the key, byte for byte."""
        with tempfile.TemporaryDirectory() as folder:
            path, state_dir, saved = (os.path.join(folder, name) for name in ("keys", "state", "saved"))
            os.mkdir(state_dir)
            os.mkdir(saved)
            with open(path, "w") as file:
                file.write(KEYS)
            os.chmod(path, 0o600)
            bearer = (f"Authorization: Bearer {SECRET}",)
            with PlantedDaemon("output", "--api-key-file", path, "--state-dir", state_dir) as daemon:
                caller = Caller(daemon)
                state = caller.call("POST", "/v1/sessions", {"tokens": [5, 6, 7]}, bearer).json
                daemon.switch(True)
                body = round_body(state, [40, 41], [0, 0], want={"shadow": True})
                self.assertEqual(caller.call("POST", verify_path(state), body, bearer).status, 200)
                daemon.switch(False)
                expected = caller.call("GET", "/v1/parity/violations/1", headers=bearer)
                self.assertEqual(expected.status, 200)
                caller.close()
                self.show(daemon)
                self.enter(SECRET)
                self.browser.wait("document.querySelector('#parity a')", "the link")
                self.assertIn("1 violations", self.text("#parity"))
                self.assertEqual(self.text("#parity .bad"), "1 violations")
                self.assertIn("violation 1, kernel", self.text("#parity a"))
                self.check_page()
                self.shot("violation")
                self.browser.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=saved)
                self.browser.run("document.querySelector('#parity a').focus()")
                self.looked(2)
                self.assertEqual(self.browser.run("return document.activeElement.tagName"), "A")  # a look takes no focus
                self.browser.click("#parity a")
                self.browser.wait("document.getElementById('parity-note').innerText === 'Violation 1 saved.'", "the note")
                done = os.path.join(saved, "violation-1.kdtr")
                wait_until(lambda: os.path.exists(done), 60, "the file is there")
                with open(done, "rb") as file:
                    self.assertEqual(file.read(), expected.body)
                self.browser.open("about:blank")

    def enter(self, secret):
        self.browser.type("#key", secret)
        self.browser.click("#key-form button")

    def test_policy(self):
        """The policy bites: what an injected text would do is refused."""
        with FixedDaemon() as daemon:
            self.show(daemon)
            self.quiet()
            self.browser.run("""const bad = document.createElement("script"); bad.textContent = "window.bitten = 1";
                document.body.append(bad); document.body.setAttribute("onclick", "window.bitten = 1"); document.body.click();
                fetch("http://127.0.0.1:1/").catch(() => {});""")
            self.assertIsNone(self.browser.run("return window.bitten || null"))
            refused = []

            def all_three():
                refused.extend(text for _, text in self.browser.console() if "Content Security Policy" in text)
                return len(refused) >= 3

            wait_until(all_three, 60, "three refusals")
            self.browser.open("about:blank")


if __name__ == "__main__":
    try:
        with Browser() as browser:
            browser.open("about:blank")
    except (Missing, Failed) as reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main(verbosity=1)
