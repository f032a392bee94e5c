"""What happens when answers are lost, the server is elsewhere, forgets, or lies: no token lost, none doubled."""

import json

import httpx
from harness import (
    GREEDY, MODEL, QUICK, SCALE, SEEDED, SERVER, Daemon, DaemonTest, FlakyProxy, Hooked, prompts, rewritten, url_of,
)

import treeverify as tv
from treeverify import Client, Tree
from treeverify.drafters import TraceDrafter


def rounds_of(session, drafter, count, nodes=8):
    """Drive until count new tokens are handed out; returns them as a caller sees them, and the rounds."""
    text, rounds = [session.pending], []
    for round in session.generate(drafter, count - 1, nodes=nodes):
        text += round.new_tokens
        rounds.append(round)
    return text[:count], rounds


class RecoveryTest(DaemonTest):
    def test_a_flaky_link_changes_nothing(self):
        """Requests and answers are lost, cut and refused; the text is that of plain decoding, and the server's."""
        count = max(40, int(200 * SCALE))
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, count, sampling)
            proxy = FlakyProxy(self.daemon, 0.3)
            try:
                with Client(proxy.url, retry=QUICK, timeout_s=20) as client:
                    session = client.session(prompt, sampling=sampling)
                    drafter = TraceDrafter(prompt + plain, wrong_every=3, wrong=1)
                    text, rounds = rounds_of(session, drafter, count)
                    self.assertEqual(text, plain)
                    state = self.raw.get(f"/v1/sessions/{session.id}?tail=4096")
                    self.assertEqual(state["tail"], session.tokens)
                    self.assertEqual(state["next_seq"], len(rounds) + 1)
                    self.assertTrue(any(round.replayed for round in rounds))
                    self.assertGreater(client.retries, 5)
                    session.close()
            finally:
                proxy.close()
            self.assertEqual(set(proxy.fates), {"passed", "request lost", "answer lost", "answer cut", "busy"})

    def test_a_timeout_is_a_replay(self):
        lost = []

        def after(request, response):
            if request.url.path.endswith("/verify") and not lost:
                lost.append(response)
                raise httpx.ReadTimeout("too slow", request=request)
            return response

        with Client(url_of(self.daemon), transport=Hooked(after), retry=QUICK) as client:
            with client.session(prompts(1)[0], sampling=GREEDY) as session:
                round = session.verify(Tree.root(session.pending))
                self.assertEqual((round.replayed, round.retries, round.seq), (True, 1, 1))
                self.assertEqual(round.new_tokens, json.loads(lost[0].content)["new_tokens"])

    def test_a_create_whose_answer_is_lost(self):
        """Every attempt has the same Idempotency-Key: one session, and the first one's answer."""
        lost, keys = [], []

        def after(request, response):
            if request.method == "POST" and request.url.path == "/v1/sessions":
                keys.append(request.headers["idempotency-key"])
                if len(lost) < 2:
                    lost.append(json.loads(response.content)["session"])
                    raise httpx.ReadError("gone", request=request)
            return response

        before = len(self.client.sessions())
        with Client(url_of(self.daemon), transport=Hooked(after), retry=QUICK) as client:
            with client.session(prompts(1)[0], sampling=GREEDY) as session:
                self.assertEqual(lost, [session.id, session.id])
                self.assertEqual(len(self.client.sessions()), before + 1)
            with client.session(prompts(1)[0], sampling=GREEDY) as session:
                self.assertEqual(len(set(keys)), 2)

    def test_a_lost_round_is_found_by_the_next_call(self):
        """Retries used up, the round done: the next call, another one, gives its tokens."""
        broken = []

        def after(request, response):
            if broken and request.url.path.endswith("/verify"):
                raise httpx.ReadError("gone", request=request)
            return response

        prompt = prompts(1)[0]
        plain = self.plain(prompt, 9)
        retry = tv.Retry(attempts=2, base_s=0.0)
        with Client(url_of(self.daemon), transport=Hooked(after), retry=retry) as client:
            with client.session(prompt, sampling=GREEDY) as session:
                broken.append(True)
                with self.assertRaises(tv.TransportError):
                    session.verify(Tree.chain(plain[:5]))
                broken.clear()
                self.assertEqual(session.new_tokens, plain[:1])
                found = session.verify(Tree.root(session.pending))
                self.assertEqual((found.recovered, found.new_tokens), ("resync", plain[1:6]))
                session.decode(3)
                self.assertEqual(session.new_tokens, plain)
                broken.append(True)
                with self.assertRaises(tv.TransportError):
                    session.verify(Tree.root(session.pending))
                broken.clear()
                self.assertEqual(session.decode(2).recovered, "resync")
                session.decode(2)
                self.assertEqual(session.new_tokens, self.plain(prompt, 12))

    def moved(self, session, **changes):
        """Make the client believe something else."""
        for name, value in changes.items():
            setattr(session._core, name, value)

    def test_a_refused_delete_hides_no_exception(self):
        def after(request, response):
            return httpx.Response(503) if request.method == "DELETE" else response

        with Client(url_of(self.daemon), transport=Hooked(after), retry=tv.Retry(attempts=1)) as client:
            with self.assertRaises(KeyError):
                with client.session([1, 2, 3]):
                    raise KeyError
            with self.assertRaises(tv.UnavailableError):
                with client.session([1, 2, 3]):
                    pass

    def test_an_exception_does_not_wait_for_a_server_that_is_gone(self):
        """One quick DELETE behind Ctrl-C; without an exception, all the retries."""
        waits = []

        def after(request, response):
            if request.method == "DELETE":
                waits.append(request.extensions["timeout"]["read"])
                raise httpx.ReadTimeout("gone", request=request)
            return response

        with Client(url_of(self.daemon), transport=Hooked(after), retry=tv.Retry(attempts=3, base_s=0.0)) as client:
            with self.assertRaises(KeyboardInterrupt):
                with client.session([1, 2, 3]):
                    raise KeyboardInterrupt
            self.assertEqual(waits, [2.0])
            with self.assertRaises(tv.TransportError):
                with client.session([1, 2, 3]):
                    pass
            self.assertEqual(waits[1:], [30.0] * 3)

    def test_views_that_differ(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 12)
        with self.client.session(prompt, sampling=GREEDY) as session:
            self.moved(session, next_seq=4)  # seq-gap: the tree is still right, so the round is done
            round = session.verify(Tree.chain(plain[:3]))
            self.assertEqual((round.recovered, round.new_tokens, round.seq), ("resync", plain[1:4], 1))

            tokens, digest, pending = list(session._core.tokens), session._core.digest, session.pending
            session.decode(3)
            self.moved(session, tokens=tokens, digest=digest, pending=pending)  # length-mismatch
            round = session.decode(2)
            self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[4:7]))
            self.assertEqual(session.new_tokens, plain[:7])

            self.moved(session, pending=(session.pending + 1) % 256)  # pending-mismatch
            with self.assertRaises(tv.MovedError) as caught:
                session.verify(Tree.root(session.pending))
            self.assertEqual(caught.exception.problem.code, "pending-mismatch")
            self.assertEqual(session.new_tokens, plain[:7])

            wrong = [*session._core.tokens[:-1], 1]
            self.moved(session, tokens=wrong, digest=tv.Digest(session.model.model_id).push(wrong))
            with self.assertRaises(tv.MovedError) as caught:  # digest-mismatch: the server's tokens are adopted
                session.decode(1)
            self.assertEqual(caught.exception.problem.code, "digest-mismatch")
            session.decode(5)
            self.assertEqual(session.new_tokens, plain)

    def test_somebody_else_moves_the_session(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 20)
        with self.client.session(prompt, sampling=GREEDY) as session:
            def elsewhere(kind, seq, length, **fields):
                body = dict(seq=seq, epoch=session.epoch, expected_len=length, **fields)
                return self.raw.post(f"/v1/sessions/{session.id}/{kind}", body)

            base = len(prompt)
            elsewhere("decode", 1, base, max_tokens=3)  # our round 1 has another body: seq-reused
            round = session.verify(Tree.chain(plain[:2]))
            self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[1:4]))
            for seq in range(2, 11):
                elsewhere("decode", seq, base + seq + 1, max_tokens=1)  # more than it keeps: round-evicted
            round = session.decode(1)
            self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[4:13]))
            elsewhere("decode", 11, base + 12, max_tokens=1)
            with self.assertRaises(tv.MovedError):
                session.extend([65])
            self.assertEqual(session.new_tokens, plain[:14])
            elsewhere("extend", 12, base + 13, tokens=[65, 66])  # the pending token handed out is dropped
            with self.assertRaises(tv.MovedError):
                session.decode(1)
            self.assertEqual(session.tokens, [*prompt, *plain[:13], 65, 66])
            session.decode(1)

    def test_a_forgotten_session_is_made_anew(self):
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, 40, sampling)
            with self.client.session(prompt, sampling=sampling) as session:
                first = session.id
                session.decode(9)
                self.raw.call("DELETE", f"/v1/sessions/{first}")
                round = session.verify(Tree.chain(plain[9:14]), want=tv.Want(top_k=1))
                self.assertEqual((round.recovered, round.new_tokens), ("resumed", plain[10:15]))
                self.assertIsNotNone(round.topk)
                self.assertNotEqual(session.id, first)
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                self.assertEqual(session.decode(5).recovered, "resumed")
                self.assertEqual((session.new_tokens, session.resumed), (plain[:20], 2))
                before = session.sequence
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                session.extend([65, 66], keep_pending=True)
                self.assertEqual(session.tokens, [*before, 65, 66])
                before = session.tokens
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                session.extend([67])
                self.assertEqual(session.tokens, [*before, 67])

    def test_a_token_that_was_handed_out_stays(self):
        """The new session draws another token at that position (as after a near tie): the old one is kept."""
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as session:
            session.decode(4)
            shown = [*session.new_tokens[:-1], (session.pending + 1) % 256]
            self.moved(session, pending=shown[-1])
            self.raw.call("DELETE", f"/v1/sessions/{session.id}")
            round = session.verify(Tree.chain([shown[-1], 65]))
            self.assertEqual((round.recovered, round.accepted_tokens[0]), ("resumed", shown[-1]))
            self.assertEqual(session.new_tokens, shown + round.new_tokens)
            self.moved(session, pending=(session.pending + 1) % 256)
            kept = session.sequence
            self.raw.call("DELETE", f"/v1/sessions/{session.id}")
            session.extend([65], keep_pending=True)
            self.assertEqual(session.tokens, [*kept, 65])

    def test_a_resume_that_is_interrupted(self):
        """The link breaks between the new session and its move to the token handed out: the next call repairs it."""
        broken = []

        def after(request, response):
            if broken and request.url.path.endswith("/rollback"):
                raise httpx.ReadError("gone", request=request)
            return response

        with Client(url_of(self.daemon), transport=Hooked(after), retry=tv.Retry(attempts=1)) as client:
            with client.session(prompts(1)[0], sampling=GREEDY) as session:
                session.decode(3)
                self.moved(session, pending=(session.pending + 1) % 256)
                shown = session.new_tokens
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                broken.append(True)
                with self.assertRaises(tv.TransportError):
                    session.decode(1)
                self.assertEqual(session.new_tokens, shown)
                broken.clear()
                round = session.decode(1)
                self.assertEqual(session.new_tokens, shown + round.new_tokens)

    def test_a_restart_in_the_middle(self):
        """Another daemon with another epoch behind the same address: the text goes on, greedy and seeded."""
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, 60, sampling)
            first = Daemon(SERVER, MODEL).__enter__()
            proxy = FlakyProxy(first, 0.1)
            try:
                with Client(proxy.url, retry=QUICK) as client:
                    session = client.session(prompt, sampling=sampling)
                    drafter = TraceDrafter(prompt + plain, wrong_every=4, wrong=1)
                    text = [session.pending]
                    for number, round in enumerate(session.generate(drafter, 59, nodes=6)):
                        text += round.new_tokens
                        if number == 4:
                            old = session.epoch
                            first.__exit__(None, None, None)
                            proxy.turn_to(self.daemon)
                    self.assertEqual(text[:60], plain)
                    self.assertNotEqual(session.epoch, old)
                    self.assertEqual(session.resumed, 1)
                    self.assertEqual(self.raw.get(f"/v1/sessions/{session.id}?tail=4096")["tail"], session.tokens)
                    session.close()
            finally:
                proxy.close()

    def test_another_model_is_no_continuation(self):
        def after(request, response):
            if request.url.path == "/v1/model" and asked:
                return rewritten(response, lambda body: body.update(model_id="0" * 64))
            return response

        asked = []
        with Client(url_of(self.daemon), transport=Hooked(after)) as client:
            with client.session([1, 2, 3], sampling=GREEDY) as session:
                asked.append(True)
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                with self.assertRaises(tv.DesyncError):
                    session.decode(1)

    def test_answers_that_are_not_true(self):
        """Each lie is a ContractError, and the client's state stays; the truth is accepted afterwards."""
        lies = [
            lambda body: body.update(digest="0" * 32),
            lambda body: body.update(committed_len=body["committed_len"] + 1),
            lambda body: body.update(seq=body["seq"] + 1),
            lambda body: body.update(next_seq=body["next_seq"] + 1),
            lambda body: body["accepted"].update(nodes=[0, 2]),
            lambda body: body["accepted"].update(tokens=[body["accepted"]["tokens"][0], 7]),
            lambda body: body["new_tokens"].append(7),
            lambda body: body.update(pending=(body["pending"] + 1) % 256),
            lambda body: body.pop("margin"),
            lambda body: body.pop("new_tokens"),
            lambda body: body.update(timing_us=[]),
            lambda body: body["topk"].update(shape=[9, 9]),
            lambda body: body["logprobs"].append(-1.0),
        ]
        lie = []

        def after(request, response):
            return rewritten(response, lie[0]) if lie and request.url.path.endswith("/verify") else response

        prompt = prompts(1)[0]
        plain = self.plain(prompt, 4)
        with Client(url_of(self.daemon), transport=Hooked(after)) as client:
            for change in lies:
                with client.session(prompt, sampling=GREEDY) as session:
                    before = (session.sequence, session.digest, session._core.next_seq)
                    lie[:] = [change]
                    tree, want = Tree([*plain[:2], 7], [-1, 0, 0]), tv.Want(top_k=1, logprobs=True)
                    with self.assertRaises(tv.ContractError):
                        session.verify(tree, want=want)
                    self.assertEqual((session.sequence, session.digest, session._core.next_seq), before)
                    lie.clear()
                    round = session.verify(tree, want=want)
                    self.assertEqual((round.replayed, round.new_tokens), (True, plain[1:3]))

    def test_a_tensor_that_was_damaged(self):
        def after(request, response):
            if request.url.path.endswith("/tensor"):
                content = bytes([response.content[0] ^ 1]) + response.content[1:]
                return httpx.Response(200, headers=response.headers, content=content)
            return response

        with Client(url_of(self.daemon), transport=Hooked(after)) as client:
            with client.session([1, 2, 3], sampling=GREEDY) as session:
                want = tv.Want(logits="f32", logits_via="fetch")
                round = session.verify(Tree.root(session.pending), want=want)
                with self.assertRaises(tv.ContractError):
                    session.fetch_logits(round)


class LimitsTest(DaemonTest):
    options = ("--max-sessions", "1")

    def test_a_full_server_is_waited_for(self):
        """429 with Retry-After: bounded attempts, then the problem; the room that comes is taken."""
        with self.client.session([1, 2, 3], sampling=GREEDY) as session:
            with Client(url_of(self.daemon), retry=tv.Retry(attempts=2, total_s=0.5)) as hasty:
                with self.assertRaises(tv.UnavailableError) as caught:
                    hasty.session([4])
                self.assertEqual((caught.exception.code, caught.exception.retry_after_s), ("rate-limited", 1.0))
                self.assertTrue(caught.exception.retryable)
            pauses = []

            def after(request, response):
                if response.status_code == 429:
                    pauses.append(response)
                    self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                return response

            with Client(url_of(self.daemon), transport=Hooked(after)) as patient:
                with patient.session([4]) as other:
                    self.assertEqual((other.committed_len, len(pauses), patient.retries), (1, 1, 1))
