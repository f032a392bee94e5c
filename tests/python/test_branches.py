"""Sessions that branch: fork, a prefix of another session, rollback, and rounds that are held until somebody chooses."""

import asyncio

import httpx
from harness import GREEDY, QUICK, SCALE, SEEDED, DaemonTest, FlakyProxy, Hooked, prompts, url_of

import treeverify as tv
from treeverify import Sampling, Tree, Want

COUNT = 40 if SCALE >= 1 else 16


class BranchTest(DaemonTest):
    def assert_in_step(self, session):
        state = self.raw.get(f"/v1/sessions/{session.id}?tail=4096")
        self.assertEqual(state["tail"], session.tokens)
        self.assertEqual((state["digest"], state["pending"]), (session.digest, session.pending))
        self.assertEqual((state["next_seq"], state["finish"]), (session._core.next_seq, session.finish))
        self.assertEqual(state["held_seq"], session._core.held and session._core.held.seq)

    def breaking(self, ending, **retry):
        """A client whose answers to paths with this ending are lost while `broken` has something in it."""
        broken = []

        def after(request, response):
            if broken and request.url.path.endswith(ending):
                raise httpx.ReadError("gone", request=request)
            return response

        retry = tv.Retry(attempts=2, base_s=0.0, **retry)
        client = tv.Client(url_of(self.daemon), transport=Hooked(after), retry=retry)
        self.addCleanup(client.close)
        return client, broken


