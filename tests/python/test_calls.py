"""Rules without input or output: retries, problems, arrays, the digest chain. A script plays the server."""

import asyncio
import base64
import dataclasses
import email.utils
import json
import socket
import threading
import time
import unittest

import numpy as np
from openapi import CODES

import treeverify as tv
from treeverify import oneshot
from treeverify.calls import Context, Pause, Reply, Retry, Send, call, encode, send
from treeverify.digest import Digest
from treeverify.errors import problem_of
from treeverify.asks import tokens_body
from treeverify.values import Logits, TopK, float_array


def problem(status, code, retryable=False, headers=None, **more):
    body = dict(status=status, code=code, retryable=retryable, committed=False, detail="d", title="t", **more)
    return Reply(status, headers or {}, json.dumps(body).encode())


def play(flow, script, now=None):
    """Run a flow against replies and exceptions; returns (result or exception, sends, pauses). now: a clock that pauses
    move."""
    script, sends, pauses = list(script), [], []
    try:
        effect = next(flow)
        while True:
            if isinstance(effect, Pause):
                pauses.append(effect.seconds)
                if now is not None:
                    now[0] += effect.seconds
                effect = flow.send(None)
                continue
            sends.append(effect)
            step = script.pop(0)
            effect = flow.throw(step) if isinstance(step, Exception) else flow.send(step)
    except StopIteration as stop:
        assert not script, "the flow asked less than the script has"
        return stop.value, sends, pauses
    except tv.Error as error:
        return error, sends, pauses


GOOD = Reply(200, {}, b'{"ok":true}')
LOST = tv.TransportError("lost")
REFUSED = tv.TransportError("nobody listens", refused=True)


