"""A server that is stopped and started again under a client: the session goes on, and nothing is asked for twice."""

import concurrent.futures
import tempfile
import time
import unittest

from harness import GREEDY, MODEL, QUICK, SEEDED, SERVER, Daemon, prompts, url_of

from daemon import own_port

from treeverify import Client, Retry, Tree


class RestartTest(unittest.TestCase):
    def test_a_slow_start_is_waited_for(self):
        """Longer than two attempts take, by far: connections are refused, so nothing was sent, and nothing is lost."""
        prompt = prompts(1)[0]
        options = ("--threads", "1", "--listen-admin", "off", "--drain-grace-s", "0")
        options = (*options, "--listen", f"127.0.0.1:{own_port()}")
        retry = Retry(attempts=2, base_s=0.01, cap_s=0.02, restart_s=100.0)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            with Daemon(SERVER, MODEL, *options) as first:
                client = Client(url_of(first), retry=retry, timeout_s=60)
                session = client.session(prompt, sampling=GREEDY)
                session.decode(3)
                text = session.new_tokens
            call = pool.submit(session.decode, 3)
            before = client.retries
            while client.retries < before + 20 and not call.done():
                time.sleep(0.01)
            with Daemon(SERVER, MODEL, *options):
                round = call.result(timeout=120)
                self.assertEqual(round.recovered, "resumed")
                self.assertEqual(session.new_tokens, [*text, *round.new_tokens])
                session.close()
            self.assertFalse(client.health())  # at once
            client.close()

    def test_sessions_outlive_their_server(self):
        options = ("--threads", "1", "--pages", "80", "--drain-grace-s", "0", "--listen-admin", "off")
        options = (*options, "--snapshot-bytes", str(1 << 30))
        prompt = prompts(1)[0]
        with tempfile.TemporaryDirectory() as state_dir:
            options = (*options, "--state-dir", state_dir)
            options = (*options, "--listen", f"127.0.0.1:{own_port()}")  # both of them
            with Daemon(SERVER, MODEL, *options) as first:
                client = Client(url_of(first), retry=QUICK, timeout_s=60)
                sessions, plain = [], []
                for sampling in (GREEDY, SEEDED):
                    with client.session(prompt, sampling=sampling) as session:
                        session.decode(29)
                        plain.append(session.new_tokens)
                    sessions.append(client.session(prompt, sampling=sampling, lease_s=600))
                    sessions[-1].decode(4)
                forked = client.session(prompt, sampling=GREEDY, lease_s=600)
                forked.decode(4)
                ids = [session.id for session in sessions]
                held = client.session(prompt, sampling=GREEDY, lease_s=600)
                held.verify(Tree([held.pending], [-1]), hold=True)
                # a round whose answer never comes: it is done, and the client does not know
                body = {"seq": 2, "epoch": sessions[0].epoch, "expected_len": sessions[0].committed_len, "max_tokens": 3}
                raw = first.client()
                raw.post(f"/v1/sessions/{ids[0]}/decode", body)
                raw.post(f"/v1/sessions/{forked.id}/decode", {**body, "epoch": forked.epoch})
                raw.close()
            with Daemon(SERVER, MODEL, *options):
                rounds = [session.decode(3) for session in sessions]
                self.assertEqual([round.recovered for round in rounds], ["resync", "resync"])
                self.assertEqual([session.id for session in sessions], ids)
                for session, text in zip(sessions, plain):
                    session.decode(6)
                    self.assertIsNone(session.decode(2).recovered)
                    self.assertEqual(session.new_tokens, text[: len(session.new_tokens)])
                round = held.commit([0], plain[0][1])  # the round that it holds is there too
                self.assertEqual((round.recovered, held.new_tokens), ("resync", plain[0][:2]))
                held.decode(2)
                self.assertEqual(held.new_tokens, plain[0][:4])
                before = forked.sequence  # a fork hands nothing out, so it must not take the lost round's tokens in
                for length in (None, len(prompt) + 2):
                    with forked.fork(length) as child:
                        self.assertEqual(child.sequence, before[: None if length is None else length + 1])
                        child.decode(3)
                        self.assertEqual(child.new_tokens, plain[0][: len(child.new_tokens)])
                    self.assertEqual(forked.sequence, before)
                round = forked.decode(3)
                self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[0][5:8]))
                self.assertEqual(forked.new_tokens, plain[0][:8])
                client.close()