class ForkTest(BranchTest):
    def test_a_fork_goes_on_alike(self):
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, COUNT, sampling)
            with self.client.session(prompt, sampling=sampling, stop=[0]) as parent:
                parent.decode(9)
                for length in (None, len(prompt) + 4, 7):
                    with parent.fork(length, lease_s=77) as child:
                        self.assertNotEqual(child.id, parent.id)
                        self.assertEqual(child.tokens, parent.tokens[:length])
                        self.assertEqual(child.sampling, parent.sampling)
                        self.assertEqual(child._core.settings.stop, (0,))
                        self.assert_in_step(child)
                        if length != 7:
                            child.decode(COUNT - len(child.new_tokens))
                            self.assertEqual(child.new_tokens, plain)
                self.assert_in_step(parent)
                for wrong in (0, -1, parent.committed_len + 1):
                    self.assertRaises(ValueError, parent.fork, wrong)
                self.assertRaises(ValueError, parent.fork, seed=2**64)

    def test_another_seed(self):
        with self.client.session(prompts(1)[0], sampling=tv.Sampling(temperature=2.0, seed=1)) as parent:
            with parent.fork(seed=2) as child, parent.fork() as twin:
                self.assertEqual((child.sampling.seed, child.pending), (2, parent.pending))
                for session in (parent, child, twin):
                    session.decode(20)
                self.assertEqual(twin.tokens, parent.tokens)
                self.assertNotEqual(child.tokens, parent.tokens)
                resumed = child.new_tokens
                self.raw.call("DELETE", f"/v1/sessions/{child.id}")
                child.decode(1)
                self.assertEqual((child.sampling.seed, child.new_tokens[: len(resumed)]), (2, resumed))

    def test_the_parent_was_forgotten(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as parent:
            parent.decode(5)
            self.raw.call("DELETE", f"/v1/sessions/{parent.id}")
            with parent.fork() as child:
                self.assertEqual((child.sequence, parent.resumed), (parent.sequence, 1))
                self.assert_in_step(parent)
                self.assert_in_step(child)

    def test_a_lost_answer_leaves_one_fork(self):
        lost = []

        def after(request, response):
            if request.url.path.endswith("/fork") and len(lost) < 3:
                lost.append(response.json()["session"])
                raise httpx.ReadError("gone", request=request)
            return response

        with tv.Client(url_of(self.daemon), transport=Hooked(after), retry=QUICK) as client:
            with client.session(prompts(1)[0], sampling=GREEDY) as parent:
                before = len(self.client.sessions())
                with parent.fork() as child:
                    self.assertEqual(lost, [child.id] * 3)
                    self.assertEqual(len(self.client.sessions()), before + 1)

    def test_a_prefix_of_another_session(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as parent:
            parent.decode(COUNT)
            for length in (None, len(prompt)):
                with self.client.session(prefix=parent, prefix_len=length, sampling=SEEDED, cache_salt="x") as other:
                    self.assertEqual(other.tokens, parent.tokens[:length])
                    self.assertEqual(other.new_tokens, [other.pending])
                    self.assertEqual((other.sampling, other._core.next_seq), (SEEDED, 1))
                    self.assert_in_step(other)
            self.assertRaises(ValueError, self.client.session)
            self.assertRaises(ValueError, self.client.session, [1], prefix=parent)
            self.assertRaises(ValueError, self.client.session, prefix=parent, prefix_len=10**6)
            self.raw.call("DELETE", f"/v1/sessions/{parent.id}")
            with self.client.session(prefix=parent, sampling=GREEDY) as other:
                self.assertEqual(other.tokens, parent.tokens)
                self.assert_in_step(other)


class RollbackTest(BranchTest):
    def test_back_and_on(self):
        prompt = prompts(1)[0]
        for sampling in (GREEDY, SEEDED):
            plain = self.plain(prompt, COUNT, sampling)
            with self.client.session(prompt, sampling=sampling) as session:
                session.decode(COUNT - 1)
                round = session.rollback(len(prompt) + 5)
                self.assertEqual((session.new_tokens, round.new_tokens, round.pending), (plain[:6], [], plain[5]))
                self.assertEqual(session.stored_round(round.seq).committed_len, round.committed_len)
                self.assert_in_step(session)
                session.verify(Tree.chain(plain[5:9]))
                self.assertEqual(session.new_tokens, plain[:10])
                session.rollback(session.committed_len, 65)
                self.assertEqual(session.new_tokens, [*plain[:9], 65])
                session.decode(1)
                session.rollback(4)  # into the prompt
                self.assertEqual((session.tokens, session.new_tokens), (prompt[:4], prompt[4:5]))
                self.assert_in_step(session)
                for wrong in (0, 5):
                    self.assertRaises(ValueError, session.rollback, wrong)

    def test_a_finished_session_is_reopened(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY, stop=[32]) as session:
            for _ in session.generate(None, 100):
                pass
            self.assertEqual(session.finish, "stop")
            session.rollback(session.committed_len, 65)
            self.assertIsNone(session.finish)
            session.decode(1)
            self.assert_in_step(session)

    def test_lost_and_forgotten(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 20)
        client, broken = self.breaking("/rollback")
        session = client.session(prompt, sampling=GREEDY)
        session.decode(9)
        broken.append(True)
        self.assertRaises(tv.TransportError, session.rollback, len(prompt) + 2)
        broken.clear()
        self.assertEqual(session.new_tokens, plain[:10])
        self.assertTrue(session.rollback(len(prompt) + 2).replayed)
        session.decode(4)
        broken.append(True)
        self.assertRaises(tv.TransportError, session.rollback, len(prompt) + 2)
        broken.clear()
        with self.assertRaises(tv.MovedError):  # it was done: the text handed out is not the server's any more
            session.decode(1)
        self.assertEqual(session.new_tokens, plain[:3])
        self.raw.call("DELETE", f"/v1/sessions/{session.id}")
        self.assertEqual(session.rollback(len(prompt) + 1).recovered, "resumed")
        self.assertEqual(session.new_tokens, plain[:2])
        self.assert_in_step(session)
        session.close()


class HeldTest(BranchTest):
    def test_the_rule_proposes(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 12)
        with self.client.session(prompt, sampling=GREEDY) as session:
            tree = Tree.chain([*plain[:4], 1])
            round = session.verify(tree, hold=True, want=Want(top_k=1))
            self.assertTrue(round.held)
            self.assertEqual((round.accepted_nodes, round.new_tokens), ([0, 1, 2, 3], plain[1:5]))
            self.assertEqual((session.new_tokens, session.held), (plain[:1], tree))
            self.assert_in_step(session)
            with self.assertRaises(tv.ConflictError) as caught:
                session.decode(1)
            self.assertEqual(caught.exception.code, "round-held")
            self.assertRaises(tv.TreeError, session.commit, [0, 2], 5)
            self.assertRaises(tv.TreeError, session.commit, [1], 5)
            self.assertRaises(ValueError, session.commit, [0])
            self.assertRaises(ValueError, session.commit, [], 5)
            done = session.commit(round.accepted_nodes, round.pending)
            self.assertEqual((done.new_tokens, done.lossless, done.held), (plain[1:5], True, False))
            self.assertIsNone(session.held)
            self.assert_in_step(session)
            self.assertRaises(RuntimeError, session.commit, [0], 1)
            session.verify(Tree.chain([session.pending, 1]), hold=True)
            discarded = session.commit([])
            self.assertEqual((discarded.new_tokens, session.new_tokens), ([], plain[:5]))
            session.verify(Tree.root(session.pending), hold=True)
            session.rollback(session.committed_len)
            self.assertIsNone(session.held)
            session.decode(7)
            self.assertEqual(session.new_tokens, plain)
            self.assert_in_step(session)

    def test_the_caller_chooses(self):
        """Rule client: the caller takes the argmax of raw rows, and the text is the greedy one, in one call a round."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT)
        want = Want(top_k=1, rows="all")
        with self.client.session(prompt, sampling=Sampling(rule="client", temperature=0.0)) as session:
            session.rollback(session.committed_len, plain[0])
            prev, text = None, [plain[0]]
            self.assertRaises(ValueError, next, session.generate(None, 3))
            while len(text) < COUNT:
                at = len(text)
                tree = Tree.chain([text[-1], *plain[at : at + 3], 1])
                round = session.verify(tree, want=want, commit_prev=prev)
                self.assertEqual((round.held, round.new_tokens, round.pending), (True, [], text[-1]))
                best = round.topk.ids[:, 0].tolist()
                path = [0]
                while (child := tree.child(path[-1], best[path[-1]])) is not None:
                    path.append(child)
                text += [best[node] for node in path]
                prev = (path, best[path[-1]])
                self.assert_in_step(session)
            session.commit(*prev)
            self.assertEqual(session.new_tokens[:COUNT], plain)
            self.assert_in_step(session)

    def test_over_a_flaky_link(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, COUNT + 8)
        proxy = FlakyProxy(self.daemon, 0.25)
        self.addCleanup(self.close_leftovers)
        try:
            with tv.Client(proxy.url, retry=QUICK, timeout_s=20) as client:
                session, prev = client.session(prompt, sampling=GREEDY), None
                pending, text = session.pending, [session.pending]
                while len(text) < COUNT:
                    tree = Tree.chain([pending, *plain[len(text) : len(text) + 2], 1])
                    round = session.verify(tree, hold=True, commit_prev=prev)
                    prev, pending = (round.accepted_nodes, round.pending), round.pending
                    text += round.new_tokens
                    if len(text) % 2:
                        session.commit(*prev)
                        prev = None
                        with session.fork(len(prompt) + 1) as child:
                            self.assertEqual(child.pending, plain[1])
                        session.rollback(session.committed_len - 1)
                        session.decode(1)
                if prev is not None:
                    session.commit(*prev)
                self.assertEqual((text, session.new_tokens), (plain[: len(text)], text))
                self.assert_in_step(session)
        finally:
            proxy.close()

    def test_a_held_round_whose_answer_never_came(self):
        """Nothing of it was handed out: the next call of another kind discards it."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 6)
        client, broken = self.breaking("/verify")
        for repeat in (True, False):
            session = client.session(prompt, sampling=GREEDY)
            broken.append(True)
            self.assertRaises(tv.TransportError, session.verify, Tree.chain(plain[:3]), hold=True)
            broken.clear()
            self.assertIsNone(session.held)
            if repeat:
                self.assertTrue(session.verify(Tree.chain(plain[:3]), hold=True).replayed)
                self.assertIsNotNone(session.held)
                session.commit([0, 1], plain[2])
                session.decode(3)
            else:
                self.assertEqual(session.decode(5).recovered, "resync")
            self.assertEqual(session.new_tokens, plain)
            self.assert_in_step(session)
            session.close()

    def test_a_held_batch_whose_answer_never_came(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 6)
        client, broken = self.breaking("/v1/verify:batch")
        session = client.session(prompt, sampling=GREEDY)
        broken.append(True)
        self.assertRaises(tv.TransportError, client.verify_batch, [(session, Tree.chain(plain[:3]))], rule="client")
        broken.clear()
        self.assertEqual(session.verify(Tree.chain(plain[:6])).recovered, "resync")
        self.assertEqual(session.new_tokens[:6], plain)
        self.assert_in_step(session)
        session.close()

    def test_a_commit_whose_answer_never_came(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 8)
        client, broken = self.breaking("/commit")
        session = client.session(prompt, sampling=GREEDY)

        def lose(path, pending):
            broken.append(True)
            self.assertRaises(tv.TransportError, session.commit, path, pending)
            broken.clear()

        session.verify(Tree.chain(plain[:3]), hold=True)
        lose([0, 1, 2], plain[3])
        self.assertTrue(session.commit([0, 1, 2], plain[3]).replayed)
        session.verify(Tree.chain(plain[3:5]), hold=True)
        lose([0, 1], plain[5])
        found = session.commit([0], plain[4])  # another choice: the first one counts, and its tokens are told
        self.assertEqual((found.recovered, found.new_tokens), ("resync", plain[4:6]))
        session.verify(Tree.root(plain[5]), hold=True)
        lose([0], plain[6])
        round = session.verify(Tree.root(plain[6]), commit_prev=([0], plain[6]))  # the same, in another form
        self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[7:8]))
        self.assertEqual(session.new_tokens, plain)
        self.assert_in_step(session)
        session.close()

    def test_forgotten_while_held(self):
        """The choice survives the session: it is made from the tokens that were chosen."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 9)
        odd = (plain[2] + 1) % 256
        for by_prev in (False, True):
            with self.client.session(prompt, sampling=GREEDY) as session:
                session.verify(Tree.chain([plain[0], plain[1], odd]), hold=True)
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                if by_prev:
                    round = session.verify(Tree.root(odd), commit_prev=([0, 1], odd))
                    self.assertEqual(len(round.new_tokens), 1)
                    self.assertEqual(session.new_tokens, [plain[0], plain[1], odd, *round.new_tokens])
                else:
                    round = session.commit([0, 1], odd)
                    self.assertEqual(round.new_tokens, [plain[1], odd])
                    self.assertEqual(session.new_tokens, [plain[0], plain[1], odd])
                self.assertEqual(round.recovered, "resumed")
                self.assert_in_step(session)
                session.rollback(len(prompt) + 1)
                session.verify(Tree.root(session.pending), hold=True)
                self.raw.call("DELETE", f"/v1/sessions/{session.id}")
                self.assertEqual(session.commit([]).new_tokens, [])
                self.assertEqual(session.new_tokens, plain[:2])
                self.assert_in_step(session)


class AsyncBranchTest(BranchTest):
    def test_the_same_on_an_event_loop(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 10)

        async def calls():
            async with tv.AsyncClient(url_of(self.daemon)) as client:
                session = await client.session(prompt, sampling=GREEDY)
                round = await session.verify(Tree.chain(plain[:3]), hold=True)
                self.assertTrue(round.held)
                round = await session.verify(
                    Tree.root(round.pending), commit_prev=(round.accepted_nodes, round.pending), hold=True
                )
                await session.commit([0], round.pending)
                self.assertEqual(session.new_tokens, plain[:5])
                child = await session.fork(seed=3)
                other = await client.session(prefix=session, prefix_len=len(prompt), sampling=GREEDY)
                self.assertEqual((child.tokens, other.sequence), (session.tokens, [*prompt, plain[0]]))
                await session.rollback(len(prompt) + 1)
                await session.decode(8)
                self.assertEqual(session.new_tokens, plain)
                for one in (session, child, other):
                    await one.close()

        asyncio.run(calls())
