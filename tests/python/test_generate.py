"""`python -m treeverify generate` as people run it: text, marks, JSON, the live line, exit codes."""

import dataclasses
import importlib.util
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import zlib

from daemon import Daemon
from harness import MODEL, PACKAGE_ENV, QUICK, SCALE, SERVER, STORE, DaemonTest, FlakyProxy, prompts, readme_code, url_of

import treeverify as tv
from treeverify.generate import Tally
from treeverify.report import figures
from treeverify.terminal import bar, visible
from treeverify.text import ByteTokenizer, DecodedText, FileTokenizer, text_of, tokenizer_for

COUNT = 80 if SCALE >= 1 else 20


class GenerateTest(DaemonTest):
    def run_command(self, *arguments, code=0, stdin=b"", url=None):
        command = [sys.executable, "-m", "treeverify", *arguments]
        env = dict(PACKAGE_ENV, TREEVERIFY_URL=url or url_of(self.daemon))
        got = subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=170)
        self.assertEqual(got.returncode, code, f"{arguments}: {got.stdout!r} {got.stderr!r}")
        return got.stdout.decode(), got.stderr.decode()

    def json(self, prompt, *options, **more):
        text, _ = self.run_command("generate", "--json", *options, "-", stdin=bytes(prompt), **more)
        return json.loads(text)

    def test_json_is_the_decoded_text(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT)
        run = self.json(prompt, "--store", STORE, "--max-tokens", str(COUNT))
        alone = self.json(prompt, "--no-drafts", "--max-tokens", str(COUNT))
        for result in (run, alone):
            self.assertEqual((result["tokens"], result["text"]), (plain, bytes(plain).decode()))
            self.assertEqual((result["finish"], result["resumed"]), ("max-tokens", 0))
            self.assertEqual((len(result["own"]), result["own"][0]), (COUNT, 1))
            self.assertGreater(result["rtt_ms"], 0)
        self.assertEqual((alone["accept_len_mean"], alone["drafts"], sum(alone["own"])), (1.0, 0, COUNT))
        self.assertGreater(run["accept_len_mean"], 1.5)
        self.assertEqual(round(run["accept_len_mean"] * run["rounds"]), COUNT - 1)
        self.assertEqual(self.client.sessions(), [])

    def test_marks(self):
        prompt = "Ge1:1 In the beginning God"
        run = self.json(prompt.encode(), "--store", STORE, "--max-tokens", "40")
        text, error = self.run_command("generate", "--store", STORE, "--max-tokens", "40", prompt)
        pairs = list(zip(map(chr, run["tokens"]), run["own"]))
        marked = "".join(f"[{c}]" if own else c for c, own in pairs)
        self.assertTrue(text.startswith(prompt + marked + "\n\n40 new tokens in "), text)
        self.assertEqual(error, "")
        text, _ = self.run_command("generate", "--store", STORE, "--max-tokens", "40", "--color", "always", prompt)
        marked = "".join(f"\x1b[{1 if own else 32}m{c}\x1b[0m" for c, own in pairs)
        self.assertTrue(text.startswith(prompt + marked), text)

    def test_report(self):
        """The page is whole HTML with drawings, asks the network for nothing, and its numbers are those of the run."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.html")
            options = ("--store", STORE, "--max-tokens", "40", "--report", path)
            run = self.json(b"Ge1:1 And <b>God", *options)
            with open(path, encoding="utf-8") as file:
                page = file.read()
            path = os.path.join(folder, "no", "x")
            text, error = self.run_command("generate", "--report", path, "--max-tokens", "2", "x", code=73)
            self.assertIn("\n2 new tokens in ", text)
            self.assertRegex(error, f"^treeverify: the report cannot be written: .*{path}'\n$")
            text, again = self.run_command("generate", "--json", "--report", path, "--max-tokens", "2", "x", code=73)
            self.assertEqual((len(json.loads(text)["tokens"]), again), (2, error))
        numbers = json.loads(page.split("id='numbers'>")[1].split("</script>")[0])
        self.assertEqual(numbers["summary"], run)
        self.assertEqual(len(numbers["stages_us"]), run["rounds"])
        sizes = numbers["accepted_by_nodes"]
        self.assertEqual(sum(count for _, count, _ in sizes), run["rounds"])
        self.assertEqual(sum(nodes * count for nodes, count, _ in sizes), run["drafts"])
        self.assertEqual(round(sum(count * mean for _, count, mean in sizes)) + run["rounds"], 39)
        shares = numbers["acceptance_by_depth"]
        self.assertTrue(shares and all(0 <= share <= 1 for share in shares))
        self.assertEqual(page.count("<svg "), 3)
        self.assertEqual(page.count("<rect "), len(shares) + len(sizes) + 4 * run["rounds"])
        for word in ("http", "src=", "href="):
            self.assertNotIn(word, page)

    def test_report_as_a_picture(self):
        """A PNG with drawings of its own, whose metadata has the numbers of the run; without matplotlib it is refused."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.png")
            options = ("--store", STORE, "--max-tokens", "20", "--report", path)
            if importlib.util.find_spec("matplotlib") is None:
                _, error = self.run_command("generate", *options, "x", code=73)
                self.assertIn("treeverify[png]", error)
                self.assertFalse(os.path.exists(path))
                self.skipTest("matplotlib is not installed")
            run = self.json(b"Ge1:1 In the beginning God", *options)
            with open(path, "rb") as file:
                data = file.read()
            self.run_command("generate", "--report", os.path.join(folder, "no", "x.png"), "--max-tokens", "2", "x", code=73)
        self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
        chunks, at = {}, 8
        while at < len(data):
            length, name = struct.unpack(">I4s", data[at : at + 8])
            body = data[at + 8 : at + 8 + length]
            self.assertEqual(struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0], zlib.crc32(name + body))
            chunks.setdefault(name, []).append(body)
            at += 12 + length
        width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][0][:10])
        self.assertEqual((width, height, depth, color), (800, 900, 8, 6))
        pixels = zlib.decompress(b"".join(chunks[b"IDAT"]))
        self.assertEqual(len(pixels), height * (1 + 4 * width))
        self.assertGreater(len(set(pixels)), 50)
        texts = dict(body.split(b"\0", 1) for body in chunks[b"tEXt"])
        numbers = json.loads(texts[b"treeverify"])
        self.assertEqual(numbers["summary"], {k: v for k, v in run.items() if k not in ("text", "tokens", "own")})
        self.assertEqual(len(numbers["stages_us"]), run["rounds"])

    def test_figures(self):
        timing = tv.Timing(10, 20, 35, 1)
        def made(nodes, depth, accepted):
            return tv.Round(
                1, [0] * (accepted + 1), 0, 9, "", "greedy", True, None, list(range(accepted + 1)), [0] * (accepted + 1),
                nodes=nodes, depth=depth, timing=timing, rtt_s=0.0001,
            )

        got = figures([made(5, 2, 2), made(5, 2, 0), made(9, 4, 1), made(1, 0, 0)])
        self.assertEqual(got["acceptance_by_depth"], [2 / 3, 1 / 3, 0.0, 0.0])
        self.assertEqual(got["accepted_by_nodes"], [[0, 1, 0.0], [4, 2, 1.0], [8, 1, 1.0]])
        self.assertEqual(got["stages_us"], [[10, 20, 5, 65]] * 4)
        self.assertEqual(figures([]), {"acceptance_by_depth": [], "accepted_by_nodes": [], "stages_us": []})

    def test_seeds_and_stop(self):
        prompt = prompts(1)[0]
        seeded = ("--temperature", "0.8", "--max-tokens", "30", "--seed")
        first = self.json(prompt, *seeded, "7", "--store", STORE)
        self.assertEqual(first["tokens"], self.json(prompt, *seeded, "7", "--no-drafts")["tokens"])
        self.assertNotEqual(first["tokens"], self.json(prompt, *seeded, "8", "--no-drafts")["tokens"])
        stopped = self.json(prompt, "--store", STORE, "--stop", "32")
        self.assertEqual((stopped["finish"], stopped["tokens"].index(32)), ("stop", len(stopped["tokens"]) - 1))
        self.assertEqual(self.json(prompt, "--max-tokens", "1")["rounds"], 0)

    def test_over_a_flaky_link(self):
        prompt = prompts(1)[0]
        proxy = FlakyProxy(self.daemon, 0.1)
        self.addCleanup(self.close_leftovers)
        try:
            run = self.json(prompt, "--store", STORE, "--max-tokens", "40", url=proxy.url)
        finally:
            proxy.close()
        self.assertEqual(run["tokens"], self.plain(prompt, 40))
        self.assertGreater(run["retries"], 0)

    def test_live_line(self):
        """On a terminal: the status line stands outside the scrolling rows, and the terminal is left as it was."""
        main_end, terminal = pty.openpty()
        os.set_inheritable(terminal, True)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        command = [sys.executable, "-m", "treeverify", "generate", "--store", STORE, "--max-tokens", "30", "And God"]
        env = dict(PACKAGE_ENV, TREEVERIFY_URL=url_of(self.daemon))
        process = subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL, env=env)
        os.close(terminal)
        seen = b""
        while True:
            try:
                piece = os.read(main_end, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        os.close(main_end)
        self.assertEqual(process.wait(timeout=60), 0)
        text = seen.decode()
        self.assertIn("\x1b[1;23r", text)
        self.assertRegex(text, r"\x1b\[24;1H\x1b\[2K\d+ tokens/s \| acceptance length \d+\.\d\d \| \d+ rounds \| "
                               r"RTT \d+\.\d ms \| server \d+\.\d \| model \d+\.\d")
        self.assertGreater(text.rindex("\x1b[r"), text.rindex("tokens/s |"))
        self.assertIn("30 new tokens in ", text)
        self.assertIn("\x1b[1m", text)

    def test_interrupt(self):
        command = [sys.executable, "-m", "treeverify", "generate", "--no-drafts", "--max-tokens", "100000", "x"]
        env = dict(PACKAGE_ENV, TREEVERIFY_URL=url_of(self.daemon))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, error), (130, b""))
        self.assertEqual(self.client.sessions(), [])

    def test_interrupt_while_the_server_is_silent(self):
        for options in ((), ("--ahead",)):
            with Daemon(SERVER, MODEL) as daemon:
                command = [sys.executable, "-m", "treeverify", "generate", "--max-tokens", "2000", *options, "x"]
                env = dict(PACKAGE_ENV, TREEVERIFY_URL=url_of(daemon))
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
                process.stdout.read(20)
                daemon.process.send_signal(signal.SIGSTOP)
                process.send_signal(signal.SIGINT)
                try:
                    _, error = process.communicate(timeout=25)  # one attempt of a call takes 30 s
                finally:
                    process.kill()
                    daemon.process.send_signal(signal.SIGCONT)
                self.assertEqual((process.returncode, error), (130, b""))

    def test_streams_that_are_closed_or_ascii(self):
        words = f"{sys.executable} -m treeverify generate --max-tokens 4"
        env = dict(PACKAGE_ENV, TREEVERIFY_URL=url_of(self.daemon), PYTHONIOENCODING="ascii")
        for tail, code, out in (
            ("x 2>&-", 0, b"\n4 new tokens"), ("x >&-", 74, b""), ("- <&-", 64, b""), ("\u00e9", 0, b"\\xe9["),
        ):
            got = subprocess.run(["sh", "-c", f"{words} {tail}"], capture_output=True, env=env, timeout=60)
            self.assertEqual(got.returncode, code, got.stderr)
            self.assertIn(out, got.stdout)
            self.assertLessEqual(got.stderr.count(b"\n"), 1, got.stderr)

    def test_exit_codes(self):
        self.run_command(code=64)
        self.run_command("generate", code=64)
        self.run_command("generate", "", code=64)
        for wrong in (("--nodes", "0"), ("--nodes", "x"), ("--seed", "-1"), ("--temperature", "x"), ("--no-such",)):
            self.run_command("generate", *wrong, "x", code=64)
        for wrong in ("nan", "inf", "-1", "-inf"):
            _, error = self.run_command("generate", f"--temperature={wrong}", "x", code=64)
            self.assertIn(f"--temperature: {wrong} is not a finite number of at least 0", error)
        _, error = self.run_command("generate", "--restart-s", "nan", "x", code=64)
        self.assertIn("--restart-s: nan is not in 0 to 3600", error)
        for url in ("ftp://x", "http://[::1"):
            self.run_command("generate", "--url", url, "x", code=64)
        for command, file in ((("generate", "x"), "/nonexistent"), (("bench",), os.devnull)):
            for option in ("--key-file", "--cacert"):
                _, error = self.run_command(*command, option, file, code=66)
                self.assertIn(file, error)
        command = [sys.executable, "-m", "treeverify", "generate", "--max-tokens", "4", "x"]
        env = dict(PACKAGE_ENV, TREEVERIFY_URL=url_of(self.daemon))
        with open("/dev/full", "wb") as full:
            got = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, timeout=60)
        self.assertEqual((got.returncode, got.stderr.count(b"\n")), (74, 1), got.stderr)
        _, error = self.run_command("generate", "--store", "/nonexistent", "x", code=66)
        self.assertIn("/nonexistent", error)
        _, error = self.run_command("generate", "--temperature", "101", "x", code=76)
        self.assertIn("422 wrong-value at /sampling/temperature", error)
        text, _ = self.run_command("generate", "--json", "--temperature", "101", "x", code=76)
        self.assertEqual({k: json.loads(text)[k] for k in ("error", "committed")}, {"error": "wrong-value", "committed": False})
        self.assertIn("usage: ", self.run_command("generate", "--help")[0])
        self.assertIn(tv.__version__, self.run_command("--version")[0])

    def test_text(self):
        bytewise = ByteTokenizer()
        self.assertEqual(text_of(bytewise, [*"hä".encode(), 257, 65]), "hä<257>A")
        self.assertEqual(text_of(bytewise, [0xC3, 65, 0xC3]), "\ufffdA\ufffd")
        self.assertEqual([bar(0, 8, 4), bar(3, 8, 4), bar(8, 8, 4)], ["[....] 0/8", "[#...] 3/8", "[####] 8/8"])
        self.assertEqual(visible("a\x1b[2J\n\t\x07"), "a\\x1b[2J\n\t\\x07")

    def test_text_of_decoded_lists(self):
        """Pieces of a stream are the whole text: characters of several tokens wait, spaces depend on what stands before."""

        def decode(tokens):
            words = bytes(tokens).replace(b"_", b" ").decode(errors="replace")
            return words.removeprefix(" ")

        for text in ("_In_the_beginning", "hä_\u20ac\U0001f600_", "_a__b"):
            stream, pieces = DecodedText(decode), []
            for token in text.encode():
                pieces.append(stream.feed(token))
                self.assertNotIn("\ufffd", pieces[-1])
            self.assertEqual("".join(pieces) + stream.end(), decode(list(text.encode())))
        stream = DecodedText(decode)
        self.assertEqual(stream.feed(0xC3) + stream.end(), "\ufffd")
        stream = DecodedText(decode)
        self.assertGreater(len("".join(stream.feed(0xC3) for _ in range(20))), 8)

    def test_tokenizers(self):
        model = self.client.model()
        self.assertIsInstance(tokenizer_for(model), ByteTokenizer)
        with self.assertRaisesRegex(ValueError, "vocabulary of 1000"):
            tokenizer_for(dataclasses.replace(model, vocab=1000))
        if importlib.util.find_spec("tokenizers") is None:
            self.skipTest("tokenizers is not installed")
        files = tokenizer_for(model, MODEL)
        text = "In the beginning hä <b>"
        self.assertEqual(files.encode(text.encode()), list(text.encode()))
        self.assertEqual(text_of(files, list(text.encode())), text)
        self.assertEqual(self.json(b"And God", "--tokenizer", MODEL, "--max-tokens", "9")["tokens"],
                         self.plain(list(b"And God"), 9))
        with self.assertRaisesRegex(ValueError, "not the tokenizer"):
            tokenizer_for(dataclasses.replace(model, tokenizer_sha256="0" * 64), MODEL)
        self.assertRaises(ValueError, FileTokenizer, os.path.join(MODEL, "config.json"))

    def test_tally_counts_what_was_wanted(self):
        with tv.Client(url_of(self.daemon), retry=QUICK) as client, client.session([65, 66]) as session:
            tally = Tally(3)
            tally.take([(session.pending, True)])
            pairs = tally.add(session.decode(5))
            self.assertEqual((len(pairs), len(tally.tokens), tally.round_tokens, tally.rounds), (2, 3, 5, 5))


class ReadmeTest(DaemonTest):
    def test_the_drafter_of_the_readme(self):
        """The first Python block of clients/python/README.md runs against a daemon and pays."""
        code = readme_code(url_of(self.daemon)) + "\nprint()\nprint(len(session.new_tokens), session._core.next_seq - 1)\n"
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, env=PACKAGE_ENV, timeout=120, text=True)
        self.assertEqual(got.returncode, 0, got.stderr)
        lines = got.stdout.split("\n")
        tokens, rounds = map(int, lines[-2].split())
        self.assertEqual(tokens, 61)
        self.assertLess(rounds, 60)
        plain = self.plain(list(b"Holy, holy, holy, holy"), 61, tv.Sampling(rule="greedy"))
        self.assertEqual("\n".join(lines[:-2]), bytes(plain[1:]).decode())
