"""`treeverify` against a real daemon: every command, its output, its exit code.

usage: cli.py TREEVERIFY TREEVERIFYD MODEL_DIR STORE TEXT
TV_TEST_SCALE below 1 takes fewer prompts and leaves the acceptance length out (sanitizer builds).
"""

import contextlib
import fcntl
import http.server
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import unittest
import xml.etree.ElementTree

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon
from delay_proxy import DelayProxy
import proxy
from proxy import ContractProxy

CLIENT, SERVER, MODEL, STORE, TEXT = sys.argv[1:6]
SCALE = float(os.environ.get("TV_TEST_SCALE", "1"))
# One command, one thread and one request after the other: the daemon's threads, and those of bench, are raced by the
# cases that stay under TSan.
in_turn = unittest.skipIf(os.environ.get("TV_SANITIZE") == "thread", "one request after the other")
CLOSED = "http://127.0.0.1:1"


def prompts(count, length=200):
    with open(TEXT, "rb") as file:
        text = file.read()
    step = (len(text) - length - 20000) // count
    return [text[20000 + i * step : 20000 + i * step + length] for i in range(count)]


class Replies:
    """A server on loopback that gives every GET the same JSON: what no bundled model can make a daemon say."""

    def __init__(self, answer):
        body = json.dumps(answer).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, kind, value, trace):
        self.server.shutdown()
        self.thread.join(timeout=10)
        self.server.server_close()


