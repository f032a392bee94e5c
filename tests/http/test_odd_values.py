"""B22, B41, B42, B43, B58 end to end: values that no caller should send, and a pool that is too small.

Each is refused with the documented status while a session beside it keeps the bits of its logits.
"""

import json
import os
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import tensors  # noqa: E402
from harness import Caller, round_body, verify_path, wait_until  # noqa: E402
from real import MODEL, Beside, RealDaemon  # noqa: E402

TYPE, VALUE = (400, "wrong-type"), (422, "wrong-value")


def raw(body, **texts):
    """JSON with members written as they are given here: 1e0, NaN, ..."""
    for name in texts:
        assert f'"@{name}"' in json.dumps(body), name
    text = json.dumps(body)
    for name, value in texts.items():
        text = text.replace(f'"@{name}"', value)
    return text.encode()


class OddValueTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = RealDaemon().__enter__()
        caller = Caller(cls.daemon)
        cls.vocab = caller.call("GET", "/v1/model").json["vocab"]
        caller.close()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.caller = Caller(self.daemon)
        self.addCleanup(self.caller.close)

    def post(self, path, body, expected, what):
        answer = self.caller.call("POST", path, body)
        got = (answer.status, answer.code if answer.status >= 400 else None)
        self.assertEqual(got, expected, f"{what}: {answer.body[:300]}")
        if answer.status >= 400:
            self.assertIs(answer.json["committed"], False, what)
        return answer

    def ready(self):
        self.assertEqual(self.caller.call("GET", "/readyz").status, 200)

    def state(self, session):
        state = self.caller.call("GET", f"/v1/sessions/{session}?tail=4096").json
        state.pop("lease_expires_at")
        return state

    def test_b22_odd_sampling_over_the_wire(self):
        served, refused = (201, None), []
        cases = {
            "temperature": {"0": served, "-0": served, "1e-45": served, "1e-6": served, "0.99999999e-4": served,
                            "1e-4": served, "100": served, "1e30": VALUE, "-1": VALUE, "null": TYPE, '"1"': TYPE},
            "top_p": {"1e-9": served, "1": served, "0": VALUE, "1.0000001": VALUE, "-1": VALUE},
            "top_k": {"0": served, "1": served, f"{self.vocab}": served, f"{self.vocab + 1}": VALUE,
                      "2147483648": VALUE, "-1": VALUE},
        }  # fmt: skip
        prompt = [1, 2, 3, 4]
        best = self.caller.session(tokens=prompt, sampling={"rule": "greedy"})["pending"]
        with Beside(self.daemon):
            for name, values in cases.items():
                for text, expected in values.items():
                    sampling = {"seed": "5", name: "@it"}
                    body = raw({"tokens": prompt, "sampling": sampling}, it=text)
                    answer = self.post("/v1/sessions", body, expected, f"{name} {text}")
                    tree = {"tokens": [7], "parents": [-1]}
                    one_shot = raw({"tokens": prompt, "tree": tree, "sampling": sampling}, it=text)
                    code = (200, None) if expected == served else expected
                    self.post("/v1/verify", one_shot, code, f"one-shot {name} {text}")
                    if expected != served:
                        self.assertEqual(answer.json["pointer"], f"/sampling/{name}")
                        refused.append(text)
                        continue
                    if (name, text) in (("top_p", "1e-9"), ("top_k", "1")) or (name == "temperature" and float(text) < 1e-4):
                        self.assertEqual(answer.json["pending"], best, f"{name} {text}: only the best is left")
                    self.assertIn(answer.json["pending"], range(self.vocab))
                    self.caller.call("DELETE", f"/v1/sessions/{answer.json['session']}")
        self.assertEqual(len(refused), 10)
        self.ready()

    def test_b41_not_a_number_in_bodies(self):
        """No spelling of infinity or of no number gets in, in any place that holds a number."""
        state = self.caller.session(tokens=[1, 2, 3])
        before = self.state(state["session"])
        words = {"NaN": "bad-json", "Infinity": "bad-json", "-Infinity": "bad-json", "nan": "bad-json",
                 "inf": "bad-json", "1e999": "wrong-type", "-1e999": "wrong-type", "1e400": "wrong-type"}  # fmt: skip
        places = {
            "temperature": ("/v1/sessions", {"tokens": [1], "sampling": {"temperature": "@it"}}),
            "top_p": ("/v1/sessions", {"tokens": [1], "sampling": {"top_p": "@it"}}),
            "min_p": ("/v1/sessions", {"tokens": [1], "sampling": {"min_p": "@it"}}),
            "token": ("/v1/sessions", {"tokens": [1, "@it"]}),
            "seq": (verify_path(state), round_body(dict(state, next_seq="@it"))),
            "parent": (verify_path(state), round_body(state, [5], ["@it"])),
            "draft": (verify_path(state), round_body(state, ["@it"], [0])),
            "top_k": (verify_path(state), round_body(state, want={"top_k": "@it"})),
        }
        with Beside(self.daemon):
            for place, (path, body) in places.items():
                for word, code in words.items():
                    answer = self.caller.call("POST", path, raw(body, it=word))
                    self.assertIn(answer.status, (400, 422), f"{place} {word}")
                    if code == "bad-json":
                        self.assertEqual(answer.code, code, f"{place} {word}")
                    else:
                        self.assertIn(answer.code, ("wrong-type", "wrong-value"), f"{place} {word}")
                    self.assertIs(answer.json["committed"], False)
        self.assertEqual(self.state(state["session"]), before)
        self.post(verify_path(state), round_body(state), (200, None), "afterwards")

    def test_b42_numbers_in_every_place(self):
        """Documented refusal with a pointer, no cast, and the session as it was."""
        state = self.caller.session(tokens=[1, 2, 3])
        before = self.state(state["session"])
        path = verify_path(state)
        gap, length = (409, "seq-gap"), (409, "length-mismatch")
        forms = {"1e0": TYPE, "1.0": TYPE, "1.5": TYPE, "-0": TYPE, '"5"': TYPE, "true": TYPE, "null": TYPE, "[]": TYPE,
                 "01": (400, "bad-json"), "2.": (400, "bad-json"), ".5": (400, "bad-json"), "0x10": (400, "bad-json"),
                 "+1": (400, "bad-json"), "-1": VALUE, "2147483648": VALUE, "4294967296": VALUE,
                 "9007199254740992": VALUE, "9007199254740993": VALUE, "9223372036854775808": VALUE}  # fmt: skip
        places = {
            "/tokens/1": ("/v1/sessions", {"tokens": [1, "@it"]}, VALUE),
            "/stop/token_ids/0": ("/v1/sessions", {"tokens": [1], "stop": {"token_ids": ["@it"]}}, VALUE),
            "/stop/max_len": ("/v1/sessions", {"tokens": [1], "stop": {"max_len": "@it"}}, VALUE),
            "/tree/tokens/1": (path, round_body(state, ["@it"], [0]), VALUE),
            "/tree/parents/1": (path, round_body(state, [5], ["@it"]), VALUE),
            "/seq": (path, round_body(dict(state, next_seq="@it")), gap),
            "/expected_len": (path, round_body(dict(state, committed_len="@it")), length),
        }
        for pointer, (target, body, largest) in places.items():
            for form, expected in dict(forms, **{"2147483647": largest}).items():
                answer = self.caller.call("POST", target, raw(body, it=form))
                got = (answer.status, answer.code if answer.status >= 400 else None)
                what = f"{pointer} {form}: {answer.body[:300]}"
                if pointer.startswith("/tree/") and expected == VALUE:
                    expected = (422, "tree-invalid")
                self.assertEqual(got, expected, what)
                if answer.status in (400, 422) and answer.code != "bad-json":
                    self.assertEqual(answer.json["pointer"], pointer, what)
        self.assertEqual(self.state(state["session"]), before)

    def test_b43_bad_ids_beside_a_session(self):
        bad = [-1, self.vocab, self.vocab + 1, 200000, 2**31 - 1, 2**31, 2**32 - 1]
        state = self.caller.session(tokens=[1, 2, 3])
        path = f"/v1/sessions/{state['session']}"
        numbers = {"seq": state["next_seq"], "epoch": state["epoch"], "expected_len": state["committed_len"]}
        before = self.state(state["session"])
        with Beside(self.daemon, least=12) as beside:
            for token in bad:
                bodies = [
                    ("/v1/sessions", {"tokens": [1, token, 2]}),
                    ("/v1/sessions", {"tokens": [1], "stop": {"token_ids": [2, token]}}),
                    ("/v1/verify", {"tokens": [token], "tree": {"tokens": [1], "parents": [-1]}}),
                    ("/v1/verify", {"tokens": [1], "tree": {"tokens": [token], "parents": [-1]}}),
                    ("/v1/parity", {"tokens": [1], "tree": {"tokens": [1, token], "parents": [-1, 0]}}),
                    (path + "/verify", round_body(state, [5, token], [0, 0])),
                    (path + "/verify", dict(round_body(state), tree={"tokens": [token], "parents": [-1]})),
                    (path + "/extend", dict(numbers, tokens=[4, token])),
                    (path + "/decode", dict(numbers, max_tokens=token if token < 1 else token + 1024)),
                ]  # fmt: skip
                for target, body in bodies:
                    answer = self.caller.call("POST", target, body)
                    self.assertEqual(answer.status, 422, f"{target} {body}: {answer.body[:300]}")
                    self.assertIs(answer.json["committed"], False)
                self.ready()
        print(f"{len(bad) * 9} bad ids beside {len(beside.watched.rows)} rounds")
        self.assertEqual(self.state(state["session"]), before)
        self.assertTrue(self.caller.call("GET", "/readyz?deep=1").json["ready"])


