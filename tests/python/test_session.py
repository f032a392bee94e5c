"""Session and the one-shot calls against the real daemon: rounds, arrays, refusals, state."""

import math
import socket

import numpy as np
from harness import GREEDY, SEEDED, DaemonTest, prompts, url_of

import treeverify as tv
from treeverify import Client, Tree, Want
from treeverify.calls import Send, send
from treeverify.drafters import TraceDrafter


class SessionTest(DaemonTest):
    def raw_state(self, session):
        return self.raw.get(f"/v1/sessions/{session.id}?tail=4096")

    def assert_in_step(self, session):
        """The client's tokens, digest and numbers are the server's."""
        state = self.raw_state(session)
        self.assertEqual(state["tail"], session.tokens)
        self.assertEqual((state["digest"], state["pending"]), (session.digest, session.pending))
        self.assertEqual((state["committed_len"], state["finish"]), (session.committed_len, session.finish))

    def test_a_session_in_step(self):
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            text = prompt + self.plain(prompt, 60, sampling)
            with self.client.session(prompt, sampling=sampling, cache_salt="team") as session:
                self.assertEqual(session.sampling.rule, sampling.rule)
                drafter = TraceDrafter(text, wrong_every=5, wrong=1, branch=True)
                rounds = list(session.generate(drafter, 59, nodes=12))
                self.assert_in_step(session)
                self.assertEqual(session.sequence[: len(text)], text)
                self.assertEqual(session.new_tokens, session.sequence[len(prompt) :])
                self.assertEqual(sum(len(round.new_tokens) for round in rounds), 59)
                self.assertGreater(59 / len(rounds), 5)
                for number, round in enumerate(rounds, 1):
                    self.assertEqual((round.seq, round.replayed, round.recovered), (number, False, None))
                    self.assertEqual(round.accepted_tokens[1:], round.new_tokens[:-1])
                    self.assertIn(round.hint.max_useful_nodes, range(1, 257))
                    self.assertGreaterEqual(max(nodes for nodes, _ in round.hint.verify_us), round.nodes)
                    self.assertGreaterEqual(round.rtt_s * 1e6, round.timing.total_us)
            self.assertEqual([s for s in self.client.sessions() if s["session"] == session.id], [])
            with self.assertRaises(RuntimeError):
                session.decode(1)
            session.close()

    def test_extend_and_decode(self):
        with self.client.session(list(b"And God said"), sampling=GREEDY) as session:
            pending = session.pending
            round = session.extend(list(b" unto"), keep_pending=True)
            self.assertEqual(session.tokens, [*b"And God said", pending, *b" unto"])
            self.assertEqual(round.new_tokens, [session.pending])
            session.extend(list(b" Noah"))
            self.assertEqual(bytes(session.tokens[-10:]), b" unto Noah")
            round = session.decode(9)
            self.assertEqual((len(round.new_tokens), round.accepted_nodes), (9, []))
            self.assertIsNone(round.hint)
            self.assertEqual(session.stored_round(round.seq).new_tokens, round.new_tokens)
            self.assert_in_step(session)
            long = session.extend(list(b"x" * 300), keep_pending=False, lease_s=300)
            self.assertEqual(long.committed_len, session.committed_len)
            self.assert_in_step(session)

    def test_stop_and_length(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY, stop=[32]) as session:
            for _ in session.generate(None, 100):
                pass
            self.assertEqual((session.finish, session.pending), ("stop", 32))
            with self.assertRaises(tv.FinishedError) as caught:
                session.verify(Tree.root(session.pending))
            self.assertEqual(caught.exception.committed, False)
            session.extend([65], keep_pending=True)
            self.assertEqual(session.tokens[-2:], [32, 65])
        with self.client.session(prompt, sampling=GREEDY, max_len=len(prompt) + 10) as session:
            text = [token for round in session.generate(TraceDrafter([]), 100) for token in round.new_tokens]
            self.assertEqual((session.finish, session.committed_len + 1), ("length", len(prompt) + 10))
            self.assertEqual(len(text), 9)

    def test_texts_in_arrays(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as listed:
            listed.extend(list(b"And"))
            for dtype in (np.uint8, np.int32, np.uint64):
                stop = np.array([255], dtype=dtype)
                with self.client.session(np.array(prompt, dtype=dtype), sampling=GREEDY, stop=stop) as session:
                    session.extend(np.frombuffer(b"And", dtype=np.uint8).astype(dtype))
                    self.assertEqual((session.tokens, session.pending), (listed.tokens, listed.pending))
        array = np.array(prompt, dtype=np.int64)
        tree = Tree.chain([prompt[0], 32])
        self.assertEqual(*(self.client.verify(tokens, tree, sampling=GREEDY).new_tokens for tokens in (prompt, array)))
        np.testing.assert_allclose(*(self.client.score(tokens, tree) for tokens in (prompt, array)), rtol=1e-4)
        self.assertEqual(self.client.parity(array, tree)["ok"], True)
        for bad in ([-1], [1.5], "text", np.zeros((2, 2), dtype=np.int32)):
            with self.assertRaisesRegex(ValueError, "tokens: "):
                self.client.session(bad)

    def test_what_is_no_tree(self):
        class Drafter:
            def draft(self, tokens, nodes, depth):
                return gives

        with self.client.session(prompts(1)[0], sampling=GREEDY) as session:
            for gives in (None, ([session.pending], [-1])):
                for pipeline in (False, True):
                    with self.assertRaisesRegex(TypeError, "not a Tree"):
                        next(session.generate(Drafter(), 4, pipeline=pipeline))
                with self.assertRaisesRegex(TypeError, "takes a Tree"):
                    session.verify(gives)
            with self.assertRaisesRegex(ValueError, "nodes: "):
                next(session.generate(Drafter(), 4, nodes="many"))
            session.decode(1)

    def test_arrays(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=SEEDED) as session:
            tree = Tree.from_paths(session.pending, [list(b"the"), list(b"tho"), list(b" a"), list(b"and")])
            want = Want(top_k=64, rows="all", logprobs=True, logits="f32", shadow=True)
            round = session.verify(tree, want=want)
            vocab = session.model.vocab
            self.assertEqual(round.logits.values.shape, (len(tree), vocab))
            self.assertEqual(round.topk.nodes.tolist(), list(range(len(tree))))
            rows = round.logits.values
            np.testing.assert_allclose(np.log(np.exp(rows.astype(np.float64)).sum(1)), round.topk.lse, rtol=1e-5)
            order = np.argsort(-rows, axis=1, kind="stable")[:, :64]
            np.testing.assert_array_equal(round.topk.ids, order)
            np.testing.assert_array_equal(round.topk.logits, np.take_along_axis(rows, order, 1))
            self.assertTrue((np.exp(round.topk.logprobs).sum(1) <= 1 + 1e-5).all())
            self.assertEqual(len(round.logprobs), len(round.new_tokens))
            self.assertTrue((round.logprobs <= 0).all())
            self.assertTrue(round.shadow["tokens_equal"])

    def test_logprobs_of_filtered_tokens(self):
        """temperature 0.8 and top_p 0.95 change what logprobs are over; greedy leaves them at temperature 1."""
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as session:
            round = session.verify(Tree.root(session.pending), want=Want(top_k=1, logprobs=True))
            self.assertAlmostEqual(round.logprobs[0], float(round.topk.logprobs[0, 0]), places=5)

    def test_logits_by_fetch(self):
        with self.client.session(prompts(1)[0], sampling=GREEDY) as session:
            tree = Tree.from_paths(session.pending, [list(b"the"), list(b"and")])
            inline = self.client.verify(session.tokens, tree, want=Want(logits="f32", logits_rows="all"))
            round = session.verify(tree, want=Want(logits="f32", logits_rows="all", logits_via="fetch"))
            self.assertIsNone(round.logits.values)
            whole = session.fetch_logits(round)
            np.testing.assert_allclose(whole.values, inline.logits.values, atol=1e-3)
            for dtype, bits in (("bf16", 16), ("f16", None)):
                part = session.fetch_logits(round, dtype=dtype)
                np.testing.assert_allclose(part.values, whole.values, rtol=2.0**-8, atol=2.0**-8)
                self.assertEqual(part.dtype, dtype)
                if bits:
                    self.assertFalse((part.values.view(np.uint32) & 0xFFFF).any())
            for rows, nodes in (([2, 0], [2, 0]), ("stop", round.accepted_nodes[-1:]), ("path", round.accepted_nodes)):
                part = session.fetch_logits(round, rows=rows)
                self.assertEqual(part.nodes.tolist(), nodes)
                np.testing.assert_array_equal(part.values, whole.values[nodes])
            session.decode(1)
            with self.assertRaises(tv.GoneError):
                session.fetch_logits(round)
            with self.assertRaises(ValueError):
                session.fetch_logits(session.verify(Tree.root(session.pending)))

    def test_one_shot_and_parity(self):
        prompt = prompts(1)[0]
        tree = Tree.from_paths(prompt[-1], [list(b"the"), list(b" and")])
        round = self.client.verify(prompt[:-1], tree, sampling=GREEDY, want=Want(top_k=2))
        self.assertEqual((round.seq, round.committed_len), (0, len(prompt) - 1))
        with self.client.session(prompt[:-1], sampling=GREEDY) as session:
            self.assertEqual(session.digest, round.digest)
        empty = self.client.verify([], Tree.root(65), sampling=GREEDY)
        self.assertEqual(empty.committed_len, 0)
        self.assertTrue(self.client.parity()["ok"])
        self.assertTrue(self.client.parity(prompt[:-1], tree, sampling=SEEDED, strict=True)["ok"])
        with self.client.session(prompt, sampling=GREEDY) as session:
            before = session.sequence
            self.assertTrue(self.client.parity(session=session, tree=Tree.root(session.pending))["ok"])
            session.decode(1)
            self.assertEqual(session.sequence[:-1], before)
        self.assertEqual(self.client.parity_totals()["rounds"]["violation"], 0)
        with self.assertRaises(tv.NotFoundError):
            self.client.parity_violation(1)
        for wrong in (dict(tokens=[1]), dict(tree=tree), dict(sampling=GREEDY)):
            with self.assertRaises(ValueError):
                self.client.parity(**wrong)

    def test_model_and_probes(self):
        model = self.client.model()
        self.assertEqual((model.vocab, model.max_nodes, model.max_depth), (260, 256, 64))
        self.assertEqual(model.body["name"], model.name)
        self.assertTrue(self.client.health())
        self.assertTrue(self.client.ready(deep=True)["ready"])
        with Client("http://127.0.0.1:1", retry=tv.Retry(attempts=2, base_s=0.0)) as nobody:
            self.assertFalse(nobody.health())
            with self.assertRaises(tv.TransportError) as caught:
                nobody.model()
            self.assertEqual((caught.exception.committed, nobody.retries), (None, 2))

    def test_lease_and_state(self):
        with self.client.session([1, 2, 3], lease_s=100) as session:
            self.assertEqual(session.state(tail=2)["tail"], [2, 3])
            self.assertEqual(session.renew(3600)["committed_len"], 3)
            with self.assertRaises(tv.BadRequestError) as caught:
                session.renew(3601)
            self.assertEqual((caught.exception.code, caught.exception.pointer), ("wrong-value", "/lease_s"))

    def test_trees_are_checked_before_they_are_sent(self):
        with self.client.session([1, 2, 3], sampling=GREEDY) as session:
            pending = session.pending
            for code, tree in (
                ("pending-mismatch", Tree.root(pending + 1)),
                ("tree-invalid", Tree.chain([pending, 260])),
                ("tree-too-large", Tree.chain([pending] + [1] * 65)),
                ("tree-too-large", Tree([pending, *range(256)], [-1] + [0] * 256)),
            ):
                with self.assertRaises(tv.TreeError) as caught:
                    session.verify(tree)
                self.assertEqual(caught.exception.code, code)
            self.assertEqual(self.raw_state(session)["next_seq"], 1)

    def test_refusals_of_the_server(self):
        """Bodies that the package would not send, each answered with its problem."""
        with self.client.session([1, 2, 3], sampling=GREEDY) as session:
            base = {"seq": 1, "epoch": session.epoch, "expected_len": 3}
            node = {"tokens": [session.pending], "parents": [-1]}
            verify = f"/v1/sessions/{session.id}/verify"
            cases = [
                ("tree-invalid", tv.TreeRefusedError, verify,
                 dict(base, tree={"tokens": [session.pending, 5], "parents": [-1, 1]})),
                ("tree-too-large", tv.TreeRefusedError, verify,
                 dict(base, tree={"tokens": [session.pending] + [1] * 65, "parents": list(range(-1, 65))})),
                ("length-mismatch", tv.ConflictError, verify, dict(base, expected_len=2, tree=node)),
                ("digest-mismatch", tv.ConflictError, verify, dict(base, expected_digest="0" * 32, tree=node)),
                ("pending-mismatch", tv.ConflictError, verify,
                 dict(base, tree={"tokens": [(session.pending + 1) % 256], "parents": [-1]})),
                ("seq-gap", tv.ConflictError, verify, dict(base, seq=2, tree=node)),
                ("epoch-changed", tv.ConflictError, verify, dict(base, epoch="0" * 16, tree=node)),
                ("unknown-field", tv.BadRequestError, verify, dict(base, tree=node, parent=1)),
                ("missing-field", tv.BadRequestError, verify, base),
                ("wrong-type", tv.BadRequestError, verify, dict(base, seq=1.0, tree=node)),
                ("wrong-value", tv.BadRequestError, verify, dict(base, tree=node, deadline_ms=0)),
                ("session-not-found", tv.NotFoundError, verify.replace(session.id, "s_" + "A" * 22), dict(base, tree=node)),
                ("not-found", tv.NotFoundError, "/v1/nope", {}),
                ("method-not-allowed", tv.BadRequestError, "/healthz", {}),
                ("context-full", tv.ContextFullError, "/v1/sessions", {"tokens": [1] * 5000}),
            ]
            for code, kind, path, body in cases:
                with self.assertRaises(tv.ProblemError) as caught:
                    self.client.request("POST", path, body)
                self.assertEqual((caught.exception.code, type(caught.exception)), (code, kind))
                self.assertIs(caught.exception.committed, False)
            self.assertEqual(self.client.retries, 0)
            context = self.client._settings.context
            with self.assertRaises(tv.BadRequestError) as caught:
                self.client._run(send(context, Send("POST", verify, b"{")))
            self.assertEqual(caught.exception.code, "bad-json")
            self.assertEqual(session.decode(2).seq, 1)
            with self.assertRaises(tv.NotFoundError) as caught:
                session.stored_round(9)
            self.assertEqual(caught.exception.code, "round-not-found")

    def test_rule_of_one_round(self):
        with self.client.session(prompts(1)[0], sampling=SEEDED) as session:
            round = session.verify(Tree.root(session.pending), rule="greedy", want=Want(top_k=1))
            self.assertEqual((round.rule, round.pending), ("greedy", int(round.topk.ids[0, 0])))
            self.assertTrue(round.lossless)
            self.assertTrue(math.isfinite(round.margin_min))

    def test_keep_alive(self):
        """Many calls, one connection, which does not wait for acknowledgements between head and body."""
        with Client(url_of(self.daemon)) as client, client.session([65, 66], sampling=GREEDY) as session:
            for _ in range(10):
                session.decode(1)
            connections = client._http._transport._pool.connections
            self.assertEqual(len(connections), 1)
            stream = connections[0]._connection._network_stream
            self.assertTrue(stream.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
