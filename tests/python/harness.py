"""What the tests of the Python client share: a daemon, a proxy that loses answers, prompts.

pytest runs them: `cd clients/python && pytest`, one file or all. Without TREEVERIFYD in the environment (Meson sets it) the
daemon is that of build/. Where httpx is missing they are skipped (conftest.py). TV_TEST_SCALE below 1 shortens loops.
"""

import io
import json
import os
import random
import unittest

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

try:
    import httpx
except ImportError:
    pytest.skip("httpx is not installed", allow_module_level=True)

import proxy
from daemon import Daemon

from treeverify import Client, Retry, Sampling

SCALE = float(os.environ.get("TV_TEST_SCALE", "1"))
SERVER = os.environ.get("TREEVERIFYD") or os.path.join(ROOT, "build", "daemon", "treeverifyd")
MODEL = os.path.join(ROOT, "tests", "models", "kjv-mla-8m")
STORE = os.path.join(ROOT, "clients", "cli", "data", "kjv-store.txt")
GREEDY = Sampling(rule="greedy")
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=1234567890123456789)
SEED = int(os.environ.get("TV_TEST_SEED", "20261129"))
QUICK = Retry(attempts=30, total_s=60.0, base_s=0.001, cap_s=0.05)
PACKAGE_PATH = [os.path.join(ROOT, "clients", "python", "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
PACKAGE_ENV = dict(os.environ, PYTHONPATH=os.pathsep.join(PACKAGE_PATH))


def prompts(count, length=120):
    with open(os.path.join(ROOT, "tests", "golden", "kjv_tail.txt"), "rb") as file:
        text = file.read()
    step = (len(text) - length - 20000) // count
    return [list(text[20000 + i * step : 20000 + i * step + length]) for i in range(count)]


def readme_code(url):
    """The first Python block of clients/python/README.md, for the daemon at url."""
    with open(os.path.join(ROOT, "clients", "python", "README.md"), encoding="utf-8") as file:
        code = file.read().split("```python\n")[1].split("```")[0]
    assert "http://127.0.0.1:8471" in code
    return code.replace("http://127.0.0.1:8471", url)


def url_of(daemon):
    return f"http://{daemon.host}:{daemon.port}"


class DaemonTest(unittest.TestCase):
    """One daemon with the bundled model for the whole class: .client, .raw (support/daemon.py's own client)."""

    options = ()

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(SERVER, MODEL, *cls.options).__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.client = Client(url_of(self.daemon), timeout_s=120)
        self.addCleanup(self.client.close)
        self.raw = self.daemon.client()
        self.addCleanup(self.raw.close)

    def close_leftovers(self):
        """Sessions of creates whose answers were lost."""
        for state in self.client.sessions():
            self.raw.call("DELETE", f"/v1/sessions/{state['session']}")

    def plain(self, prompt, count, sampling=GREEDY):
        """Pending token and count - 1 more, decoded by the server alone."""
        with self.client.session(prompt, sampling=sampling) as session:
            session.decode(count - 1)
            return session.new_tokens


class Hooked(httpx.BaseTransport):
    """Passes on; `after(request, response)` may raise or return another response."""

    def __init__(self, after):
        self.inner, self.after = httpx.HTTPTransport(), after

    def handle_request(self, request):
        response = self.inner.handle_request(request)
        response.read()
        return self.after(request, response)

    def close(self):
        self.inner.close()


def rewritten(response, change):
    body = json.loads(response.content)
    change(body)
    headers = {"content-type": response.headers["content-type"]}
    return httpx.Response(response.status_code, headers=headers, content=json.dumps(body).encode())


class FlakyHandler(proxy.Handler):
    """Passes on, or loses the request, or loses or cuts the answer, or says 503, as the server's random source draws."""

    def relay(self):
        fates, chance = ("request lost", "answer lost", "answer cut", "busy"), self.server.chance
        fate = self.server.random.choice(fates) if self.server.random.random() < chance else "passed"
        self.server.fates[fate] = self.server.fates.get(fate, 0) + 1
        if fate == "passed":
            return super().relay()
        self.close_connection = True
        if fate == "request lost":
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return None
        if fate == "busy":
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"code": "overloaded", "status": 503, "retryable": True, "committed": False}).encode()
            self.send_response_only(503)
            self.send_header("Content-Type", "application/problem+json")
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None
        kept, self.wfile = self.wfile, io.BytesIO()
        try:
            super().relay()
            answer = self.wfile.getvalue()
        finally:
            self.wfile = kept
        if fate == "answer cut":
            self.wfile.write(answer[: self.server.cuts.randrange(1, len(answer))])
        return None

    do_GET = do_POST = do_DELETE = do_HEAD = relay


class FlakyProxy(proxy.ContractProxy):
    """chance: of a request to meet a fault. close() raises answers of the daemon that broke the contract."""

    def __init__(self, daemon, chance, seed=SEED):
        super().__init__(daemon.host, daemon.port)
        print(f"seed {seed}", flush=True)
        self.server.RequestHandlerClass = FlakyHandler
        self.server.random, self.server.chance, self.server.fates = random.Random(seed), chance, {}
        self.server.cuts = random.Random(seed + 1)  # its draws depend on lengths, which times in answers change
        self.server.handle_error = lambda request, address: None  # a daemon that died is part of the tests

    def turn_to(self, daemon):
        self.server.upstream = (daemon.host, daemon.port)

    @property
    def fates(self):
        return self.server.fates