def plant(source, folder, spikes):
    """A copy of a checkpoint whose weights are finite, and in which some tokens overflow.

    Column 0 of the embedding is nothing but spikes[token], and the first layer multiplies it by 3e38.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    with open(os.path.join(folder, "model.safetensors.index.json")) as file:
        shards = json.load(file)["weight_map"]

    def column_0(name, value_of):
        with open(os.path.join(folder, shards[name]), "r+b") as file:
            entries, begin = tensors.header(file)
            entry = entries[name]
            width = {"F32": 4, "BF16": 2}[entry["dtype"]]
            rows, columns = entry["shape"]
            for row in range(rows):
                values = value_of(row, columns)
                file.seek(begin + entry["data_offsets"][0] + row * columns * width)
                file.write(b"".join(struct.pack("<f", value)[4 - width :] for value in values))

    column_0(
        "model.embed_tokens.weight",
        lambda row, columns: [spikes[row]] + [0.0] * (columns - 1) if row in spikes else [0.0],
    )
    column_0("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", lambda row, columns: [3e38] if row == 0 else [])


class NumericFaultTest(unittest.TestCase):
    def test_b41_logits_that_are_no_numbers(self):
        """Rows that overflow on the way to the logits: 500, nothing committed, the session lives."""
        with tempfile.TemporaryDirectory() as folder:
            planted = {201: 1.0, 202: -1.0}
            plant(MODEL, folder, planted)
            with RealDaemon(model=folder) as daemon:
                caller = Caller(daemon)
                with Beside(daemon):
                    for token in planted:
                        self.judge(caller, token)
                self.assertEqual(caller.call("GET", "/readyz").status, 200)
                caller.close()

    def judge(self, caller, token):
        answer = caller.call("POST", "/v1/sessions", {"tokens": [1, 2, token]})
        self.assertEqual((answer.status, answer.code), (500, "numeric-fault"), token)
        state = caller.session(tokens=[1, 2, 3])
        path = f"/v1/sessions/{state['session']}"
        before = caller.call("GET", path + "?tail=9").json
        extend = {"seq": 1, "epoch": state["epoch"], "expected_len": 3, "tokens": [token]}
        for target, body in (
            (path + "/extend", extend),
            ("/v1/verify", {"tokens": [1, token], "tree": {"tokens": [1], "parents": [-1]}}),
        ):
            answer = caller.call("POST", target, body)
            self.assertEqual((answer.status, answer.code), (500, "numeric-fault"), (target, token))
            self.assertIs(answer.json["committed"], False)
        after = caller.call("GET", path + "?tail=9").json
        for moving in (before, after):
            moving.pop("lease_expires_at")
        self.assertEqual(before, after)
        # a draft that is never on the path decides nothing: the round is good unless its row is asked for
        used = {"logits": {"rows": "all"}}, {"logits": {"rows": [1]}}, {"top_k": 5, "rows": "all"}
        unused = {}, {"logits": {"rows": "path"}}, {"logits": {"rows": [0]}}, {"top_k": 5, "rows": "stop"}
        for want in (*used, *unused):
            answer = caller.call("POST", verify_path(state), round_body(state, [token], [0], want=want))
            if want in used:
                self.assertEqual((answer.status, answer.code), (500, "numeric-fault"), (token, want))
                continue
            self.assertEqual(answer.status, 200, (token, want, answer.body))
            self.assertEqual(answer.json["accepted"]["nodes"], [0])
            state.update(answer.json)
        caller.call("DELETE", path)


class FullPoolTest(unittest.TestCase):
    def test_b58_full_pool_over_http(self):
        """503 kv-full names the pages, changes nothing, and the same request works when there is room."""
        with RealDaemon("--page-size", "16", "--pages", "12", "--idle-pages-s", "0") as daemon:
            caller = Caller(daemon)
            pages = caller.call("GET", "/v1/model").json["pages"]
            first = caller.session(tokens=list(range(1, 63)))
            other = caller.session(tokens=list(range(101, 148)))  # shares no page with the first
            left = caller.call("GET", "/v1/model").json["pages"]["free"]
            self.assertEqual((left, pages["free"]), (2, 9))  # the self-test keeps three of the twelve
            path = f"/v1/sessions/{first['session']}"
            tree = [(5 + i) % 250 for i in range(40)]
            body = round_body(first, [t for t in tree if t != first["pending"]][:38], [0] * 38)
            numbers = {"seq": 1, "epoch": first["epoch"], "expected_len": 62}
            refused = [
                (path + "/verify", body),
                (path + "/extend", dict(numbers, tokens=[9] * 40)),
                ("/v1/sessions", {"tokens": [3] * 40}),
                ("/v1/verify", {"tokens": [3] * 40, "tree": {"tokens": [1], "parents": [-1]}}),
            ]
            before = [self.look(caller, first), self.look(caller, other)]
            for target, request in refused:
                answer = caller.call("POST", target, request)
                self.assertEqual((answer.status, answer.code), (503, "kv-full"), answer.body)
                problem = answer.json
                self.assertGreater(problem["pages_needed"], problem["pages_free"])
                self.assertEqual((problem["committed"], problem["retryable"]), (False, True))
                self.assertIn("retry-after", answer.headers)
            self.assertEqual([self.look(caller, first), self.look(caller, other)], before)
            self.await_free(caller, left)
            self.assertEqual(caller.call("GET", "/readyz").status, 200)
            caller.call("DELETE", f"/v1/sessions/{other['session']}")
            answer = caller.call("POST", verify_path(first), body)
            self.assertEqual((answer.status, answer.json["seq"]), (200, 1), answer.body)
            caller.call("DELETE", path)
            self.await_free(caller, pages["free"])
            caller.close()

    def test_idle_leases_do_not_shut_the_server(self):
        """An hour's lease that nobody uses holds pages only until somebody needs them."""
        with RealDaemon("--page-size", "16", "--pages", "12", "--idle-pages-s", "1") as daemon:
            caller = Caller(daemon)
            idle = caller.session(tokens=list(range(1, 63)), lease_s=3600)
            answers = []

            def opened():
                body = {"tokens": list(range(101, 201)), "lease_s": 3600}  # 7 pages of the 5 that are left
                answers.append(caller.call("POST", "/v1/sessions", body))
                return answers[-1].status == 201

            wait_until(opened, 60, "the idle session gives its pages")
            self.assertLessEqual({answer.code for answer in answers[:-1]}, {"kv-full"})
            self.assertEqual(self.look_at(caller, idle), (410, "session-expired"))
            state = answers[-1].json
            self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
            text = caller.call("GET", "/metrics").body.decode()
            self.assertIn("treeverify_idle_closed_total 1\n", text)
            caller.close()

    def look_at(self, caller, state):
        answer = caller.call("GET", f"/v1/sessions/{state['session']}")
        return answer.status, answer.code

    def await_free(self, caller, pages):
        """The worker closes what was deleted or refused in its next turn."""
        wait_until(lambda: caller.call("GET", "/v1/model").json["pages"]["free"] == pages, 5, f"{pages} pages are free")

    def look(self, caller, state):
        found = caller.call("GET", f"/v1/sessions/{state['session']}?tail=99").json
        found.pop("lease_expires_at")
        return found


if __name__ == "__main__":
    unittest.main(verbosity=1)