class Cli(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(SERVER, MODEL)
        cls.daemon.__enter__()
        cls.proxy = ContractProxy(cls.daemon.host, cls.daemon.port)
        cls.url = cls.proxy.url

    @classmethod
    def tearDownClass(cls):
        cls.proxy.close()
        cls.daemon.__exit__(None, None, None)

    def run_client(self, *arguments, code=0, stdin=b"", url=None):
        env = dict(os.environ, TREEVERIFY_URL=url or self.url)
        got = subprocess.run([CLIENT, *arguments], input=stdin, capture_output=True, env=env, timeout=240)
        self.assertEqual(got.returncode, code, f"{arguments}: {got.stdout!r} {got.stderr!r}")
        return got.stdout.decode(), got.stderr.decode()

    def generate(self, prompt, *options):
        text, _ = self.run_client("generate", "--json", *options, "-", stdin=prompt)
        return json.loads(text)

    def test_health(self):
        text, _ = self.run_client("health")
        self.assertIn("alive, ready", text)
        self.assertIn("vocabulary 260", text)
        self.assertTrue(json.loads(self.run_client("health", "--deep", "--json")[0])["ready"])

    @in_turn
    def test_keys(self):
        """The first line of --key-file is sent; without one, or with another, the server says no."""
        secret = "a-secret-of-the-command-line"
        with tempfile.TemporaryDirectory() as folder:
            keys, own, other, none = (os.path.join(folder, name) for name in ("keys", "own", "other", "none"))
            texts = ((keys, f"cli:verify:{secret}\n"), (own, secret + "\n"), (other, "x" * 20), (none, "\n"))
            for path, text in texts:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                    file.write(text)
            with Daemon(SERVER, MODEL, "--api-key-file", keys) as daemon:
                proxy = ContractProxy(daemon.host, daemon.port)
                try:
                    self.run_client("parity", "--key-file", own, url=proxy.url)
                    for arguments in ((), ("--key-file", other)):
                        _, error = self.run_client("parity", *arguments, url=proxy.url, code=76)
                        self.assertIn("unauthenticated", error)
                    _, error = self.run_client("parity", "--key-file", none, url=proxy.url, code=66)
                    self.assertIn("its first line is no key", error)
                    self.assertIn("vocabulary 260", self.run_client("health", "--key-file", own, url=proxy.url)[0])
                    text, _ = self.run_client("health", url=proxy.url)  # as a container's probe, which has no key
                    self.assertIn("alive, ready", text)
                    self.assertNotIn("vocabulary", text)
                    self.run_client("health", "--key-file", other, url=proxy.url, code=76)
                finally:
                    proxy.close()

    @in_turn
    def test_files_of_keys(self):
        """Exit code 66 is for every file that has not what it should have, before anything is sent."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "key")
            for text in (b"", b"\n", b"two words\n", b"\xc3\xa9" * 9, b"tab\tbed\n", b"k" * 257, b"\0" * 20, b"k" * 5000):
                with open(path, "wb") as file:
                    file.write(text)
                _, error = self.run_client("health", "--key-file", path, url="http://127.0.0.1:1", code=66)
                self.assertIn(path, error)
            for missing in (folder, os.path.join(folder, "none")):
                _, error = self.run_client("health", "--key-file", missing, url="http://127.0.0.1:1", code=66)
                self.assertIn(missing, error)
            _, error = self.run_client("health", "--cacert", path + "none", url="https://127.0.0.1:1", code=66)
            self.assertIn(path + "none", error)

    @in_turn
    def test_usage(self):
        self.run_client(code=64)
        self.run_client("frobnicate", code=64)
        self.run_client("health", "extra", code=64)
        self.run_client("health", "--no-such-option", code=64)
        self.run_client("health", "--url", "ftp://x", code=64)
        self.run_client("health", "--url", "http://[::1", code=64)
        self.run_client("health", "--key-file", "/nonexistent/key", code=66)
        self.run_client("generate", code=64)
        self.run_client("generate", "", code=64)
        self.run_client("generate", "--nodes", "0", "x", code=64)
        self.run_client("generate", "--nodes", "3x", "x", code=64)
        self.run_client("generate", "--seed", "-1", "x", code=64)
        self.run_client("parity", "file-without-run", code=64)
        self.run_client("bench", "extra", code=64)
        self.run_client("bench", "--drafters", "0", code=64)
        self.run_client("bench", "--accepted", "64", code=64)
        for wrong in ("-1", "nan", "inf"):
            self.run_client("bench", "--rtt-ms", wrong, code=64)
        for command in (("generate", "x"), ("bench",)):
            _, error = self.run_client(*command, "--restart-s", "nan", code=64)
            self.assertIn("--restart-s takes 0 to 3600", error)
        self.run_client("health", "--restart-s", "1", code=64)  # it waits for nobody
        self.run_client("bench", "--rounds", "100000", code=64)  # no context is so long
        self.run_client("top", "--interval", "0", code=64)
        self.run_client("top", "--count", "x", code=64)
        self.assertRegex(self.run_client("--version")[0], r"^treeverify \d+\.\d+\.\d+\n$")
        for command in ("health", "verify", "generate", "parity", "bench", "top"):
            text, _ = self.run_client(command, "--help")
            self.assertTrue(text.startswith(f"usage: treeverify {command}"))
        self.assertIn("exit codes:", self.run_client("--help")[0])

    def test_unreachable(self):
        _, error = self.run_client("health", code=69, url=CLOSED)
        self.assertIn(CLOSED, error)
        text, _ = self.run_client("health", "--json", code=69, url=CLOSED)
        self.assertIsNone(json.loads(text)["committed"])

    @in_turn
    def test_generate_does_not_wait_for_its_sessions_end(self):
        """A DELETE that nobody answers costs seconds, not the deadline of a call, and is told; the result stands."""
        class Silent(proxy.Handler):
            def do_DELETE(self):
                self.rfile.read(1)  # until the client hangs up

        link = ContractProxy(self.daemon.host, self.daemon.port)
        link.server.RequestHandlerClass = Silent
        command = [CLIENT, "generate", "--json", "--max-tokens", "3", "--url", link.url, "x"]
        got = subprocess.run(command, capture_output=True, timeout=25)  # one attempt of a call takes 30 s
        link.close()
        self.assertEqual((got.returncode, len(json.loads(got.stdout)["tokens"])), (0, 3), got.stderr)
        self.assertRegex(got.stderr, b"^treeverify: the session was not deleted, its lease will end it: [^\n]+\n$")
        client = self.daemon.client()
        for state in client.get("/v1/sessions")["sessions"]:
            client.call("DELETE", f"/v1/sessions/{state['session']}")
        client.close()

    @in_turn
    def test_generate_says_that_the_server_is_gone(self):
        """Behind the reason why the text ends; the exit code is that reason's."""
        def die(path, body, content):
            if path.endswith("/decode"):
                daemon.process.kill()
                daemon.process.wait()

        with contextlib.suppress(RuntimeError), Daemon(SERVER, MODEL) as daemon:
            link = ContractProxy(daemon.host, daemon.port)
            link.server.watch, link.server.handle_error = die, lambda *_: None
            text, error = self.run_client("generate", "--no-drafts", "--max-tokens", "100", "x", url=link.url, code=69)
            link.close()
        self.assertIn("x[", text)
        self.assertRegex(error, "^treeverify: http.*\ntreeverify: the session was not deleted, its lease will end it: .*\n$")

    def test_generate_needs_tokens_that_are_bytes(self):
        """The command line is right; it is the server that has another kind of model."""
        model = self.daemon.client().get("/v1/model")
        with Replies(dict(model, vocab=102400)) as url:
            _, error = self.run_client("generate", "x", code=76, url=url)
            self.assertIn("a vocabulary of 102400: its tokens are not bytes", error)
            text, _ = self.run_client("generate", "--json", "x", code=76, url=url)
            self.assertEqual(json.loads(text)["error"], "not-bytes")

    @in_turn
    def test_missing_file(self):
        self.run_client("verify", "/nonexistent.json", code=66)
        self.run_client("generate", "--store", "/nonexistent", "x", code=66)

    def test_verify(self):
        prefix = list(b"In the beginning God created the heaven and the ")
        body = {
            "tokens": prefix,
            "tree": {"tokens": list(b"earxth"), "parents": [-1, 0, 1, 1, 2, 4]},
            "sampling": {"rule": "greedy"},
        }
        data = json.dumps(body).encode()
        answer = json.loads(self.run_client("verify", "--json", "-", stdin=data)[0])
        self.assertEqual(answer["accepted"]["nodes"][0], 0)
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            text, _ = self.run_client("verify", "--bytes", file.name)
        self.assertIn(json.dumps(answer["new_tokens"], separators=(",", ":")), text)
        self.assertIn(bytes(answer["new_tokens"]).decode(), text)

    @in_turn
    def test_verify_refused(self):
        body = {"tokens": [1, 2], "tree": {"tokens": [5, 6], "parents": [-1, 1]}}
        _, error = self.run_client("verify", "-", stdin=json.dumps(body).encode(), code=76)
        self.assertIn("422 tree-invalid", error)
        self.assertIn("committed: no", error)
        text, _ = self.run_client("verify", "--json", "-", stdin=b"{", code=76)
        self.assertEqual(json.loads(text)["error"], "bad-json")

    @in_turn
    def test_generate_text_is_the_decoded_text(self):
        """With drafts, without, whatever the tree: the same greedy text. Bookkeeping adds up."""
        for prompt in prompts(2 if SCALE >= 1 else 1):
            alone = self.generate(prompt, "--no-drafts", "--max-tokens", "120")
            self.assertEqual(len(alone["tokens"]), 120)
            self.assertEqual(alone["accept_len_mean"], 1.0)
            self.assertTrue(all(alone["own"]))
            for nodes in ("1", "2", "33", "256"):
                run = self.generate(prompt, "--store", STORE, "--nodes", nodes, "--max-tokens", "120")
                self.assertEqual(run["tokens"], alone["tokens"])
                self.assertEqual(run["text"], alone["text"])
                self.assertAlmostEqual(run["accept_len_mean"] * run["rounds"], 119, delta=0.01)
                self.assertEqual(run["own"][0], 1)
                if nodes == "1":
                    self.assertEqual(run["rounds"], 119)
                    self.assertEqual(run["drafts"], 0)

    @unittest.skipUnless(SCALE >= 1, "a mean over all prompts; says nothing about memory or threads")
    def test_generate_acceptance(self):
        """The drafter is worth having: models/README's table says 4.5 with a store at 32 nodes."""
        rounds = tokens = own_rounds = 0
        for prompt in prompts(6):
            run = self.generate(prompt, "--store", STORE, "--nodes", "33", "--max-tokens", "160")
            rounds += run["rounds"]
            tokens += 159
            own_rounds += self.generate(prompt, "--nodes", "33", "--max-tokens", "160")["rounds"]
        print(f"acceptance length: store {tokens / rounds:.2f}, own context {tokens / own_rounds:.2f}")
        self.assertGreater(tokens / rounds, 4.0)
        self.assertGreater(tokens / own_rounds, 1.3)

    @in_turn
    def test_generate_seeded(self):
        prompt = prompts(1)[0]
        seeded = ("--temperature", "0.8", "--max-tokens", "80", "--seed")
        first = self.generate(prompt, *seeded, "7", "--store", STORE)
        again = self.generate(prompt, *seeded, "7", "--no-drafts")
        other = self.generate(prompt, *seeded, "8", "--no-drafts")
        self.assertEqual(first["tokens"], again["tokens"])
        self.assertNotEqual(first["tokens"], other["tokens"])

    @in_turn
    def test_generate_marks(self):
        """Plain output: prompt, then the text with the model's own tokens in brackets."""
        prompt = "Ge1:1 In the beginning God"
        run = self.generate(prompt.encode(), "--store", STORE, "--max-tokens", "60")
        text, _ = self.run_client("generate", "--store", STORE, "--max-tokens", "60", prompt)
        marked = "".join(f"[{chr(t)}]" if own else chr(t) for t, own in zip(run["tokens"], run["own"]))
        self.assertTrue(text.startswith(prompt + marked + "\n\n60 new tokens in "), text)
        colored, _ = self.run_client(
            "generate", "--store", STORE, "--max-tokens", "60", "--color", "always", prompt
        )
        marked = "".join(
            f"\033[{1 if own else 32}m{chr(t)}\033[0m" for t, own in zip(run["tokens"], run["own"])
        )
        self.assertTrue(colored.startswith(prompt + marked), colored)

    @in_turn
    def test_generate_stop(self):
        run = self.generate(prompts(1)[0], "--store", STORE, "--max-tokens", "400", "--stop", str(ord(" ")))
        self.assertEqual(run["finish"], "stop")
        self.assertEqual(run["text"].index(" "), len(run["text"]) - 1)

    def test_generate_sends_ahead(self):
        """--ahead: the same text, greedy and seeded, to a stop and to the last token; its rate over a link is printed."""
        prompt = prompts(1)[0]
        ways = (("--max-tokens", "60"), ("--max-tokens", "60", "--temperature", "0.8", "--seed", "7"),
                ("--max-tokens", "400", "--stop", str(ord("."))))
        for options in ways if SCALE >= 1 else [("--max-tokens", "16")]:
            plain = self.generate(prompt, "--store", STORE, *options)
            for guesses in ("1", "6"):
                ahead = self.generate(prompt, "--store", STORE, *options, "--ahead", "--guesses", guesses)
                for same in ("tokens", "own", "finish"):
                    self.assertEqual(ahead[same], plain[same])
                self.assertLessEqual(ahead["right"], ahead["sent_ahead"])
                self.assertLessEqual(ahead["sent_ahead"], ahead["rounds"])
        self.run_client("generate", "--ahead", "--guesses", "33", "x", code=64)
        if SCALE < 1:
            return
        with DelayProxy(self.daemon.host, self.daemon.port, 0.02) as link:
            words = ("generate", "--json", "--store", STORE, "--max-tokens", "60", "-")
            far = [json.loads(self.run_client(*words, *more, stdin=prompt, url=link.url)[0]) for more in ((), ("--ahead",))]
        self.assertEqual(far[0]["tokens"], far[1]["tokens"])
        print(f"over 20 ms: {far[0]['tokens_per_s']:.0f} tokens/s, ahead {far[1]['tokens_per_s']:.0f}")

    def test_generate_report(self):
        """The page's figures are those of its rounds, and it loads nothing."""
        prompt, count = prompts(1)[0], "80" if SCALE >= 1 else "16"
        with tempfile.TemporaryDirectory() as folder:
            for name, more in (("plain.html", ()), ("ahead.html", ("--ahead",))):
                path = os.path.join(folder, name)
                run = self.generate(prompt, "--store", STORE, "--max-tokens", count, "--report", path, *more)
                with open(path, encoding="utf-8") as file:
                    page = file.read()
                numbers = json.loads(page.split("id='numbers'>")[1].split("</script>")[0])
                self.assertEqual(numbers["summary"], {name: run[name] for name in numbers["summary"]})
                sizes, stages = numbers["accepted_by_nodes"], numbers["stages_us"]
                self.assertEqual((len(stages), sum(count for _, count, _ in sizes)), (run["rounds"], run["rounds"]))
                self.assertEqual(sum(drafts * count for drafts, count, _ in sizes), run["drafts"])
                accepted = sum(count * mean for _, count, mean in sizes)
                self.assertAlmostEqual(accepted + run["rounds"], run["accept_len_mean"] * run["rounds"], delta=0.01)
                self.assertTrue(0 < numbers["acceptance_by_depth"][0] <= 1)
                self.assertEqual(sum(sum(stage[:3]) for stage in stages), run["server_us"])
                self.assertEqual(page.count("<svg"), page.count("</svg>"))
                self.assertEqual(page.count("<svg"), 3)
                self.assertEqual(page.count("<rect"), len(numbers["acceptance_by_depth"]) + len(sizes) + 4 * len(stages))
                for loaded in ("http:", "https:", "src=", "href=", "javascript"):
                    self.assertNotIn(loaded, page)
                xml.etree.ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
            _, error = self.run_client("generate", "--max-tokens", "2", "--report", os.path.join(folder, "no", "x"), "x", code=74)
            self.assertIn("No such file", error)
        none = self.generate(prompt, "--no-drafts", "--max-tokens", "3", "--report", os.devnull)
        self.assertEqual(len(none["tokens"]), 3)

    def test_generate_leaves_no_session(self):
        self.generate(b"Ps1:1 Blessed is", "--max-tokens", "5")
        client = self.daemon.client()
        self.assertEqual(client.get("/v1/sessions")["sessions"], [])
        client.close()

    @in_turn
    def test_generate_to_the_context_limit(self):
        with Daemon(SERVER, MODEL, "--max-len", "256") as small:
            url = f"http://{small.host}:{small.port}"
            env = dict(os.environ, TREEVERIFY_URL=url)
            got = subprocess.run(
                [CLIENT, "generate", "--json", "--store", STORE, "--max-tokens", "500", "-"],
                input=prompts(1)[0], capture_output=True, env=env, timeout=240,
            )
            self.assertEqual(got.returncode, 0, got.stderr)
            run = json.loads(got.stdout)
        self.assertEqual(run["finish"], "length")
        self.assertLessEqual(200 + len(run["tokens"]), 257)

    @in_turn
    def test_generate_sizes_trees_as_the_server_says(self):
        """--nodes auto: the first tree has the default size, the others follow the answers' hints; the text is the same."""
        prompt = prompts(1)[0]
        alone = self.generate(prompt, "--no-drafts", "--max-tokens", "40")
        sizes, hints = [], [33]

        def watch(path, body, content):
            if path.endswith("/verify"):
                sizes.append(len(json.loads(body)["tree"]["tokens"]))
                hints.append(max(2, json.loads(content)["hint"]["max_useful_nodes"]))

        plain, self.proxy.server.watch = self.proxy.server.watch, watch
        try:
            run = self.generate(prompt, "--store", STORE, "--nodes", "auto", "--max-tokens", "40")
        finally:
            self.proxy.server.watch = plain
        self.assertEqual(run["tokens"], alone["tokens"])
        self.assertEqual((len(sizes), sum(sizes)), (run["rounds"], run["rounds"] + run["drafts"]))
        for size, hint in zip(sizes, hints):
            self.assertLessEqual(size, hint)
        _, error = self.run_client("generate", "--nodes", "some", "x", code=64)
        self.assertIn("or auto", error)

    @in_turn
    def test_curl_alone(self):
        """clients/curl/drafter.sh: the text is the model's, in fewer rounds than tokens, and its session is closed."""
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "clients", "curl", "drafter.sh")
        prompt, before = "Holy, holy, holy, holy", self.proxy.server.answers
        got = subprocess.run(["sh", script, self.url, prompt, "40"], capture_output=True, timeout=240)
        self.assertEqual((got.returncode, got.stderr), (0, b""))
        rounds = self.proxy.server.answers - before - 2  # but for the create and the end
        said = got.stdout.decode()
        self.assertGreaterEqual(len(said), 41)
        alone = self.generate(prompt.encode(), "--no-drafts", "--max-tokens", str(len(said) - 1))
        self.assertEqual(said, alone["text"] + "\n")
        self.assertLess(rounds, len(said) - 2)
        lost = subprocess.run(["sh", script, "nowhere://x"], capture_output=True, timeout=240)
        self.assertNotEqual(lost.returncode, 0)
        client = self.daemon.client()
        self.assertEqual(client.get("/v1/sessions")["sessions"], [])
        client.close()

    def test_bench(self):
        """All rounds of all drafters, right as often as asked for; a round takes no less than the link."""
        options = ("--drafters", "4", "--rounds", "6", "--nodes", "8", "--accepted", "2", "--rtt-ms", "30")
        run = json.loads(self.run_client("bench", "--json", *options)[0])
        self.assertEqual((run["rounds"], run["tokens"], run["accept_len_mean"]), (24, 24 * 3, 3))
        self.assertEqual(run["retries"], 0)
        columns = run["percentiles"]
        self.assertEqual(list(columns), ["round trip", "server", "queue", "model", "rounds in a launch"])
        for name, values in columns.items():
            self.assertEqual(values, sorted(values), name)
        self.assertGreaterEqual(columns["round trip"][0], 30 + columns["server"][0] * 0.5)
        self.assertTrue(1 <= columns["rounds in a launch"][0] <= columns["rounds in a launch"][3] <= 4)
        text, error = self.run_client("bench", *options[:4], "--think-ms", "1", "--accepted", "0")
        self.assertRegex(text, r"(?m)^ +ms +p50 +p90 +p99 +largest\n +round trip ")
        self.assertIn("24 rounds and 24 tokens in ", text)
        self.assertEqual(error, "")  # no picture of the progress: this is no terminal
        client = self.daemon.client()
        self.assertEqual(client.get("/v1/sessions")["sessions"], [])
        client.close()

    def test_top(self):
        """Totals since the start, and between two pictures nothing when nothing happened."""
        self.generate(b"Ge1:1 In the beginning", "--max-tokens", "20")
        first = json.loads(self.run_client("top", "--json")[0])
        self.assertTrue(first["ready"])
        self.assertGreater(first["tokens_per_s"], 0)
        self.assertGreaterEqual(first["accept_len_mean"], 1)
        self.assertEqual(first["sessions"], {"idle": 0, "busy": 0, "held": 0})
        self.assertEqual(first["parity"]["mode"], "off")
        low, middle, high = first["stages_ms"]["gpu"]
        self.assertTrue(0 < low <= middle <= high)
        for _ in range(50):  # a round that generate did not wait for may still end
            lines = self.run_client("top", "--json", "--count", "2", "--interval", "0.2")[0].splitlines()
            self.assertEqual(len(lines), 2)
            second = json.loads(lines[1])
            if second["rounds_per_s"] == 0:
                break
        self.assertEqual((second["rounds_per_s"], second["stages_ms"]["gpu"]), (0, None))
        self.assertGreater(second["requests_per_s"], 0)
        text, _ = self.run_client("top")
        self.assertTrue(text.startswith(f"{self.url}: alive, ready, kjv-mla-8m (deepseek_v3) on cpu\n"), text)
        self.assertNotIn("\033", text)
        self.assertIn("\nshadow    off", text)
        self.run_client("top", url=CLOSED, code=69)

    def test_top_on_a_terminal(self):
        """Pictures in place until Ctrl-C; the cursor comes back."""
        process, terminal = pty.fork()
        if process == 0:
            modes = termios.tcgetattr(0)
            modes[3] |= termios.NOFLSH  # Ctrl-C would drop what is written right behind it
            termios.tcsetattr(0, termios.TCSANOW, modes)
            os.execv(CLIENT, [CLIENT, "top", "--interval", "0.1", "--url", self.url])
        seen = b""
        while seen.count(b"\033[H\033[J") < 3 or not seen.endswith(b"\n"):
            seen += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the other end closes
            while chunk := os.read(terminal, 65536):
                seen += chunk
        os.close(terminal)
        self.assertEqual(os.waitpid(process, 0)[1], 0)
        self.assertTrue(seen.startswith(b"\033[?25l\033[H\033[J" + self.url.encode()), seen)
        self.assertTrue(seen.endswith(b"\033[?25h\r\n"), seen[-80:])

    def on_terminal(self, *arguments, until=None, url=None):
        """A run whose stderr is a terminal of 24 rows: its code, stdout, and what the terminal got. until: the words on the
        terminal after which it is interrupted."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        run = subprocess.Popen([CLIENT, *arguments, "--url", url or self.url], stdout=subprocess.PIPE, stderr=slave)
        text = []
        reader = threading.Thread(target=lambda: text.append(run.stdout.read()))
        reader.start()
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # the other end closes
            while chunk := os.read(master, 65536):
                seen += chunk
                if until is not None and until in seen:
                    run.send_signal(signal.SIGINT)
                    until = None
        os.close(master)
        code = run.wait(timeout=240)
        reader.join()
        run.stdout.close()
        return code, text[0], seen

    @in_turn
    def test_generate_shows_a_line_on_a_terminal(self):
        """The text is the same with the line; a long prompt has a bar; the last row is given back, after Ctrl-C too."""
        prompt = prompts(1, 600)[0].decode()
        options = ("generate", "--store", STORE, "--max-tokens", "30")
        plain, _ = self.run_client(*options, prompt)
        code, text, seen = self.on_terminal(*options, prompt)
        self.assertEqual(code, 0)
        marked = plain[: plain.rindex("\n\n")]
        self.assertEqual(text.decode()[: len(marked)], marked)
        self.assertTrue(seen.startswith(b"\r\n\033[1A\0337\033[1;23r\0338"), seen[:80])
        self.assertIn(b"prompt [############..................] 256 of 600", seen)
        self.assertRegex(seen, rb"30 tokens, \d+ tokens/s, acceptance length \d\.\d\d, \d+ rounds, round trip \d+\.\d ms")
        reset = b"\0337\033[r\033[24;1H\033[2K\0338"
        self.assertEqual((seen.count(reset), seen.endswith(reset)), (1, True))
        code, _, seen = self.on_terminal(*options, "--live", "never", prompt)
        self.assertEqual((code, seen), (0, b""))
        straight = f"http://{self.daemon.host}:{self.daemon.port}"  # the proxy need not see how that ends
        endless = ("generate", "--max-tokens", "3000", "--nodes", "1", "x")
        code, _, seen = self.on_terminal(*endless, until=b"tokens/s", url=straight)
        self.assertEqual((code, seen.count(reset), seen.endswith(reset)), (-signal.SIGINT, 1, True))
        client = self.daemon.client()
        for state in client.get("/v1/sessions")["sessions"]:  # the interrupted one
            client.call("DELETE", f"/v1/sessions/{state['session']}")
        client.close()

    def test_bench_shows_its_progress_on_a_terminal(self):
        code, text, seen = self.on_terminal("bench", "--drafters", "2", "--rounds", "3", "--rtt-ms", "150")
        self.assertEqual(code, 0)
        self.assertIn(b"6 rounds and 24 tokens", text)
        self.assertRegex(seen, rb"text 1 \[#*\.*\] \d+ of \d+")
        self.assertRegex(seen, rb"rounds \[#+\.*\] [1-6] of 6")
        self.assertTrue(seen.endswith(b"\r\033[K"))

    def test_parity(self):
        text, _ = self.run_client("parity", "--run")
        self.assertIn("the paths agree", text)
        body = {"tokens": list(b"And it came to pass"), "tree": {"tokens": [44, 32, 105], "parents": [-1, 0, 1]}}
        with tempfile.NamedTemporaryFile() as file:
            file.write(json.dumps(body).encode())
            file.flush()
            report = json.loads(self.run_client("parity", "--run", "--json", file.name)[0])
        self.assertTrue(report["ok"])
        text, _ = self.run_client("parity")
        self.assertIn("0 violations", text)
        totals = json.loads(self.run_client("parity", "--json")[0])
        self.assertEqual(totals["rounds"]["violation"], 0)


if __name__ == "__main__":
    del sys.argv[1:6]
    unittest.main(verbosity=2)
