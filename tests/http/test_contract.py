"""Every route and every refusal that http/ makes, on both listeners, against the contract."""

import json
import socket
import unittest

from harness import Caller, FixedDaemon, Reader, request_bytes, round_body, verify_path

PROBES = ["/healthz", "/livez", "/health", "/v1/health", "/v2/health/live"]
READY = ["/readyz", "/v2/health/ready"]
NO_SESSION = "s_0123456789abcdefghijAB"


class ContractTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = FixedDaemon("--body-bytes", "4096", "--body-bytes-large", "3000000").__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.work, self.admin = Caller(self.daemon), Caller(self.daemon, admin=True)
        self.addCleanup(self.work.close)
        self.addCleanup(self.admin.close)

    def refused(self, answer, status, code):
        self.assertEqual((answer.status, answer.code), (status, code), answer.body)
        self.assertEqual(answer.json["committed"], False)

    def test_probes_on_both_listeners(self):
        for caller in (self.work, self.admin):
            for path in PROBES:
                self.assertEqual(caller.call("GET", path).json, {"status": "ok"})
            for path in READY:
                self.assertTrue(caller.call("GET", path).json["ready"])
            self.assertTrue(caller.call("GET", "/readyz?deep=1").json["ready"])
            self.assertEqual(caller.call("GET", "/v1/model", check=False).json["vocab"], 512)
            self.assertEqual(caller.call("GET", "/v1/parity").json["mode"], "off")

    def test_session_life(self):
        state = self.work.session()
        path = f"/v1/sessions/{state['session']}"
        self.assertEqual(state["pending"], 24)  # position 3 of the fixed engine
        answer = self.work.call("POST", verify_path(state), round_body(state, [31, 38, 9], [0, 1, 0]))
        self.assertEqual(answer.json["accepted"]["nodes"], [0, 1, 2])
        body = round_body(dict(state, **answer.json))
        extended = dict(seq=body["seq"], epoch=body["epoch"], expected_len=body["expected_len"], tokens=[7])
        self.assertEqual(self.work.call("POST", path + "/extend", extended).status, 200)
        current = self.work.call("GET", path + "?tail=3").json
        self.assertEqual(current["tail"], [31, 38, 7])
        decode = dict(
            seq=current["next_seq"],
            epoch=current["epoch"],
            expected_len=current["committed_len"],
            max_tokens=4,
        )
        self.assertEqual(len(self.work.call("POST", path + "/decode", decode).json["new_tokens"]), 4)
        self.assertEqual(self.work.call("GET", f"{path}/rounds/{decode['seq']}").status, 200)
        self.assertEqual(self.work.call("POST", path + "/renew", {"lease_s": 60}).status, 200)
        listed = self.work.call("GET", "/v1/sessions").json["sessions"]
        self.assertIn(state["session"], [entry["session"] for entry in listed])
        self.assertEqual(self.work.call("DELETE", path).status, 204)
        self.assertEqual(self.work.call("DELETE", path).status, 204)
        self.refused(self.work.call("GET", path), 404, "session-not-found")

    def test_tensor(self):
        state = self.work.session()
        want = {"logits": {"rows": "all", "via": "fetch"}}
        answer = self.work.call("POST", verify_path(state), round_body(state, [9], [0], want=want))
        tensor = self.work.call("GET", answer.json["logits"]["href"])
        self.assertEqual(tensor.status, 200)
        self.assertEqual(tensor.headers["content-type"], "application/octet-stream")
        self.assertEqual(tensor.headers["x-tensor-shape"], "2,512")
        self.assertEqual(tensor.headers["x-tensor-dtype"], "f32")
        self.assertEqual(len(tensor.body), 2 * 512 * 4)
        path = f"/v1/sessions/{state['session']}/rounds/1/tensor"
        self.assertEqual(len(self.work.call("GET", path + "?dtype=bf16&rows=stop").body), 1024)
        self.refused(self.work.call("GET", path + "?dtype=f64"), 400, "bad-request")

    def test_tensor_lists_every_node(self):
        """All 1,024 nodes by name, in an order of the client's; commas as they are and escaped."""
        count, width = 1024, 512 * 4
        with FixedDaemon("--max-nodes", str(count)) as daemon:
            work = Caller(daemon)
            state = work.session()
            drafts, parents = [node % 500 for node in range(1, count)], [(node - 1) // 400 for node in range(1, count)]
            body = round_body(state, drafts, parents, want={"logits": {"rows": "all", "via": "fetch"}})
            path = work.call("POST", verify_path(state), body).json["logits"]["href"]
            whole = work.call("GET", path).body
            self.assertEqual(len(whole), count * width)
            nodes = range(count - 1, -1, -1)
            for comma in (",", "%2C"):
                rows = comma.join(map(str, nodes))
                answer = work.call("GET", f"{path}&rows={rows}")
                self.assertEqual(answer.headers["x-tensor-shape"], f"{count},512")
                self.assertTrue(answer.body == b"".join(whole[node * width : (node + 1) * width] for node in nodes))
                self.refused(work.call("GET", f"{path}&rows={rows}{comma}0"), 400, "bad-request")
            work.close()

    def test_tensor_ranges(self):
        state = self.work.session()
        want = {"logits": {"rows": "all", "via": "fetch"}}
        body = round_body(state, [9], [0], want=want)
        path = self.work.call("POST", verify_path(state), body).json["logits"]["href"]
        whole = self.work.call("GET", path)
        data, tag = whole.body, whole.headers["etag"]
        self.assertEqual(len(data), 4096)
        good = {
            "0-0": (0, 0),
            "4-7": (4, 7),
            "4000-": (4000, 4095),
            "-1": (4095, 4095),
            "-9999": (0, 4095),
            "4095-9" + "9" * 30: (4095, 4095),
        }
        for text, (first, last) in good.items():
            part = self.work.call("GET", path, headers=["Range: bytes=" + text])
            self.assertEqual((part.status, part.body), (206, data[first : last + 1]), text)
            self.assertEqual(part.headers["content-range"], f"bytes {first}-{last}/4096")
            self.assertEqual(part.headers["etag"], tag)
        part = self.work.call("GET", path, headers=["Range: bytes=0-3", "If-Range: " + tag])
        self.assertEqual((part.status, part.body), (206, data[:4]))
        ignored = [["bytes=" + text] for text in ("4096-", "5-4", "-0", "0-1,3-4", "", "-", "a-b", "1-2x")]
        ignored += [["rows=0-1"], ["bytes=0-3", 'If-Range: "x"'], ["bytes=0-3", "If-Range: W/" + tag]]
        for lines in ignored:
            part = self.work.call("GET", path, headers=["Range: " + lines[0], *lines[1:]])
            self.assertEqual((part.status, part.body), (200, data), lines)
        head = self.work.call("HEAD", path, headers=["Range: bytes=0-3"])
        self.assertEqual((head.status, head.headers["content-length"]), (200, "4096"))
        self.assertEqual(self.work.call("GET", "/healthz", headers=["Range: bytes=0-1"]).status, 200)

    def test_one_shot(self):
        body = {"tokens": [1, 2, 3], "tree": {"tokens": [24, 31], "parents": [-1, 0]}}
        answer = self.work.call("POST", "/v1/verify", body)
        self.assertEqual(answer.json["new_tokens"], [31, 38])

    def test_digest_of_a_prompt(self):
        body = {"tokens": [1, 2, 3], "expected_digest": "0" * 32}
        answer = self.work.call("POST", "/v1/sessions", body)
        self.refused(answer, 409, "digest-mismatch")
        self.assertNotIn("session_state", answer.json)
        state = self.work.session()
        answer = self.work.call("POST", verify_path(state), round_body(state, expected_digest="0" * 32))
        self.refused(answer, 409, "digest-mismatch")
        self.assertIn("session_state", answer.json)

    def test_no_route(self):
        for path in ("/", "/v1", "/v1/sessions/", "/metrics/", "/healthz/", "/%68ealthz"):
            self.refused(self.work.call("GET", path), 404, "not-found")
        for path in ("/v1/sessions", "/v1/verify", f"/v1/sessions/{NO_SESSION}"):
            self.refused(self.admin.call("GET", path), 404, "not-found")
        self.refused(self.admin.call("POST", "/v1/verify", {}), 404, "not-found")
        for path in ("/v1/admin/status", "/index.html"):
            self.refused(self.work.call("GET", path), 404, "not-found")

    def test_wrong_method_names_the_right_ones(self):
        cases = {
            ("POST", "/healthz"): "GET, HEAD",
            ("GET", "/v1/verify"): "POST",
            ("PUT", "/v1/sessions"): "GET, HEAD, POST",
            ("PATCH", f"/v1/sessions/{NO_SESSION}"): "GET, HEAD, DELETE",
            ("OPTIONS", "/v1/parity"): "GET, HEAD, POST",
            ("DELETE", f"/v1/sessions/{NO_SESSION}/verify"): "POST",
        }
        for (method, path), allow in cases.items():
            answer = self.work.call(method, path)
            self.refused(answer, 405, "method-not-allowed")
            self.assertEqual(answer.headers["allow"], allow)

    def test_refusals_with_a_body_reach_the_client(self):
        """The answer must survive bytes that nobody reads (no reset before it is delivered)."""
        for _ in range(20):
            body = b"x" * 3000
            self.refused(self.work.call("POST", "/v1/nope", body), 404, "not-found")
            self.refused(self.work.call("PUT", "/v1/verify", body), 405, "method-not-allowed")
            kind = ["Content-Type: text/plain"]
            self.refused(self.work.call("POST", "/v1/verify", body, kind), 415, "media-type")

    def test_head_is_get_without_a_body(self):
        for path in PROBES + READY + ["/v1/sessions", "/v1/parity"]:
            got = self.work.call("GET", path)
            head = self.work.call("HEAD", path)
            self.assertEqual(head.status, got.status)
            self.assertEqual(head.body, b"")
            self.assertTrue(int(head.headers["content-length"]) > 0)
        self.assertEqual(self.work.call("HEAD", "/nope").status, 404)

    def test_request_ids(self):
        mine = self.work.call("GET", "/healthz", headers=["X-Request-Id: a.B-9_" + "x" * 58])
        self.assertEqual(mine.headers["x-request-id"], "a.B-9_" + "x" * 58)
        seen = set()
        for bad in ("x" * 65, "a b", "a/b", "", "\xe9"):
            answer = self.work.call("GET", "/healthz", headers=["X-Request-Id: " + bad])
            self.assertNotEqual(answer.headers["x-request-id"], bad)
            seen.add(answer.headers["x-request-id"])
        self.assertEqual(len(seen), 5)
        problem = self.work.call("GET", "/nope", headers=["X-Request-Id: mine-1"])
        self.assertEqual(problem.json["instance"], "mine-1")

    def test_media_types(self):
        body = {"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}
        raw = json.dumps(body).encode()
        for good in ("application/json", "Application/JSON", "application/json; charset=utf-8",
                     'application/json;charset="UTF-8"'):
            answer = self.work.call("POST", "/v1/verify", raw, ["Content-Type: " + good])
            self.assertEqual(answer.status, 200, good)
        for bad in ("text/json", "application/jsonx", "application/json; charset=latin-1",
                    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            answer = self.work.call("POST", "/v1/verify", raw, ["Content-Type: " + bad])
            self.refused(answer, 415, "media-type")
            self.assertEqual(answer.headers["connection"], "close")
        answer = self.work.call("POST", "/v1/verify", raw, ["Content-Encoding: gzip"])
        self.refused(answer, 415, "media-type")

    def test_query_strings(self):
        state = self.work.session()
        path = f"/v1/sessions/{state['session']}"
        self.assertEqual(self.work.call("GET", path + "?%74ail=%33").json["tail"], [1, 2, 3])
        for bad in ("?tail=3&tail=3", "?tail", "?tail=", "?tail=-1", "?tail=4097", "?tail=%", "?tail=%0",
                    "?tail=%00", "?tail=3%00", "?Tail=3", "?x=1", "?&", "?tail=3;x=1", "?tail=" + "1" * 600):
            self.refused(self.work.call("GET", path + bad), 400, "bad-request")
        for path in ("/healthz", "/v1/model", "/v1/sessions", "/v1/parity"):
            self.refused(self.work.call("GET", path + "?x=1"), 400, "bad-request")
        self.refused(self.work.call("GET", "/readyz?deep=2"), 400, "bad-request")
        one = {"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}
        self.refused(self.work.call("POST", "/v1/verify?strict=1", one), 400, "bad-request")
        self.assertEqual(self.work.call("GET", "/healthz?").status, 200)

    def test_targets(self):
        longest = "/" + "a" * 8190
        self.refused(self.work.call("GET", longest), 404, "not-found")
        self.refused(self.work.call("GET", longest + "a"), 400, "bad-request")
        for bad in ("healthz", "http://localhost/healthz", "*", "/a#b", "/\xe9", "/a\x7f"):
            self.refused(self.work.call("GET", bad), 400, "bad-request")

    def test_body_caps(self):
        """At the cap and one byte above, with a length and chunked, for both sizes of bodies."""
        state = self.work.session()
        for path, cap in ((verify_path(state), 4096), ("/v1/verify", 3000000)):
            for size, refused in ((cap, False), (cap + 1, True)):
                body = b"{" + b" " * (size - 2) + b"}"
                answer = self.work.call("POST", path, body)
                if refused:
                    self.refused(answer, 413, "body-too-large")
                    self.assertEqual(answer.headers["connection"], "close")
                else:
                    self.refused(answer, 400, "missing-field")
                self.check_chunked(path, body, refused)

    def check_chunked(self, path, body, refused):
        with self.daemon.connect() as sock:
            head = ["Content-Type: application/json", "Transfer-Encoding: chunked"]
            sock.sendall(request_bytes("POST", path, headers=head))
            for at in range(0, len(body), 65536):
                part = body[at : at + 65536]
                sock.sendall(b"%x\r\n%b\r\n" % (len(part), part))
            try:  # a refusal may have been answered and closed by now
                sock.sendall(b"0\r\n\r\n")
            except ConnectionError:
                self.assertTrue(refused)
            answer = Reader(sock).answer("POST", path)
        if refused:
            self.refused(answer, 413, "body-too-large")
        else:
            self.refused(answer, 400, "missing-field")

    def test_too_large_is_said_before_the_body(self):
        with self.daemon.connect(timeout=5) as sock:
            head = ["Content-Type: application/json", "Content-Length: 3000001", "Expect: 100-continue"]
            sock.sendall(request_bytes("POST", "/v1/verify", headers=head))
            reader = Reader(sock)
            answer = reader.answer("POST", "/v1/verify", skip_continue=False)
            self.refused(answer, 413, "body-too-large")
            self.assertTrue(reader.closed())

    def test_expect_continue_is_answered_at_once(self):
        body = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
        with self.daemon.connect(timeout=5) as sock:
            head = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue"]
            sock.sendall(request_bytes("POST", "/v1/verify", headers=head))
            reader = Reader(sock)
            self.assertEqual(reader.answer("POST", "/v1/verify", skip_continue=False).status, 100)
            sock.sendall(body)
            self.assertEqual(reader.answer("POST", "/v1/verify").status, 200)

    def test_pipelined_requests_are_answered_in_order(self):
        with self.daemon.connect(timeout=5) as sock:
            body = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
            names = [f"p-{i}" for i in range(8)]
            sock.sendall(
                b"".join(
                    request_bytes("POST", "/v1/verify", body, ["X-Request-Id: " + name])
                    for name in names
                )
            )
            reader = Reader(sock)
            got = [reader.answer("POST", "/v1/verify") for _ in names]
            self.assertEqual([answer.headers["x-request-id"] for answer in got], names)
            self.assertEqual({answer.status for answer in got}, {200})

    def test_chunked_with_trailers(self):
        """Trailers are read and mean nothing; the next request starts behind them."""
        body = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
        head = ["Content-Type: application/json", "Transfer-Encoding: chunked", "Trailer: X-Sum"]
        data = request_bytes("POST", "/v1/verify", headers=head)
        data += b"%x\r\n%b\r\n0\r\n" % (len(body), body)
        data += b"X-Sum: 1\r\nContent-Length: 5\r\nX-Request-Id: trailer\r\n\r\n"
        with self.daemon.connect(timeout=5) as sock:
            sock.sendall(data + request_bytes("GET", "/healthz", headers=["X-Request-Id: behind"]))
            reader = Reader(sock)
            answer = reader.answer("POST", "/v1/verify")
            self.assertEqual(answer.status, 200)
            self.assertNotEqual(answer.headers["x-request-id"], "trailer")
            answer = reader.answer("GET", "/healthz")
            self.assertEqual((answer.status, answer.headers["x-request-id"]), (200, "behind"))

    def test_connection_survives_refusals(self):
        """Refusals whose request was read to its end leave the connection usable, pipelined ones too."""
        one = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
        steps = [
            ("GET", "/nope", None, 404),
            ("OPTIONS", "/v1/verify", None, 405),
            ("HEAD", "/nope", None, 404),
            ("POST", "/v1/verify", b"{}", 400),
            ("POST", "/v1/verify", one.replace(b"-1", b"7"), 422),
            ("GET", "/healthz?x=1", None, 400),
            ("GET", f"/v1/sessions/{NO_SESSION}", None, 404),
            ("POST", "/v1/verify", one, 200),
        ]
        with self.daemon.connect(timeout=5) as sock:
            sock.sendall(b"".join(request_bytes(method, path, body) for method, path, body, _ in steps))
            reader = Reader(sock)
            for method, path, _, status in steps:
                answer = reader.answer(method, path)
                self.assertEqual(answer.status, status, path)
                self.assertNotIn("connection", answer.headers, (method, path))

    def test_an_expectation_nobody_knows(self):
        """Only 100-continue is defined; another one is not promised anything and not refused."""
        body = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
        answer = self.work.call("POST", "/v1/verify", body, ["Expect: miracles"])
        self.assertEqual(answer.status, 200)

    def test_empty_and_broken_bodies(self):
        for body in (b"", b"{", b"[]", b"nul", b'{"tokens":[1]}x', b"\xef\xbb\xbf{}", b"\xff"):
            answer = self.work.call("POST", "/v1/verify", body)
            self.assertEqual(answer.status, 400, body)

    def test_b44_nesting_and_stack(self):
        for depth in (9, 1000, 1001, 1000000):
            for body in (b"[" * depth, b'{"a":' * (depth * 5 // 9), (b'[{"a":' * depth)[: 3 * depth]):
                self.refused(self.work.call("POST", "/v1/verify", body), 400, "bad-json")
        self.assertEqual(self.work.call("GET", "/healthz").status, 200)

    def test_unknown_ids_are_all_alike(self):
        for name in (NO_SESSION, "x", "s_", "s_" + "A" * 500, "%00", "..", "s_0123456789abcdefghijA%42"):
            path = f"/v1/sessions/{name}"
            self.refused(self.work.call("GET", path), 404, "session-not-found")
            self.assertEqual(self.work.call("DELETE", path).status, 204)
            self.refused(self.work.call("POST", path + "/renew", {"lease_s": 5}), 404, "session-not-found")

    def test_a_body_where_none_belongs(self):
        for method, path in (("GET", "/healthz"), ("GET", "/v1/sessions"), ("DELETE", f"/v1/sessions/{NO_SESSION}")):
            self.refused(self.work.call(method, path, b"{}"), 400, "bad-request")

    def test_old_http(self):
        for host in (b"", b"Host: localhost\r\n"):
            with self.daemon.connect(timeout=5) as sock:
                sock.sendall(b"GET /healthz HTTP/1.0\r\n" + host + b"\r\n")
                reader = Reader(sock)
                self.assertEqual(reader.answer("GET", "/healthz").status, 200)
                self.assertTrue(reader.closed())

    def test_second_answer_is_not_delayed(self):
        """No 40 ms of delayed acknowledgement on a kept connection."""
        times = []
        import time

        for _ in range(50):
            start = time.monotonic()
            self.work.call("GET", "/healthz")
            times.append(time.monotonic() - start)
        self.assertLess(sorted(times)[25], 0.02)

    def test_bytes_in_pieces(self):
        body = json.dumps({"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}).encode()
        data = request_bytes("POST", "/v1/verify", body)
        with self.daemon.connect(timeout=10) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i in range(len(data)):
                sock.sendall(data[i : i + 1])
            self.assertEqual(Reader(sock).answer("POST", "/v1/verify").status, 200)


if __name__ == "__main__":
    unittest.main(verbosity=1)
