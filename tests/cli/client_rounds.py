"""The C library's rounds beyond plain ones, against a real daemon: held rounds, branches, rows of logits, rounds sent ahead,
and events.

usage: client_rounds.py DRIVE TREEVERIFYD MODEL_DIR TEXT

DRIVE (tests/cli/drive.c) makes one call of the library for each line it reads. TV_TEST_SCALE below 1 shortens loops.
"""

import errno
import os
import random
import subprocess
import sys
import tempfile
import unittest

from leash import Drive, GREEDY, SCALE, SEEDED, LeashTest, chain, joined, tree

from delay_proxy import DelayProxy
from fault_proxy import FaultProxy

SEED = int(os.environ.get("TV_TEST_SEED", "20261130"))
LENGTH = 80 if SCALE >= 1 else 20
SAMPLINGS = (GREEDY, SEEDED) if SCALE >= 1 else (SEEDED,)
RESYNC, RESUMED = 1, 2
CLIENT = ("client", 1, 7)
STOP, PATH, ALL = 1, 2, 3
# under TSan only what has a thread of the library's own
alone = unittest.skipIf(os.environ.get("TV_SANITIZE") == "thread", "one thread")
INVALID, BUSY, REFUSED = -errno.EINVAL, -errno.EBUSY, -errno.EPROTO


