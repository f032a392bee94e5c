"""What clients do not read is held to answers_bytes: the slowest reader is cut, others are not, and nothing is lost.

40 clients that read nothing, one after the other, with far more to read than the limit, beside one that reads on.
Which of them are cut is a matter of order alone; only the 30 s after which any of them would be is a time.
"""

import json
import socket
import unittest

from harness import CONTRACT, Caller, FixedDaemon, Reader, request_bytes, round_body, verify_path, wait_until

LIMIT = 8 << 20
READERS = 40
TREE = {"tokens": [10] + list(range(100, 355)), "parents": [-1] + [0] * 255}
BIG = request_bytes(
    "POST", "/v1/verify", json.dumps({"tokens": [1], "tree": TREE, "want": {"logits": {"rows": "all"}}}).encode()
)
ANSWER_BYTES = 256 * 512 * 4 * 4 // 3  # at least: the logits in base64
LEFT = LIMIT // ANSWER_BYTES + 1  # so many can be in the limit, and one more is being written
CUT_S = 25.0  # before the clock, which cuts after 30 s, could have done it


class Deaf:
    """Takes the first bytes of its answers and nothing more; those behind are more than any buffer holds."""

    def __init__(self, daemon, first=b""):
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(60)
        self.sock.connect((daemon.host, daemon.port))
        self.sock.sendall(first + BIG * 12)
        self.sock.recv(15, socket.MSG_PEEK)


class UnreadTest(unittest.TestCase):
    def test_the_slowest_readers_are_cut(self):
        with FixedDaemon("--answers-bytes", str(LIMIT), "--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            fds, resident = daemon.fds(), daemon.resident_kib()
            steady = daemon.connect()
            steady.sendall(BIG * READERS)
            reader, answers = Reader(steady), 0
            body = json.dumps(round_body(state, list(range(100, 200)), [0] * 100, want={"logits": {"rows": "all"}})).encode()
            clients = [Deaf(daemon, request_bytes("POST", verify_path(state), body))]
            largest = 0
            while len(clients) < READERS:
                clients.append(Deaf(daemon))
                self.assertEqual(reader.answer("POST").status, 200)
                answers += 1
                largest = max(largest, daemon.resident_kib())
            while answers < READERS:
                answer = reader.answer("POST")
                self.assertEqual(answer.status, 200)
                answers += 1
            CONTRACT.check("POST", "/v1/verify", answer.status, answer.headers, answer.body)
            wait_until(lambda: daemon.fds() <= fds + 1 + LEFT, CUT_S, "those that read nothing are cut")
            self.assertIn("the slowest readers are cut", daemon.text())
            print(f"{daemon.fds() - fds - 1} of {READERS} are left; resident {resident} KiB, at most {largest} KiB")
            again = caller.call("POST", verify_path(state), body)  # the first one to be cut never saw it
            self.assertEqual((again.status, again.json["replayed"]), (200, True))
            self.assertEqual(again.json["logits"]["shape"], [101, 512])
            self.assertEqual(caller.call("GET", f"/v1/sessions/{state['session']}").json["next_seq"], 2)
            steady.close()
            for client in clients:
                client.sock.close()
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
