"""The shipped daemon behind the harness of raw sockets, and a session that watches its own bits.

TREEVERIFYD is the program, TV_MODEL_DIR the bundled checkpoint; every answer is checked against the contract.
"""

import base64
import os
import threading

from harness import Caller, FixedDaemon, round_body, verify_path

MODEL = os.environ.get("TV_MODEL_DIR", "")


class RealDaemon(FixedDaemon):
    """No orders on stdin: this engine computes."""

    def __init__(self, *options, model=MODEL):
        super().__init__("--threads", "1", *options)
        self.program, self.model = os.environ["TREEVERIFYD"], model

    def __exit__(self, kind, value, trace):
        super().__exit__(kind, value, trace)
        self.process.stdin.close()


class Watched:
    """One session in rounds of small trees on a connection of its own; what its rows were, bit by bit."""

    PROMPT = [73, 110, 32, 116, 104, 101, 32, 98, 101, 103]

    def __init__(self, daemon):
        self.caller = Caller(daemon)
        sampling = {"temperature": 0.9, "seed": "77"}
        self.state = self.caller.session(tokens=self.PROMPT, sampling=sampling, lease_s=3600)
        self.rows, self.text = [], [self.state["pending"]]

    def round(self):
        pending = self.state["pending"]
        drafts = [(pending + 1) % 256, (pending + 2) % 256, (pending + 3) % 256]
        want = {"logits": {"rows": "all", "dtype": "f32"}}
        body = round_body(self.state, drafts, [0, 0, 1], want=want)
        answer = self.caller.call("POST", verify_path(self.state), body)
        assert answer.status == 200, answer.body
        self.rows.append(base64.b64decode(answer.json["logits"]["data_b64"]))
        self.text += answer.json["new_tokens"]
        self.state.update(answer.json)

    def close(self):
        self.caller.close()


class Beside:
    """A watched session in rounds while the block runs; afterwards the same rounds alone must have the same bits."""

    def __init__(self, daemon, least=8):
        self.daemon, self.least, self.ending, self.error = daemon, least, threading.Event(), None

    def _run(self):
        try:
            while not self.ending.is_set() or len(self.watched.rows) < self.least:
                self.watched.round()
        except (AssertionError, OSError) as error:
            self.error = error

    def __enter__(self):
        self.watched = Watched(self.daemon)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def __exit__(self, kind, value, trace):
        self.ending.set()
        self.thread.join()
        self.watched.close()
        if kind is not None:
            return
        assert self.error is None, self.error
        alone = Watched(self.daemon)
        for at, rows in enumerate(self.watched.rows):
            alone.round()
            assert alone.rows[at] == rows, f"round {at} has other logits in company than alone"
        assert alone.text == self.watched.text
        alone.close()
