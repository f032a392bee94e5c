"""The C library's sessions against a real daemon, a proxy that loses and repeats, and a daemon that forgets.

usage: client_recovery.py DRIVE TREEVERIFYD MODEL_DIR TEXT [ROUNDS]

DRIVE (tests/cli/drive.c) makes one call of the library for each line it reads. What is handed out must be the plain
text, each token once, whatever happens on the way. ROUNDS with faults: 300 x TV_TEST_SCALE unless given.
"""

import concurrent.futures
import errno
import itertools
import os
import sys
import time
import unittest

from leash import GREEDY, SCALE, SEEDED, LeashTest, joined, tree

from fault_proxy import FaultProxy
from proxy import ContractProxy

from daemon import Daemon, own_port

SEED = int(os.environ.get("TV_TEST_SEED", "20261130"))
ROUNDS = int(sys.argv[5]) if len(sys.argv) > 5 else max(40, int(300 * SCALE))
LENGTH = 740 if SCALE >= 1 else 80  # new tokens of a session
SAMPLINGS = (GREEDY, SEEDED) if SCALE >= 1 else (SEEDED,)
RESYNC, RESUMED = 1, 2


class Recovery(LeashTest):
    def drive_text(self, drive, plain, until, step=5):
        """Rounds of trees along plain until `until` tokens are handed out; what was handed out, and the answers."""
        text, answers = list(plain[:1]), []
        while len(text) < until:
            ahead = plain[len(text) - 1 : len(text) - 1 + step]
            answers.append(drive.say("verify", *tree(ahead, len(answers) % 3)))
            text += answers[-1]["new"]
        return text, answers

    def test_faults_lose_and_double_nothing(self):
        """Answers lost, cut and repeated, requests that come late or twice: the text is the plain one, once."""
        done = tokens = 0
        recovered = {0: 0, RESYNC: 0, RESUMED: 0}
        cases = list(zip(self.prompts(max(2, min(8, ROUNDS // 150))), itertools.cycle((GREEDY, SEEDED))))
        texts = [self.plain(prompt, LENGTH + 20, sampling) for prompt, sampling in cases]
        proxy = FaultProxy(self.daemon.host, self.daemon.port, SEED)
        with self.drive(f"http://127.0.0.1:{proxy.port}") as drive:
            for number in itertools.count():
                (prompt, sampling), plain = cases[number % len(cases)], texts[number % len(cases)]
                self.assertEqual(drive.create(prompt, sampling)["pending"], plain[0])
                text, answers = self.drive_text(drive, plain, min(LENGTH, 4 * ROUNDS // len(cases)))
                self.assertEqual(text, plain[: len(text)])
                kept = self.raw.get(f"/v1/sessions/{answers[-1]['id']}?tail=4096")
                self.assertEqual(kept["tail"], answers[-1]["text"])
                self.assertEqual([*kept["tail"], kept["pending"]], [*prompt, *text])
                for answer in answers:
                    recovered[answer["recovered"]] += 1
                done, tokens = done + len(answers), tokens + len(text)
                drive.say("delete")
                if done >= ROUNDS and number + 1 >= len(cases):
                    break
        counts = proxy.close()
        print(f"seed {SEED}: {done} rounds, {tokens} tokens, recovered {recovered}, faults {counts}")
        self.assertGreater(counts["stored"], 0)

    def test_calls_that_fail_lose_nothing(self):
        """No retries at all: calls fail, and the next one, whatever it asks, brings what the failed one had done."""
        lost = (0, -errno.EIO)
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, LENGTH + 20)
        found = failed = 0
        proxy = FaultProxy(self.daemon.host, self.daemon.port, SEED + 1)
        with self.drive(f"http://127.0.0.1:{proxy.port}", retries=0) as drive:
            for _ in range(1 if SCALE < 1 else 10):
                while (state := drive.say("create", *GREEDY, 0, joined(prompt), error=lost))["error"] != 0:
                    pass
                text = [state["pending"]]
                while len(text) < LENGTH:
                    ahead = plain[len(text) - 1 : len(text) + 2 + failed % 3]  # not the same tree again
                    answer = drive.say("verify", *tree(ahead, failed % 2), error=lost)
                    text += answer["new"]
                    failed += answer["error"] != 0
                    found += answer["recovered"] == RESYNC
                self.assertEqual(text, plain[: len(text)])
                self.assertEqual([*answer["text"], answer["pending"]], [*prompt, *text])
                if found > 0:
                    break
        proxy.close()
        print(f"{failed} calls failed, {found} brought what one had done")
        if SCALE >= 1:
            self.assertGreater(found, 0)

    def test_a_lost_round_is_found_by_the_next_call(self):
        """Retries used up, the round done: the next call, another one, gives its tokens."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 12)
        with self.drive(self.url) as drive:
            state = drive.create(prompt)
            body = {"seq": 1, "epoch": state["epoch"], "expected_len": len(prompt), "max_tokens": 3}
            self.raw.post(f"/v1/sessions/{state['id']}/decode", body)
            found = drive.chain(plain[:5])
            self.assertEqual((found["recovered"], found["new"], found["nodes"]), (RESYNC, plain[1:4], []))
            self.assertEqual(drive.say("decode", 2)["new"], plain[4:6])
            for seq in range(3, 9):  # more than the server keeps: round-evicted
                body = {"seq": seq, "epoch": state["epoch"], "expected_len": len(prompt) + seq + 2, "max_tokens": 1}
                self.raw.post(f"/v1/sessions/{state['id']}/decode", body)
            found = drive.say("decode", 1)
            self.assertEqual((found["recovered"], found["new"]), (RESYNC, plain[6:12]))

    def test_somebody_else_moves_the_session(self):
        prompt = self.prompts(1)[0]
        with self.drive(self.url) as drive:
            state = drive.create(prompt)
            body = {"seq": 1, "epoch": state["epoch"], "expected_len": len(prompt)}
            self.raw.post(f"/v1/sessions/{state['id']}/extend", {**body, "tokens": [65, 66]})
            moved = drive.say("decode", 1, error=-errno.ESTALE)
            self.assertEqual(moved["text"], [*prompt, 65, 66])
            drive.say("decode", 1)
            state = drive.create(prompt)
            body["epoch"] = state["epoch"]
            self.raw.post(f"/v1/sessions/{state['id']}/decode", {**body, "max_tokens": 1})
            drive.say("extend", 0, "65", error=-errno.ESTALE)
            drive.say("extend", 0, "65")

    def test_a_forgotten_session_is_made_anew(self):
        prompt = self.prompts(1)[0]
        for sampling in SAMPLINGS:
            plain = self.plain(prompt, 40, sampling)
            with self.drive(self.url) as drive:
                first = drive.create(prompt, sampling)["id"]
                drive.say("decode", 9)
                self.raw.call("DELETE", f"/v1/sessions/{first}")
                round = drive.chain(plain[9:14])
                self.assertEqual((round["recovered"], round["new"]), (RESUMED, plain[10:15]))
                self.assertNotEqual(round["id"], first)
                self.raw.call("DELETE", f"/v1/sessions/{round['id']}")
                round = drive.say("decode", 5)
                self.assertEqual((round["recovered"], round["resumed"]), (RESUMED, 2))
                self.assertEqual([*round["text"], round["pending"]], [*prompt, *plain[:20]])
                before = [*round["text"], round["pending"]]
                self.raw.call("DELETE", f"/v1/sessions/{round['id']}")
                round = drive.say("extend", 1, "65,66")
                self.assertEqual(round["text"], [*before, 65, 66])
                self.raw.call("DELETE", f"/v1/sessions/{round['id']}")
                self.assertEqual(drive.say("extend", 0, "67")["text"], [*before, 65, 66, 67])

    def test_a_token_that_was_handed_out_stays(self):
        """The new session draws another token at that position than the one here: the one handed out is kept."""
        prompt = self.prompts(1)[0]
        with self.drive(self.url) as drive:
            drive.create(prompt)
            round = drive.say("rollback", len(prompt), 1)  # no model says 1 here
            self.assertEqual(round["pending"], 1)
            self.raw.call("DELETE", f"/v1/sessions/{round['id']}")
            round = drive.chain([1, 65])
            self.assertEqual((round["recovered"], round["nodes"][0]), (RESUMED, 0))
            self.assertEqual(round["text"][len(prompt)], 1)
            back = drive.say("rollback", len(prompt) - 5, -1)
            self.assertEqual((back["text"], back["pending"]), (prompt[:-5], prompt[-5]))
            self.assertEqual(back["prompt_len"], len(prompt) - 5)

    def test_a_restart_in_the_middle(self):
        """Another daemon with another epoch behind the same address: the text goes on, greedy and seeded."""
        prompt = self.prompts(1)[0]
        for sampling in SAMPLINGS:
            plain = self.plain(prompt, 60, sampling)
            first = Daemon(self.SERVER, self.MODEL).__enter__()
            proxy = ContractProxy(first.host, first.port)
            proxy.server.handle_error = lambda *_: None  # connections to the first daemon end
            with self.drive(proxy.url) as drive:
                epoch = drive.create(prompt, sampling)["epoch"]
                text, _ = self.drive_text(drive, plain, 20)
                first.__exit__(None, None, None)
                proxy.server.upstream = (self.daemon.host, self.daemon.port)
                answers = []
                while len(text) < 50:
                    answers.append(drive.say("verify", *tree(plain[len(text) - 1 : len(text) + 4], 1)))
                    text += answers[-1]["new"]
                self.assertEqual(text, plain[: len(text)])
                self.assertEqual([answer["recovered"] for answer in answers[:2]], [RESUMED, 0])
                self.assertNotEqual(answers[-1]["epoch"], epoch)
                self.assertEqual(answers[-1]["resumed"], 1)
            proxy.close()

    def test_a_slow_start_is_waited_for(self):
        """Longer than two attempts take, by far: connections are refused, so nothing was sent, and nothing is lost."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 8)
        options = ("--threads", "1", "--listen-admin", "off", "--drain-grace-s", "0")
        options = (*options, "--listen", f"127.0.0.1:{own_port()}")
        with Daemon(self.SERVER, self.MODEL, *options) as daemon:
            url = f"http://{daemon.host}:{daemon.port}"
            drive = self.drive(url, retries=1).__enter__()
            drive.create(prompt)
            self.assertEqual(drive.say("decode", 3)["new"], plain[1:4])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(drive.say, "decode", 4)
            time.sleep(0.5)
            self.assertFalse(call.done())
            with Daemon(self.SERVER, self.MODEL, *options):
                round = call.result()
                self.assertEqual((round["recovered"], round["new"]), (RESUMED, plain[4:8]))
                self.assertGreater(round["attempts"], 3)
                drive.say("delete")
        drive.__exit__()

    def test_finish_and_limits(self):
        prompt = self.prompts(1)[0]
        with self.drive(self.url) as drive:
            drive.create(prompt, max_len=len(prompt) + 4)
            round = drive.say("decode", 100)
            self.assertEqual((round["finish"], len(round["new"])), ("length", 3))
            drive.say("decode", 1, error=-errno.EPROTO)
            self.assertEqual(drive.say("rollback", len(prompt), -1)["finish"], "")


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main(verbosity=2)
