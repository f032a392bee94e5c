"""What tests of the C library share: the library on a leash (drive.c), a daemon, and texts that the daemon decodes alone.

The first words of such a test are DRIVE TREEVERIFYD MODEL_DIR TEXT.
"""

import json
import os
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon

SCALE = float(os.environ.get("TV_TEST_SCALE", "1"))
GREEDY = ("greedy", 0, "-")
SEEDED = ("target_walk", 0.8, 1234567890123456789)


def joined(items):
    return ",".join(map(str, items)) or "-"


def chain(tokens):
    """TOKENS PARENTS of a tree that is one path."""
    return joined(tokens), joined(range(-1, len(tokens) - 1))


def tree(text, wrong):
    """The next tokens of the text as a chain, each with a wrong sibling; the chain's last `wrong` are wrong too."""
    tokens, parents, at = [text[0]], [-1], 0
    for depth, token in enumerate(text[1:], 1):
        right = token if depth < len(text) - wrong else (token + 1) % 256
        tokens += [(token + 2) % 256, right]
        parents += [at, at]
        at = len(tokens) - 1
    return joined(tokens), joined(parents)


class Drive:
    """The library in a process of its own; answers as dicts."""

    def __init__(self, program, url, retries=30, backoff_ms=1, env=None):
        command = [program, url, str(retries), str(backoff_ms)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.code = self.process.wait(timeout=60)
        self.process.stdout.close()
        assert self.code == 0, f"drive ended with {self.code}"

    def say(self, *words, error=0):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        allowed = error if isinstance(error, tuple) else (error,)
        assert answer["error"] in allowed, (words, answer["error"], answer["code"])
        assert answer["said"] == (answer["error"] != 0), (words, answer)  # a problem has words, a success has none
        return answer

    def create(self, prompt, sampling=GREEDY, max_len=0):
        return self.say("create", *sampling, max_len, joined(prompt))

    def chain(self, tokens, **options):
        return self.say("verify", *chain(tokens), **options)


class LeashTest(unittest.TestCase):
    DRIVE, SERVER, MODEL, TEXT = sys.argv[1:5]

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(cls.SERVER, cls.MODEL).__enter__()
        cls.url = f"http://{cls.daemon.host}:{cls.daemon.port}"

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.raw = self.daemon.client()
        self.addCleanup(self.raw.close)

    def drive(self, url, retries=30, backoff_ms=1):
        return Drive(self.DRIVE, url, retries, backoff_ms)

    def prompts(self, count, length=120 if SCALE >= 1 else 40):
        with open(self.TEXT, "rb") as file:
            text = file.read()
        step = (len(text) - length - 20000) // count
        return [list(text[20000 + i * step : 20000 + i * step + length]) for i in range(count)]

    def plain(self, prompt, count, sampling=GREEDY):
        """Pending token and count - 1 more, decoded by the server alone."""
        rule, temperature, seed = sampling
        wanted = {"rule": rule} if rule == "greedy" else {"rule": rule, "temperature": temperature, "seed": str(seed)}
        state = self.raw.post("/v1/sessions", {"tokens": prompt, "sampling": wanted})
        text, path, epoch = [state["pending"]], f"/v1/sessions/{state['session']}", state["epoch"]
        while len(text) < count:
            body = {"seq": state["next_seq"], "epoch": epoch, "expected_len": state["committed_len"]}
            state = self.raw.post(path + "/decode", {**body, "max_tokens": min(1024, count - len(text))})
            text += state["new_tokens"]
        self.raw.call("DELETE", path)
        return text
