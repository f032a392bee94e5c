"""want.hidden over HTTP, on the real daemon: values, forms, bits, what is kept, what is refused.

The values are those of tests/support/mla.py, whose logits are first held to the transformers library's. TV_TEST_SCALE
below 1 takes the first model only (sanitizer builds).
"""

import base64
import os
import subprocess
import sys
import tempfile
import threading
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import mla  # noqa: E402
import tensors  # noqa: E402
from daemon import Daemon, Problem, Session  # noqa: E402

PROGRAM = os.environ["TREEVERIFYD"]
MODELS = os.path.dirname(os.environ["TV_MODEL_DIR"])
NAMES = ("v3", "v2lite", "moonlight")  # 3 layers of 64 values each
SCALE = float(os.environ.get("TV_TEST_SCALE", "1"))
HIDDEN = 64
TAPS = (2, 0, 3)  # of the daemon that most tests share; not in order
BOUND = 2e-4  # f32 against f64, beside values up to about 10
EXIT_USAGE, EXIT_CONFIG = 64, 78
GREEDY = {"rule": "greedy"}


def fp8_values():
    """The values of all 256 codes of fp8_e4m3; NaN for two of them."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, size, -size)


FP8 = fp8_values()


def read(data, dtype, shape):
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if dtype == "fp8_e4m3":
        return FP8[np.frombuffer(data, "u1")].astype("<f4").reshape(shape)
    return np.frombuffer(data, {"f32": "<f4", "f16": "<f2"}[dtype]).astype("<f4").reshape(shape)


def rounded(values, dtype):
    """What the f32 `values` must be in a dtype, by arithmetic of its own."""
    if dtype == "bf16":
        bits = values.view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
    if dtype == "fp8_e4m3":
        # the nearest code, and of two as near the one with an even mantissa
        table = FP8[:127]
        size = np.minimum(np.abs(values.astype(np.float64)), 448.0)
        distance = np.abs(size[..., None] - table) + (np.arange(127) % 2) * 1e-12
        return np.copysign(table[distance.argmin(axis=-1)], values).astype("<f4")
    return values.astype({"f32": "<f4", "f16": "<f2"}[dtype]).astype("<f4")


def values_of(block):
    return read(base64.b64decode(block["data_b64"], validate=True), block["dtype"], block["shape"])


def tree_streams(model, prefix, tokens, parents):
    """Rows of a tree behind a prefix, as the model's definition has them."""
    start, count = len(prefix), len(prefix) + len(tokens)
    positions, visible = np.arange(count), np.tri(count, dtype=bool)
    visible[start:, start:] = False
    for node, parent in enumerate(parents):
        at = start + node
        if parent >= 0:
            visible[at] = visible[start + parent]
        positions[at] = positions[start + parent] + 1 if parent >= 0 else start
        visible[at, at] = True
    return model.streams([*prefix, *tokens], positions, visible)[:, start:]