class CallsTest(unittest.TestCase):
    def context(self, **retry):
        now = [0.0]
        return Context(Retry(**retry), clock=lambda: now[0], uniform=lambda: 1.0)

    def test_the_same_bytes_again(self):
        script = [LOST, problem(503, "overloaded", True), problem(504, "deadline", True), GOOD]
        context = self.context()
        result, sends, pauses = play(call(context, "POST", "/x", {"seq": 1, "a": [1, 2]}), script)
        self.assertEqual(result, {"ok": True})
        self.assertEqual(len(set(sends)), 1)
        self.assertEqual(sends[0], Send("POST", "/x", b'{"seq":1,"a":[1,2]}'))
        self.assertEqual(pauses, [0.05, 0.1, 0.2])
        self.assertEqual(context.retries, 3)

    def test_what_is_not_worth_another(self):
        for status, codes in CODES.items():
            for code in codes:
                if status not in (408, 429, 503, 504) and code not in ("session-busy", "kernel-fault"):
                    result, sends, _ = play(call(self.context(), "GET", "/x"), [problem(status, code)])
                    self.assertEqual((result.code, len(sends)), (code, 1))

    def test_retry_after(self):
        for text, least, most in (
            ("7", 7.0, 7.0),
            ("0", 0.05, 0.05),
            (email.utils.formatdate(time.time() + 20, usegmt=True), 18.0, 20.5),
            (email.utils.formatdate(time.time() - 20, usegmt=True), 0.05, 0.05),
            ("soon", 0.05, 0.05),
            ("-3", 0.05, 0.05),
            (f"Wed, 21 Oct {10**20} 07:28:00 GMT", 0.05, 0.05),
        ):
            reply = problem(429, "rate-limited", True, {"retry-after": text})
            _, _, pauses = play(call(self.context(), "GET", "/x"), [reply, GOOD])
            self.assertTrue(least <= pauses[0] <= most, (text, pauses))

    def test_bounds(self):
        result, sends, pauses = play(call(self.context(attempts=4), "GET", "/x"), [LOST] * 4)
        self.assertIs(result, LOST)
        self.assertEqual((len(sends), len(pauses)), (4, 3))
        late = problem(503, "draining", True, {"retry-after": "500"})
        result, sends, _ = play(call(self.context(), "GET", "/x"), [late])
        self.assertEqual((result.code, result.retry_after_s, len(sends)), ("draining", 500.0, 1))
        retry = Retry(attempts=100, base_s=0.1, cap_s=2.0)
        for failures in range(1, 80):
            longest = min(2.0, 0.1 * 2 ** (failures - 1))
            self.assertAlmostEqual(retry.pause_s(failures, None, lambda: 0.0), longest / 2)
            self.assertAlmostEqual(retry.pause_s(failures, None, lambda: 1.0), longest)
        nan, inf = float("nan"), float("inf")
        for bad in (
            dict(attempts=0), dict(total_s=0), dict(base_s=2, cap_s=1), dict(total_s=nan), dict(base_s=nan), dict(cap_s=nan),
            dict(base_s=inf, cap_s=inf), dict(restart_s=-1), dict(restart_s=nan),
        ):
            with self.assertRaises(ValueError):
                Retry(**bad)

    def test_a_server_that_restarts(self):
        """Refused connections, where somebody has answered before: waited for so long, and counted elsewhere."""
        def tried(script, answered=True, patient=True, **retry):
            now = [0.0]
            context = Context(Retry(**retry), clock=lambda: now[0], uniform=lambda: 1.0)
            if answered:
                play(call(context, "GET", "/x"), [problem(422, "wrong-value")])
            result, sends, pauses = play(call(context, "POST", "/x", {}, patient=patient), script, now)
            return result, len(sends), sum(pauses)

        pauses = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
        result, sends, waited = tried([REFUSED] * 13)
        self.assertEqual((result, sends), (REFUSED, 13))
        self.assertAlmostEqual(waited, 30.0)  # the pauses, and what is left for the last one
        self.assertLess(sum(pauses), 30.0)
        for fewer in (dict(answered=False), dict(patient=False), dict(restart_s=0)):
            self.assertEqual(tried([REFUSED] * 8, **fewer)[:2], (REFUSED, 8))
        self.assertEqual(tried([REFUSED], attempts=1)[:2], (REFUSED, 1))
        self.assertEqual(tried([REFUSED] * 5, attempts=3, restart_s=100.0, total_s=1.0)[:2], (REFUSED, 5))
        busy = problem(503, "loading", True)
        self.assertEqual(tried([LOST, *[REFUSED] * 9, busy, GOOD], attempts=3)[:2], ({"ok": True}, 12))
        self.assertEqual(tried([LOST, *[REFUSED] * 9, busy, LOST], attempts=3)[:2], (LOST, 12))
        # a proxy says it in its own words
        away = [Reply(status, {}, b"<h1>No server is available</h1>") for status in (502, 503, 504)]
        result, sends, waited = tried([*away, REFUSED, *away, *away, *away])
        self.assertEqual((result.status, result.code, sends), (504, "", 13))
        self.assertAlmostEqual(waited, 30.0)
        self.assertEqual(tried([*away, *away, *away, GOOD], attempts=2)[:2], ({"ok": True}, 10))
        self.assertEqual(tried([*away, *away, *away], answered=False)[1], 8)
        self.assertEqual(tried([Reply(503, {"retry-after": "7"}, b""), GOOD], attempts=2)[1:], (2, 7.0))
        self.assertEqual(tried([busy] * 8)[1], 8)

    def test_a_peer_that_hangs_up_in_the_handshake(self):
        """Of TLS: the package's own exception from either client, whatever the library below lets through."""
        async def ask(url):
            async with tv.AsyncClient(url, retry=Retry(attempts=1)) as client:
                with self.assertRaises(tv.TransportError):
                    await client.model()

        for said in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28"):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                def serve():
                    for _ in range(2):
                        connection = listener.accept()[0]
                        with connection:
                            connection.recv(4096)
                            connection.sendall(said)

                thread = threading.Thread(target=serve)
                thread.start()
                url = f"https://127.0.0.1:{listener.getsockname()[1]}"
                with tv.Client(url, retry=Retry(attempts=1)) as client, self.assertRaises(tv.TransportError):
                    client.model()
                asyncio.run(ask(url))
                thread.join()

    def test_refused_is_that_nobody_listens(self):
        async def ask(url):
            async with tv.AsyncClient(url, retry=Retry(attempts=1)) as client:
                await client.model()

        def plainly(url):
            with tv.Client(url, retry=Retry(attempts=1)) as client, self.assertRaises(tv.TransportError) as caught:
                client.model()
            return caught.exception.refused

        def ways(url):
            with self.assertRaises(tv.TransportError) as caught:
                asyncio.run(ask(url))
            return plainly(url), caught.exception.refused

        with socket.socket() as nobody, socket.socket() as mute:
            nobody.bind(("127.0.0.1", 0))
            self.assertEqual(ways(f"http://127.0.0.1:{nobody.getsockname()[1]}"), (True, True))
            mute.bind(("127.0.0.1", 0))
            mute.listen()

            thread = threading.Thread(target=lambda: mute.accept()[0].close())
            thread.start()
            self.assertFalse(plainly(f"https://127.0.0.1:{mute.getsockname()[1]}"))  # somebody is there
            thread.join()

    def test_answers_of_intermediaries(self):
        proxy_says = Reply(502, {"content-type": "text/html"}, b"<html>bad gateway")
        result, sends, _ = play(call(self.context(), "GET", "/x"), [proxy_says, GOOD])
        self.assertEqual((result, len(sends)), ({"ok": True}, 2))
        result, sends, _ = play(call(self.context(), "GET", "/x"), [Reply(404, {}, b"nope")])
        self.assertIsInstance(result, tv.NotFoundError)
        self.assertIsNone(result.committed)
        for content in (b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"):
            result, _, _ = play(call(self.context(), "GET", "/x"), [Reply(200, {}, content)])
            self.assertIsInstance(result, tv.ContractError)
        result, _, _ = play(call(self.context(), "GET", "/x"), [Reply(302, {"location": "/y"}, b"")])
        self.assertIsInstance(result, tv.ContractError)
        self.assertIn("302", str(result))

    def test_answers_without_what_was_asked(self):
        for content in (b"{}", b'{"logprobs":5,"items":{}}', b'{"logprobs":[null],"items":[]}'):
            answer = Reply(200, {}, content)
            context, tree = self.context(), tv.Tree.chain([1, 2])
            result, _, _ = play(oneshot.score(context, [1], tree, None, None), [answer])
            self.assertIsInstance(result, tv.ContractError)

    def test_every_problem_is_mapped(self):
        kinds = {
            "tree-invalid": tv.TreeRefusedError, "tree-too-large": tv.TreeRefusedError,
            "context-full": tv.ContextFullError, "session-finished": tv.FinishedError,
            "parity-mismatch": tv.ParityMismatchError, "kernel-fault": tv.ServerFaultError,
            "internal": tv.ServerFaultError, "numeric-fault": tv.ServerFaultError,
        }
        by_status = {
            400: tv.BadRequestError, 401: tv.AccessError, 403: tv.AccessError, 404: tv.NotFoundError,
            405: tv.BadRequestError, 408: tv.UnavailableError, 409: tv.ConflictError, 410: tv.GoneError,
            413: tv.BadRequestError, 415: tv.BadRequestError, 422: tv.BadRequestError, 429: tv.UnavailableError,
            503: tv.UnavailableError, 504: tv.UnavailableError,
        }
        count = 0
        for status, codes in CODES.items():
            for code in sorted(codes):
                body = dict(
                    code=code, title="T", detail="D", retryable=True, committed=False, pointer="/tree/tokens/3", node=3,
                    session_state={"next_seq": 4}, instance="id-1",
                )
                error = problem_of(status, body, 2.0)
                self.assertIs(type(error), kinds.get(code, by_status.get(status)), code)
                self.assertIsInstance(error, tv.ProblemError)
                seen = (error.code, error.status, error.committed, error.retryable, error.node, error.pointer)
                self.assertEqual(seen, (code, status, False, True, 3, "/tree/tokens/3"))
                self.assertEqual((error.session_state["next_seq"], error.request_id), (4, "id-1"))
                self.assertEqual(error.retry_after_s, 2.0)
                self.assertIn(code, str(error))
                count += 1
        self.assertGreater(count, 35)
        self.assertIs(type(problem_of(418, {"code": "later"})), tv.BadRequestError)

    def test_digest_chain(self):
        import hashlib

        value = hashlib.sha256(b"treeverify-kv-v1" + bytes(range(32)) + "sältz".encode()).digest()[:16]
        digest = Digest(bytes(range(32)).hex(), "sältz")
        self.assertEqual(digest.hex(), value.hex())
        for token in (0, 260, 2**31 - 1):
            value = hashlib.sha256(value + token.to_bytes(4, "little")).digest()[:16]
            digest.push([token])
        self.assertEqual(digest.hex(), value.hex())
        other = digest.copy().push([1])
        self.assertNotEqual(other.hex(), digest.hex())
        with self.assertRaises(ValueError):
            Digest("ab")

    def test_arrays(self):
        values = np.array([[0.0, -0.0, 1.5], [-np.inf, 65504.0, 2.0**-14]], dtype=np.float32)
        np.testing.assert_array_equal(float_array(values.tobytes(), "f32", (2, 3)), values)
        np.testing.assert_array_equal(float_array(values.astype("<f2").tobytes(), "f16", (2, 3)), values)
        bf16 = (values.view(np.uint32) >> 16).astype("<u2")
        widened = float_array(bf16.tobytes(), "bf16", (2, 3))
        np.testing.assert_array_equal(widened.view(np.uint32), values.view(np.uint32) >> 16 << 16)
        self.assertEqual(widened.dtype, np.float32)
        for data, dtype, shape in ((b"123", "f32", (1, 1)), (b"1234", "f64", (1, 1)), (b"1234", "bf16", (1, 3))):
            with self.assertRaises(tv.ContractError):
                float_array(data, dtype, shape)

    def test_topk_and_logits_refuse_other_shapes(self):
        def b64(array):
            return base64.b64encode(array.tobytes()).decode()

        good = {
            "k": 2, "rows": [0, 3], "shape": [2, 2], "ids_b64": b64(np.array([[1, 2], [3, 4]], "<i4")),
            "logits_b64": b64(np.array([[1, 0], [2, 1]], "<f4")), "lse_b64": b64(np.array([2, 3], "<f4")),
        }
        top = TopK.read(good)
        self.assertEqual(top.ids.tolist(), [[1, 2], [3, 4]])
        self.assertEqual(top.logprobs.tolist(), [[-1, -2], [-1, -2]])
        for change in (dict(shape=[3, 2]), dict(rows=[0]), dict(ids_b64="AAAA"), dict(lse_b64="!"), dict(lse_b64=3)):
            with self.assertRaises(tv.ContractError):
                TopK.read(dict(good, **change))
        with self.assertRaises(tv.ContractError):
            Logits.read({"rows": [0], "shape": [2, 1], "dtype": "f32", "data_b64": "AAAAAAAAAAA="})

    def test_tokens_body(self):
        self.assertEqual(tokens_body([1, 2]), {"tokens": [1, 2]})
        long = tokens_body(range(1000))
        self.assertEqual(np.frombuffer(base64.b64decode(long["tokens_b64"]), "<i4").tolist(), list(range(1000)))
        for dtype in (np.uint8, np.int16, np.int32, np.uint64):
            for count in (3, 100):
                self.assertEqual(tokens_body(np.arange(count, dtype=dtype)), tokens_body(list(range(count))))
        for bad in ([-1], [2**31], [2**70], [0.5], np.zeros((2, 2), int), np.array([[1]]), np.array([1.0]), "abc", 5):
            for given in (bad, bad * 100 if isinstance(bad, list) else bad):
                with self.assertRaisesRegex(ValueError, "^tokens: "):
                    tokens_body(given)

    def test_numbers_of_numpy(self):
        body = {"len": np.int64(3), "stop": [np.int32(1)], "temperature": np.float32(0.5), "hold": np.bool_(True)}
        self.assertEqual(encode(body), b'{"len":3,"stop":[1],"temperature":0.5,"hold":true}')
        for bad, kind in ((np.float32("nan"), ValueError), (float("inf"), ValueError), (object(), TypeError)):
            with self.assertRaises(kind):
                encode({"bad": bad})

    def test_sampling_seed(self):
        self.assertEqual(tv.Sampling(seed=2**64 - 1).body()["seed"], str(2**64 - 1))
        self.assertNotIn("seed", tv.Sampling().body())
        with self.assertRaises(ValueError):
            dataclasses.replace(tv.Sampling(), seed=2**64).body()

    def test_addresses(self):
        for bad in (
            "127.0.0.1:8471", "ftp://x", "http://", "http://x/v1", "http://x?y=1", "http://x#y", "http://u@x", "http://x:65536",
            "http://x:y", "http://[::1", "http://x\n:80",
        ):
            with self.assertRaises(Exception) as caught:
                tv.Client(bad)
            self.assertIn("HOST:PORT", str(caught.exception), bad)
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            for name in ("timeout_s", "connect_s"):
                with self.assertRaisesRegex(ValueError, name):
                    tv.Client(**{name: bad})
        for good in ("http://127.0.0.1:1/", "http://[::1]:8471", "https://gpu-host.example"):
            tv.Client(good).close()

    def test_send_gives_the_reply(self):
        raw = Reply(200, {"etag": "x"}, b"\x00\x01")
        self.assertIs(play(send(self.context(), Send("GET", "/t")), [raw])[0], raw)