class Rounds(LeashTest):
    def in_step(self, answer):
        state = self.raw.get(f"/v1/sessions/{answer['id']}?tail=4096")
        self.assertEqual((state["tail"], state["pending"], state["digest"]),
                         (answer["text"], answer["pending"], answer["digest"]))
        self.assertEqual((state["next_seq"], state["held_seq"] or 0), (answer["next_seq"], answer["held_seq"]))

    # --- held rounds -----------------------------------------------------------------------------------------------

    @alone
    def test_a_held_round_is_settled(self):
        """Proposed, and committed in part, whole, not at all, or with the next round."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 20)
        with self.drive(self.url) as drive:
            drive.create(prompt)
            held = drive.say("with", "-", 1, 0, 0, *chain(plain[:4]))
            self.assertEqual((held["held"], held["nodes"], held["new"]), (1, [0, 1, 2, 3], plain[1:5]))
            self.assertEqual((held["text"], held["pending"], held["held_seq"]), (prompt, plain[0], 1))
            self.in_step(held)
            for wrong in (("0,2", 5), ("1", 5), ("0,1", -1), ("-", 5), ("0,9", 5)):
                drive.say("commit", *wrong, error=INVALID)
            drive.say("decode", 1, error=REFUSED)
            part = drive.say("commit", "0,1", plain[2])
            self.assertEqual((part["nodes"], part["new"], part["held"]), ([0, 1], plain[1:3], 0))
            self.in_step(part)
            drive.say("commit", "0", 5, error=INVALID)
            drive.say("with", "-", 1, 0, 0, *chain(plain[2:5]))
            none = drive.say("commit", "-", -1)
            self.assertEqual((none["nodes"], none["new"], none["pending"]), ([], [], plain[2]))
            drive.say("with", "-", 1, 0, 0, *chain(plain[2:5]))
            drive.say("with", "-", 0, 0, 0, *chain(plain[3:5]), "0,1", plain[4], error=INVALID)  # node 0 is another
            both = drive.say("with", "-", 0, 0, 0, *chain(plain[4:7]), "0,1", plain[4])
            self.assertEqual((both["new"], both["pending"]), (plain[5:8], plain[7]))
            self.assertEqual([*both["text"], both["pending"]], [*prompt, *plain[:8]])
            self.in_step(both)
            drive.say("with", "-", 1, 0, 0, *chain(plain[7:9]))
            back = drive.say("rollback", len(prompt) + 3, -1)
            self.assertEqual((back["held_seq"], back["pending"]), (0, plain[3]))
            self.in_step(back)

    @alone
    def test_the_client_chooses_from_rows(self):
        """Rule client: the best token of each row is the greedy text."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 10)
        with self.drive(self.url) as drive:
            text = [drive.create(prompt, CLIENT)["pending"]]
            while len(text) < 6:
                held = drive.say("with", "-", 0, ALL, 0, *chain([text[-1], plain[len(text)]]))
                self.assertEqual((held["held"], held["nodes"], held["new"], held["rows"]), (1, [], [], [0, 1]))
                rows = [held["logits"][i * held["vocab"] : (i + 1) * held["vocab"]] for i in (0, 1)]
                best = [row.index(max(row)) for row in rows]
                if text == plain[: len(text)]:
                    self.assertEqual(best[0], plain[len(text)])
                taken = [0, 1] if best[0] == plain[len(text)] else [0]
                told = drive.say("commit", joined(taken), best[len(taken) - 1])
                text += told["new"]
                self.in_step(told)
            greedy = drive.say("with", "greedy", 0, STOP, 0, *chain(text[-1:]))
            self.assertEqual((greedy["held"], len(greedy["logits"])), (0, greedy["vocab"]))
            self.assertEqual(greedy["logits"].index(max(greedy["logits"])), greedy["new"][0])

    @alone
    def test_rows_are_the_servers(self):
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 6)
        with self.drive(self.url) as drive:
            drive.create(prompt)
            round = drive.say("with", "-", 0, PATH, 0, *tree(plain[:4], 1))
            body = {"tokens": prompt, "tree": {"tokens": plain[:3], "parents": [-1, 0, 1]},
                    "want": {"top_k": 1, "rows": "path"}, "sampling": {"rule": "greedy"}}
            best = self.raw.post("/v1/verify", body)
            self.assertEqual(round["rows"], round["nodes"])
            rows = [round["logits"][i * round["vocab"] : (i + 1) * round["vocab"]] for i in range(3)]
            self.assertEqual([row.index(max(row)) for row in rows], best["new_tokens"])
            drive.say("with", "no-such", 0, 0, 0, *chain(plain[3:4]), error=INVALID)
            drive.say("with", "-", 0, 9, 0, *chain(plain[3:4]), error=INVALID)

    @alone
    def test_a_lost_proposal_is_discarded(self):
        """The round is held and its answer never came: the next call is not refused for it."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 8)
        proxy = FaultProxy(self.daemon.host, self.daemon.port, SEED + 5)
        found = 0
        with self.drive(f"http://127.0.0.1:{proxy.port}", retries=0) as drive:
            lost = (0, -errno.EIO)
            while drive.say("create", *GREEDY, 0, joined(prompt), error=lost)["error"] != 0:
                pass
            for _ in range(400 if SCALE >= 1 else 20):
                held = drive.say("with", "-", 1, 0, 0, *chain(plain[:3]), error=lost)
                if held["error"] == 0 and held["held"]:
                    while (said := drive.say("commit", "-", -1, error=lost))["error"] != 0:
                        pass
                    self.assertEqual(said["new"], [])
                else:
                    while (said := drive.say("rollback", len(prompt), -1, error=lost))["error"] != 0:
                        pass
                    found += said["recovered"] == RESYNC
                self.assertEqual((said["text"], said["pending"], said["held_seq"]), (prompt, plain[0], 0))
                if found >= 2:
                    break
        proxy.close()
        if SCALE >= 1:
            self.assertGreater(found, 0)

    @alone
    def test_a_choice_outlives_its_session(self):
        """commit and commit_prev of a session that the server has forgotten: the choice is part of the new one."""
        prompt = self.prompts(1)[0]
        plain = self.plain(prompt, 12)
        with self.drive(self.url) as drive:
            drive.create(prompt)
            held = drive.say("with", "-", 1, 0, 0, *chain(plain[:4]))
            self.raw.call("DELETE", f"/v1/sessions/{held['id']}")
            told = drive.say("commit", "0,1,2", plain[3])
            self.assertEqual((told["recovered"], told["new"]), (RESUMED, plain[1:4]))
            self.in_step(told)
            held = drive.say("with", "-", 1, 0, 0, *chain(plain[3:6]))
            self.raw.call("DELETE", f"/v1/sessions/{held['id']}")
            told = drive.say("with", "-", 0, 0, 0, *chain(plain[5:8]), "0,1", plain[5])
            self.assertEqual((told["recovered"], told["new"]), (RESUMED, plain[6:9]))
            self.assertEqual([*told["text"], told["pending"]], [*prompt, *plain[:9]])
            self.in_step(told)

    # --- branches --------------------------------------------------------------------------------------------------

    @alone
    def test_forks_and_prefixes(self):
        prompt = self.prompts(1)[0]
        for sampling in SAMPLINGS:
            plain = self.plain(prompt, 20, sampling)
            with self.drive(self.url) as drive:
                drive.create(prompt, sampling)
                parent = drive.say("decode", 9)
                for length in (0, len(prompt) + 4):
                    drive.say("fork", length, "-", 77)
                    child = drive.say("swap")
                    self.assertNotEqual(child["id"], parent["id"])
                    self.assertEqual(child["text"], parent["text"][: length or None])
                    self.assertEqual(child["seed"], parent["seed"])
                    self.in_step(child)
                    more = drive.say("decode", 20 - (len(child["text"]) - len(prompt)) - 1)
                    self.assertEqual([*more["text"], more["pending"]], [*prompt, *plain])
                    drive.say("delete")
                    drive.say("swap")
                for wrong in ((-1, "-", 0), (len(prompt) + 99, "-", 0), (0, "12x", 0), (0, "-", -1)):
                    drive.say("fork", *wrong, error=INVALID)
                self.raw.call("DELETE", f"/v1/sessions/{parent['id']}")
                again = drive.say("fork", 0, "99" if sampling is SEEDED else "-", 0)
                self.assertEqual((again["resumed"], again["text"]), (1, parent["text"]))
                child = drive.say("swap")
                self.assertEqual((child["text"], child["pending"]), (parent["text"], parent["pending"]))
                self.assertEqual(child["seed"], "99" if sampling is SEEDED else "")

    @alone
    def test_a_prefix_is_named_and_else_sent(self):
        prompt = self.prompts(1, 200)[0]
        with self.drive(self.url) as drive:
            parent = drive.create(prompt)
            drive.say("prefix", 150)
            child = drive.say("swap")
            self.assertEqual(child["text"], prompt[:150])
            self.assertGreaterEqual(child["cached"], 128)
            self.in_step(child)
            drive.say("swap")
            self.raw.call("DELETE", f"/v1/sessions/{parent['id']}")
            drive.say("prefix", 0)
            child = drive.say("swap")
            self.assertEqual(child["text"], prompt)
            drive.say("prefix", 201, error=INVALID)

    # --- rounds sent ahead -----------------------------------------------------------------------------------------

    def guesses(self, text, at, random_, wrong, count):
        """Words of an `if` behind the chain text[at - 3 : at]: its whole path, and the token behind it."""
        ends = [(text[at] + 1 + i) % 256 for i in range(count)]
        if random_.random() >= wrong:
            ends[random_.randrange(count)] = text[at]
        words = []
        for end in dict.fromkeys(ends):
            words += [2, end, *chain([end, *text[at + 1 : at + 3]])]
        return words, text[at] in ends

    def ahead(self, drive, text, length, wrong, count, seed, retry=(0,)):
        """Rounds of chains of three along text, each with guesses about it sent behind; what came."""
        random_, at, answers, right = random.Random(seed), 0, [], 0
        while len(answers) == 0 or at < length:
            if not answers or answers[-1]["under_way"] == 0:
                sent = drive.say("send", *chain(text[at : at + 3]), error=retry)
                self.assertEqual(sent["under_way"], 1)
            words, holds = self.guesses(text, at + 3, random_, wrong, count)
            self.assertEqual(drive.say("if", *words)["under_way"], 2)
            answers.append(drive.say("receive", error=retry))
            self.assertEqual(answers[-1]["new"], text[at + 1 : at + 1 + len(answers[-1]["new"])])
            at += len(answers[-1]["new"])
            right += answers[-1]["guess"] >= 0
            if answers[-1]["recovered"] == 0:
                self.assertEqual(answers[-1]["guess"] >= 0, holds)
        if answers[-1]["under_way"]:
            answers.append(drive.say("receive", error=retry))
        return answers, right

    def test_rounds_ahead_are_the_same_text(self):
        for sampling in SAMPLINGS:
            for wrong, count in ((0.0, 1), (0.4, 1), (1.0, 1), (0.3, 4)):
                prompt = self.prompts(1)[0]
                text = self.plain(prompt, LENGTH + 12, sampling)
                with self.drive(self.url) as drive:
                    drive.create(prompt, sampling)
                    answers, right = self.ahead(drive, text, LENGTH, wrong, count, SEED)
                    last = answers[-1]
                    whole = [*last["text"], last["pending"]]
                    self.assertEqual(whole, [*prompt, *text][: len(whole)])
                    self.assertEqual({answer["recovered"] for answer in answers}, {0})
                    self.assertEqual(right == 0, wrong == 1.0)
                    self.in_step(last)
                    drive.say("decode", 2)

    def test_faults_lose_and_double_nothing(self):
        """Two rounds under way through a proxy that loses, cuts, repeats and reorders."""
        prompt = self.prompts(1)[0]
        text = self.plain(prompt, 12 + 5 * LENGTH, SEEDED)
        proxy = FaultProxy(self.daemon.host, self.daemon.port, SEED + 2)
        with self.drive(f"http://127.0.0.1:{proxy.port}") as drive:
            drive.create(prompt, SEEDED)
            answers, right = self.ahead(drive, text, 5 * LENGTH, 0.3, 2, SEED)
            last = answers[-1]
            whole = [*last["text"], last["pending"]]
            self.assertEqual(whole, [*prompt, *text][: len(whole)])
            self.in_step(last)
        counts = proxy.close()
        print(f"{len(answers)} rounds, {right} guesses right, {counts}")
        self.assertGreater(right, 0)

    def test_ahead_over_a_link(self):
        """Over a link with a round trip, right guesses stay under way one after another."""
        prompt = self.prompts(1)[0]
        text = self.plain(prompt, 48)
        with DelayProxy(self.daemon.host, self.daemon.port, 0.04) as link, self.drive(link.url) as drive:
            drive.create(prompt)
            answers, right = self.ahead(drive, text, min(36, LENGTH), 0.0, 1, SEED)
        self.assertGreaterEqual(right, len(answers) - 2)

    def test_what_is_refused_ahead(self):
        prompt = self.prompts(1)[0]
        text = self.plain(prompt, 12)
        with self.drive(self.url) as drive:
            drive.create(prompt)
            drive.say("receive", error=INVALID)
            drive.say("if", 0, text[1], *chain(text[1:2]), error=INVALID)
            drive.say("send", *chain([text[0] + 1]), error=INVALID)
            drive.say("send", *chain(text[:2]))
            for words in (("send", *chain(text[:2])), ("decode", 1), ("fork", 0, "-", 0), ("verify", *chain(text[:1]))):
                drive.say(*words, error=BUSY)
            drive.say("if", 2, text[2], *chain(text[2:3]), error=INVALID)  # no such node
            drive.say("if", 1, text[2], *chain(text[3:4]), error=INVALID)  # another token
            drive.say("if", error=INVALID)
            drive.say("if", 1, text[2], *chain(text[2:3]))
            drive.say("if", 1, text[2], *chain(text[2:3]), error=BUSY)
            gone = drive.say("delete")  # gives up what is under way
            self.assertEqual(gone["under_way"], 0)
            drive.create(prompt)
            drive.say("with", "-", 1, 0, 0, *chain(text[:2]))
            drive.say("send", *chain(text[:2]), error=INVALID)
            drive.create(prompt)
            drive.say("send", *chain(text[:2]))  # and the session is destroyed under it

    def test_the_number_went_to_another_tree(self):
        """A call that was given up had used the round's number: the skipped round behind it tells of that tree."""
        prompt = self.prompts(1)[0]
        text = self.plain(prompt, 16)
        with self.drive(self.url) as drive:
            first = drive.create(prompt)
            tree = {"tokens": text[:4], "parents": [-1, 0, 1, 2]}
            given_up = {"seq": 1, "epoch": first["epoch"], "expected_len": len(prompt), "tree": tree}
            self.raw.post(f"/v1/sessions/{first['id']}/verify", given_up)
            drive.say("send", *chain([text[0], (text[1] + 1) % 256]))
            drive.say("if", 1, text[2], *chain(text[2:4]))
            answer = drive.say("receive")
            self.assertEqual((answer["recovered"], answer["new"], answer["under_way"]), (RESYNC, text[1:5], 0))
            self.in_step(answer)
            self.assertEqual(drive.say("verify", *chain(text[4:7]))["new"], text[5:8])

    @alone
    def test_a_locale_with_commas(self):
        """Numbers of JSON have a point where the program's own have none."""
        prompt = self.prompts(1)[0]
        with tempfile.TemporaryDirectory() as folder:
            made = ["localedef", "-i", "de_DE", "-f", "UTF-8", os.path.join(folder, "de_DE.UTF-8")]
            try:
                code = subprocess.run(made, capture_output=True, timeout=60).returncode
            except FileNotFoundError:
                code = 127
            if code != 0:
                self.skipTest("no locale can be made")
            leaks = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"  # glibc keeps its copy of LOCPATH
            env = dict(os.environ, LOCPATH=folder, LC_ALL="de_DE.UTF-8", ASAN_OPTIONS=leaks)
            text = self.plain(prompt, 4, SEEDED)
            with Drive(self.DRIVE, self.url, env=env) as drive:
                drive.create(prompt, (SEEDED[0], str(SEEDED[1]).replace(".", ","), SEEDED[2]))  # drive reads as it writes
                self.assertEqual(drive.say("verify", *chain(text[:3]))["new"], text[1:4])

    def test_a_session_forgotten_under_way(self):
        prompt = self.prompts(1)[0]
        text = self.plain(prompt, 16)
        with self.drive(self.url) as drive:
            first = drive.create(prompt)
            self.raw.call("DELETE", f"/v1/sessions/{first['id']}")
            drive.say("send", *chain(text[:3]))
            drive.say("if", 2, text[3], *chain(text[3:5]))
            answer = drive.say("receive")
            self.assertEqual((answer["recovered"], answer["new"], answer["under_way"]), (RESUMED, text[1:4], 0))
            self.in_step(answer)

    # --- events ----------------------------------------------------------------------------------------------------

    @alone
    def test_events(self):
        """From the state on, from the beginning, and to the end; and of a session that is no more."""
        prompt = self.prompts(1)[0]
        with self.drive(self.url) as drive:
            drive.create(prompt)
            here = drive.say("follow", drive.say("decode", 2)["id"], -1)
            self.assertEqual(self.event(drive)["event"], "state")
            self.assertEqual(drive.say("event", 0, error=-errno.EAGAIN)["error"], -errno.EAGAIN)
            said = drive.say("decode", 3)
            told = self.event(drive)
            self.assertEqual((told["event"], told["number"], told["told"]), ("commit", 2, said["new"]))
            drive.say("rollback", len(prompt), -1)
            self.assertEqual(self.event(drive)["event"], "rollback")
            drive.say("follow", here["id"], 0)
            self.assertEqual([self.event(drive)["number"] for _ in range(3)], [1, 2, 3])
            drive.say("delete")
            while (last := self.event(drive))["event"] != "end":
                self.assertEqual(last["event"], "lease")
            drive.say("event", 60000, error=-errno.ENODATA)  # the end of the stream, not of a wait
            drive.say("follow", here["id"], 0)
            self.assertEqual(drive.say("event", 20000, error=REFUSED)["code"], "session-not-found")
            drive.say("follow", "a/b", 0, error=INVALID)

    def event(self, drive):
        """The next event but for words about the lease."""
        while True:
            told = drive.say("event", 20000)
            if told["event"] != "lease":
                return told


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main(verbosity=2)