def start_refused(*options):
    command = [PROGRAM, "--model", os.path.join(MODELS, "v3"), "--listen", "127.0.0.1:0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


class ValuesTest(unittest.TestCase):
    """Every tap of every bundled architecture against an independent forward pass."""

    def check_model(self, name):
        model = mla.Model(os.path.join(MODELS, name))
        refs = tensors.load(os.path.join(MODELS, name, "refs.safetensors"))
        tokens = refs["seq_tokens"][:100].tolist()
        want = model.streams(tokens)
        difference = np.abs(model.logits(want[-1]) - refs["seq_logits"][:100]).max()
        self.assertLess(float(difference), 2e-4, "the reference itself is not the model")
        every = {"dtype": "f32", "rows": "all"}
        with Daemon(PROGRAM, os.path.join(MODELS, name), "--threads", "1", "--taps", "0,1,2,3") as daemon:
            client = daemon.client()
            created = client.post("/v1/sessions", {"tokens": tokens, "want": {"hidden": every}})["hidden"]
            self.assertEqual((created["taps"], created["shape"]), ([0, 1, 2, 3], [4, 100, HIDDEN]))
            self.assertEqual(created["rows"], list(range(100)))
            self.near(values_of(created), want)
            prefix, node_tokens, parents = (refs[part].tolist() for part in (
                "tree_prefix", "tree_random_tokens", "tree_random_parents"))
            tree = {"tokens": node_tokens, "parents": parents}
            block = client.post("/v1/verify", {"tokens": prefix, "tree": tree, "want": {"hidden": every}})["hidden"]
            want = tree_streams(model, prefix, node_tokens, parents)
            difference = np.abs(model.logits(want[-1]) - refs["tree_random_logits"]).max()
            self.assertLess(float(difference), 2e-4, "the reference itself is not the tree")
            self.near(values_of(block), want)
            client.close()

    def near(self, got, want):
        self.assertEqual(got.shape, want.shape)
        self.assertLess(float(np.abs(got - want).max()), BOUND)
        self.assertGreater(float(want.std()), 0.01)

    def test_values(self):
        for name in NAMES[: 1 if SCALE < 1 else None]:
            with self.subTest(name):
                self.check_model(name)


class HiddenTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        generator = np.random.default_rng(5)
        cls.matrix = (generator.normal(size=(40, len(TAPS) * HIDDEN)) / 8).astype("<f4")
        path = os.path.join(cls.folder.name, "drafter.safetensors")
        tensors.save(path, {"norm.weight": np.ones(8, "<f4"), "fc.weight": cls.matrix})
        cls.daemon = Daemon(
            PROGRAM, os.path.join(MODELS, "v3"), "--threads", "2", "--page-size", "16", "--inline-bytes", "200000",
            "--taps", ",".join(map(str, TAPS)), "--taps-projection", path,
        )
        cls.daemon.__enter__()
        cls.client = cls.daemon.client()
        refs = tensors.load(os.path.join(MODELS, "v3", "refs.safetensors"))
        cls.prompt = refs["seq_tokens"][:90].tolist()
        cls.drafts = refs["tree_random_tokens"][1:24].tolist()
        cls.parents = refs["tree_random_parents"][1:24].tolist()

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.daemon.__exit__(None, None, None)
        cls.folder.cleanup()

    def oneshot(self, hidden, **want):
        tree = {"tokens": [7, *self.drafts], "parents": [-1, *self.parents]}
        body = {"tokens": self.prompt, "tree": tree, "sampling": GREEDY, "want": {"hidden": hidden, **want}}
        return self.client.post("/v1/verify", body)

    def refused(self, hidden, pointer, text, **want):
        with self.assertRaises(Problem) as caught:
            self.oneshot(hidden, **want)
        problem = caught.exception
        self.assertEqual((problem.status, problem.code, problem.body["pointer"]), (422, "wrong-value", pointer))
        self.assertIn(text, problem.body["detail"])

    def test_model_tells_the_taps(self):
        model = self.client.get("/v1/model")
        self.assertEqual(model["taps"], list(TAPS))
        self.assertLessEqual({"want.hidden", "want.hidden.fetch", "want.hidden.project"}, set(model["features"]))

    def test_taps_and_rows(self):
        whole = values_of(self.oneshot({"rows": "all"})["hidden"])
        self.assertEqual(whole.shape, (len(TAPS), 24, HIDDEN))
        for taps in ([3], [0, 2], [3, 2, 0]):
            answer = self.oneshot({"taps": taps, "rows": [5, 0, 17]})["hidden"]
            self.assertEqual((answer["taps"], answer["rows"]), (taps, [5, 0, 17]))
            places = [TAPS.index(tap) for tap in taps]
            np.testing.assert_array_equal(values_of(answer), whole[places][:, [5, 0, 17]])
        answer = self.oneshot({})
        path = answer["accepted"]["nodes"]
        self.assertEqual((answer["hidden"]["rows"], answer["hidden"]["dtype"]), (path, "f32"))
        np.testing.assert_array_equal(values_of(answer["hidden"]), whole[:, path])
        answer = self.oneshot({}, rows="stop")  # the default of every row set
        np.testing.assert_array_equal(values_of(answer["hidden"]), whole[:, path[-1:]])

    def test_dtypes(self):
        exact = values_of(self.oneshot({"rows": "all", "dtype": "f32"})["hidden"])
        for dtype in ("bf16", "f16", "fp8_e4m3"):
            block = self.oneshot({"rows": "all", "dtype": dtype})["hidden"]
            self.assertEqual(block["dtype"], dtype)
            np.testing.assert_array_equal(values_of(block), rounded(exact, dtype), dtype)

    def test_projection(self):
        exact = values_of(self.oneshot({"rows": "all"})["hidden"])
        block = self.oneshot({"rows": "all", "project": True})["hidden"]
        self.assertEqual((block["project"], block["shape"], block["taps"]), (True, [24, 40], list(TAPS)))
        side_by_side = exact.transpose(1, 0, 2).reshape(24, -1).astype(np.float64)
        projected = values_of(block)
        self.assertLess(float(np.abs(projected - side_by_side @ self.matrix.T).max()), 1e-4)
        one = self.oneshot({"rows": [9], "project": True, "taps": list(TAPS), "dtype": "bf16"})["hidden"]
        np.testing.assert_array_equal(values_of(one), rounded(projected[9:10], "bf16"))

    def test_bits_do_not_depend_on_the_company(self):
        """Alone, in one launch with other trees, behind other trees, and once more."""
        sessions = [Session(self.client, self.prompt[: 70 + 5 * i], sampling=GREEDY) for i in range(3)]
        items = []
        for i, session in enumerate(sessions):
            count = 20 - 3 * i
            tree = {"tokens": [session.state["pending"], *self.drafts[:count]], "parents": [-1, *self.parents[:count]]}
            want = {"hidden": {"rows": "all"}} if i < 2 else {}
            items.append({"session": session.id, **session._base(), "tree": tree, "want": want})
        alone = []
        for i, item in enumerate(items[:2]):
            body = {"tokens": self.prompt[: 70 + 5 * i], "tree": item["tree"], "sampling": GREEDY, "want": item["want"]}
            alone.append(self.client.post("/v1/verify", body)["hidden"])
        answers = [item["body"] for item in self.client.post("/v1/verify:batch", {"items": items})["items"]]
        self.assertEqual([answer["hidden"] for answer in answers[:2]], alone)
        self.assertNotIn("hidden", answers[2])
        for session in sessions:
            session.close()

    def test_create(self):
        """Rows of a prompt: the same bits whatever is known of it, at whatever cut of the passes."""
        body = {"tokens": self.prompt, "sampling": GREEDY, "cache_salt": "create"}
        hidden = {"rows": "all", "taps": [0, 3]}
        first = self.client.post("/v1/sessions", {**body, "want": {"hidden": hidden}})
        self.assertEqual((first["cached_len"], first["hidden"]["shape"]), (0, [2, 90, HIDDEN]))
        whole = values_of(first["hidden"])
        again = self.client.post("/v1/sessions", {**body, "want": {"hidden": hidden}})
        self.assertEqual((again["cached_len"], again["hidden"], again["digest"]), (0, first["hidden"], first["digest"]))
        for rows, known in (("window:1", 80), ("window:10", 80), ("window:11", 64), ("window:58", 32), ("window:900", 0)):
            count = min(int(rows[7:]), 90)
            part = self.client.post("/v1/sessions", {**body, "want": {"hidden": {**hidden, "rows": rows}}})
            self.assertEqual((part["cached_len"], part["hidden"]["rows"]), (known, list(range(90 - count, 90))), rows)
            np.testing.assert_array_equal(values_of(part["hidden"]), whole[:, 90 - count :], rows)
            self.assertEqual((part["pending"], part["digest"]), (first["pending"], first["digest"]))
        prefix = {"prefix": {"session": first["session"], "len": 50}, "cache_salt": "create"}
        part = self.client.post("/v1/sessions", {**prefix, "want": {"hidden": {"rows": "window:3", "project": True}}})
        self.assertEqual((part["hidden"]["rows"], part["hidden"]["shape"]), ([47, 48, 49], [3, 40]))
        plain = self.client.post("/v1/sessions", body)
        self.assertNotIn("hidden", plain)
        self.assertEqual(plain["cached_len"], 80)

    def test_create_with_a_key(self):
        body = {"tokens": self.prompt, "want": {"hidden": {"rows": "window:4"}}}
        headers = {"Idempotency-Key": "hidden-1"}
        answers = [self.client.raw("POST", "/v1/sessions", body, headers) for _ in range(2)]
        self.assertEqual([answer[0] for answer in answers], [201, 201])
        self.assertEqual(answers[0][2], answers[1][2])
        other = {"tokens": self.prompt, "want": {"hidden": {"rows": "window:5"}}}
        self.assertEqual(self.client.raw("POST", "/v1/sessions", other, headers)[0], 422)

    def test_replay_is_equal(self):
        session = Session(self.client, self.prompt, sampling=GREEDY)
        for hidden in ({"rows": "all", "dtype": "bf16"}, {"rows": "all", "via": "fetch"}, {"project": True}):
            session.verify(self.drafts[:6], [0, 1, 2, 2, 4, 0], want={"hidden": hidden})
            session.verify_again()
        path, body = session.sent
        body = {**body, "want": {"hidden": {"project": False}}}
        with self.assertRaises(Problem) as caught:
            self.client.post(path, body)
        self.assertEqual(caught.exception.code, "seq-reused")
        session.close()

    def test_fetch(self):
        session = Session(self.client, self.prompt, sampling=GREEDY)
        inline = self.oneshot_of(session, {"rows": "all"})
        answer = session.verify(self.drafts, self.parents, want={
            "hidden": {"rows": "all", "dtype": "bf16", "via": "fetch"}, "logits": {"rows": "stop", "via": "fetch"}})
        block = answer["hidden"]
        self.assertEqual(block["href"], f"/v1/sessions/{session.id}/rounds/1/tensor?what=hidden")
        self.assertEqual(block["shape"], [3, 24, HIDDEN])
        for query, dtype, rows in (
            ("", "bf16", range(24)),
            ("&dtype=f32", "f32", range(24)),
            ("&dtype=fp8_e4m3&rows=4,2", "fp8_e4m3", [4, 2]),
            ("&dtype=f16&rows=path", "f16", answer["accepted"]["nodes"]),
            ("&dtype=f32&rows=stop", "f32", answer["accepted"]["nodes"][-1:]),
        ):
            status, headers, data = self.client.raw("GET", block["href"] + query)
            shape = [3, len(rows), HIDDEN]
            self.assertEqual((status, headers["X-Tensor-Dtype"]), (200, dtype))
            self.assertEqual(headers["X-Tensor-Shape"], ",".join(map(str, shape)))
            np.testing.assert_array_equal(read(data, dtype, shape), rounded(inline[:, list(rows)], dtype), query)
        status, headers, part = self.client.raw("GET", block["href"], headers={"Range": "bytes=128-255"})
        self.assertEqual((status, len(part)), (206, 128))
        logits = f"/v1/sessions/{session.id}/rounds/1/tensor"
        self.assertEqual(self.client.raw("GET", logits)[1]["X-Tensor-Shape"], "1,307")
        status, _, _ = self.client.raw("GET", logits + "?what=logits&dtype=fp8_e4m3")
        self.assertEqual(status, 400)
        session.verify([], [], want={"hidden": {"project": True, "via": "fetch"}})
        self.assertEqual(self.client.raw("GET", block["href"])[0], 410)  # the last round's alone
        newest = block["href"].replace("/1/", "/2/")
        self.assertEqual(self.client.raw("GET", newest)[1]["X-Tensor-Shape"], "1,40")
        self.assertEqual(self.client.raw("GET", newest + "&rows=3")[0], 422)
        self.assertEqual(self.client.raw("GET", newest.replace("hidden", "logits"))[0], 410)
        session.close()

    def oneshot_of(self, session, hidden):
        tree = {"tokens": [session.state["pending"], *self.drafts], "parents": [-1, *self.parents]}
        body = {"tokens": self.prompt, "tree": tree, "sampling": GREEDY, "want": {"hidden": hidden}}
        return values_of(self.client.post("/v1/verify", body)["hidden"])

    def test_held_rounds(self):
        session = Session(self.client, self.prompt, sampling=GREEDY)
        whole = self.oneshot_of(session, {"rows": "all"})
        answer = session.client.post(f"/v1/sessions/{session.id}/verify", {
            **session._base(), "rule": "client",
            "tree": {"tokens": [session.state["pending"], *self.drafts], "parents": [-1, *self.parents]},
            "want": {"hidden": {"rows": "all"}}})
        self.assertEqual((answer["status"], answer["hidden"]["rows"]), ("held", list(range(24))))
        np.testing.assert_array_equal(values_of(answer["hidden"]), whole)
        session.close()

    def test_refusals(self):
        self.refused({"taps": [2, 1]}, "/want/hidden/taps/1", "1 is not tapped")
        self.refused({"taps": [0, 3, 0]}, "/want/hidden/taps/2", "0 is listed twice")
        self.refused({"taps": []}, "/want/hidden/taps", "empty list")
        self.refused({"dtype": "f64"}, "/want/hidden/dtype", "fp8_e4m3 is expected")
        self.refused({"rows": [30]}, "/want/hidden/rows/0", "not in the tree")
        self.refused({"via": "fetch"}, "/want/hidden/via", "only inline")
        self.refused({"project": True, "taps": [0, 2, 3]}, "/want/hidden", "in the order of /v1/model")
        self.refused({"project": True, "taps": [2]}, "/want/hidden", "every tap")
        create = {"tokens": self.prompt, "want": {"hidden": {"rows": "window:0"}}}
        for hidden, status in (({"rows": "window:0"}, 422), ({"rows": [1]}, 400), ({"via": "fetch"}, 422), ({"x": 1}, 400)):
            create["want"]["hidden"] = hidden
            self.assertEqual(self.client.raw("POST", "/v1/sessions", create)[0], status, hidden)

    def test_inline_limit(self):
        """200,000 bytes: a tree's longest path counts, a prompt's rows, and the blocks of an answer together."""
        row = len(TAPS) * HIDDEN * 4
        prompt = [1 + i % 250 for i in range(200000 // row + 1)]
        create = {"tokens": prompt[:-1], "want": {"hidden": {}}}
        self.assertEqual(self.client.raw("POST", "/v1/sessions", create)[0], 201)
        create["tokens"] = prompt
        status, _, data = self.client.raw("POST", "/v1/sessions", create)
        self.assertEqual(status, 422)
        self.assertIn(b"over the limit of 200000", data)
        create["want"]["hidden"]["dtype"] = "fp8_e4m3"
        self.assertEqual(self.client.raw("POST", "/v1/sessions", create)[0], 201)
        nodes = (200000 - 100 * 307 * 4) // row  # beside 100 rows of logits
        tree = {"tokens": list(range(1, 121)), "parents": [-1, *[0] * 119]}
        want = {"logits": {"rows": list(range(100))}, "hidden": {"rows": list(range(nodes))}}
        body = {"tokens": [1], "tree": tree, "want": want}
        self.assertEqual(self.client.raw("POST", "/v1/verify", body)[0], 200)
        want["hidden"]["rows"].append(nodes)
        self.assertEqual(self.client.raw("POST", "/v1/verify", body)[0], 422)


class BetweenTest(unittest.TestCase):
    """A prompt's pass is interrupted by rounds that ask for hidden rows too: neither sees the other's."""

    def test_bits(self):
        with Daemon(PROGRAM, os.path.join(MODELS, "v3"), "--threads", "1", "--taps", "0,1,2,3") as daemon:
            client = daemon.client()
            prompt = [1 + (7 * i) % 300 for i in range(200 if SCALE < 1 else 700)]
            create = {"tokens": prompt, "sampling": GREEDY, "want": {"hidden": {"rows": "all", "dtype": "bf16"}}}
            tree = {"tokens": [3, 4, 5, 6], "parents": [-1, 0, 1, 0]}
            round = {"tokens": prompt[:20], "tree": tree, "sampling": GREEDY, "want": {"hidden": {"rows": "all"}}}
            alone = client.post("/v1/sessions", create)["hidden"], client.post("/v1/verify", round)["hidden"]
            ended, rounds = threading.Event(), []

            def others():
                caller = daemon.client()
                while not ended.is_set() or not rounds:
                    rounds.append(caller.post("/v1/verify", round)["hidden"])
                caller.close()

            thread = threading.Thread(target=others)
            thread.start()
            try:
                again = client.post("/v1/sessions", create)["hidden"]
            finally:
                ended.set()
                thread.join()
            self.assertEqual(again, alone[0])
            self.assertEqual(rounds, [alone[1]] * len(rounds))
            client.close()


class FetchLimitTest(unittest.TestCase):
    def test_limit(self):
        """1 MiB for all sessions, as f32 whatever the dtype: four rounds of 256 rows, and of the fifth the oldest goes."""
        options = ("--threads", "1", "--taps", "0,1,2,3", "--fetch-bytes", str(1 << 20))
        with Daemon(PROGRAM, os.path.join(MODELS, "v3"), *options) as daemon:
            client = daemon.client()
            want = {"hidden": {"rows": "all", "via": "fetch", "dtype": "fp8_e4m3"}}
            links = []
            for _ in range(5):
                session = Session(client, [1, 2, 3], sampling=GREEDY)
                links.append(session.verify(list(range(255)), [0] * 255, want=want)["hidden"]["href"])
            self.assertEqual([client.raw("GET", link)[0] for link in links], [410, 200, 200, 200, 200])
            client.close()


class StartTest(unittest.TestCase):
    def test_without_taps(self):
        with Daemon(PROGRAM, os.path.join(MODELS, "v3"), "--threads", "1") as daemon:
            client = daemon.client()
            model = client.get("/v1/model")
            self.assertEqual(model["taps"], [])
            self.assertNotIn("want.hidden", model["features"])
            tree = {"tokens": [1], "parents": [-1]}
            for path, body in (("/v1/verify", {"tokens": [1], "tree": tree}), ("/v1/sessions", {"tokens": [1]})):
                with self.assertRaises(Problem) as caught:
                    client.post(path, {**body, "want": {"hidden": {}}})
                problem = caught.exception
                self.assertEqual((problem.code, problem.body["pointer"]), ("wrong-value", "/want/hidden"))
                self.assertIn("taps is empty", problem.body["detail"])
            client.close()

    def test_without_a_projection(self):
        with Daemon(PROGRAM, os.path.join(MODELS, "v3"), "--threads", "1", "--taps", "1") as daemon:
            client = daemon.client()
            self.assertNotIn("want.hidden.project", client.get("/v1/model")["features"])
            body = {"tokens": [1], "tree": {"tokens": [1], "parents": [-1]}, "want": {"hidden": {"project": True}}}
            with self.assertRaises(Problem) as caught:
                client.post("/v1/verify", body)
            self.assertIn("no projection is registered", caught.exception.body["detail"])
            client.close()

    def test_refused_starts(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for name, arrays in (
                ("other", {"weight": np.ones((4, 64), "<f4")}),
                ("narrow", {"fc.weight": np.ones((4, 63), "<f4")}),
                ("bias", {"fc.weight": np.ones((4, 64), "<f4"), "fc.bias": np.ones(4, "<f4")}),
                ("infinite", {"fc.weight": np.full((4, 64), np.inf, "<f4")}),
            ):
                paths[name] = os.path.join(folder, name)
                tensors.save(paths[name], arrays)
            paths["none"] = os.path.join(folder, "nothing-there")
            paths["text"] = __file__
            for options, text in (
                (["--taps", "4"], "taps: 4 is outside of 0 to 3"),
                (["--taps", "1,2,1"], "different layers"),
                (["--taps", "1,"], "different layers"),
                (["--taps", "-1"], "different layers"),
                (["--taps", ",".join(map(str, range(17)))], "up to 16 different layers"),
                (["--taps-projection", paths["bias"]], "no taps to project"),
                (["--taps", "1", "--taps-projection", paths["other"]], "has no tensor fc.weight"),
                (["--taps", "1", "--taps-projection", paths["narrow"]], "shape [4, 63]; 1 taps of 64 values need [n, 64]"),
                (["--taps", "1", "--taps-projection", paths["bias"]], "has a bias (fc.bias)"),
                (["--taps", "1", "--taps-projection", paths["infinite"]], "256 of 256 values are not finite"),
                (["--taps", "1", "--taps-projection", paths["none"]], "No such file"),
                (["--taps", "1", "--taps-projection", paths["text"]], os.path.basename(__file__)),
            ):
                ended = start_refused(*options)
                code = EXIT_USAGE if "different layers" in text else EXIT_CONFIG  # as what the command line says
                self.assertEqual((ended.returncode, ended.stdout), (code, ""), (options, ended.stderr))
                self.assertIn(text, ended.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
