"""What shadow mode costs rounds that did not ask for it: the same rounds on daemons that differ in --shadow alone.

usage: shadow_cost.py TREEVERIFYD MODEL [TURNS] [NODES] [PREFIX]

Every turn sends one round to each daemon, the order changing, and waits until the oracles are idle, so that each round is
captured whole and judged (with a backlog the capture is cut short, and the cost looks smaller than it is). Printed for each
mode: the round trip, and the processor time of all threads but the oracle's, which a loaded machine does not distort.
"""

import os
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session  # noqa: E402

MODES = ("off", "sample:0.01", "all")


def thread_stat(pid, thread):
    with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
        return file.read().rsplit(")", 1)[1].split()


def live_ms(pid):
    """Processor time of the threads that serve, in ms; the oracle's is nicer than the first one."""
    total, nice = 0, int(thread_stat(pid, pid)[16])
    for thread in os.listdir(f"/proc/{pid}/task"):
        if int(thread_stat(pid, thread)[16]) <= nice:
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    return total / 1e6


class Side:
    """One daemon, its session and what its rounds took."""

    def __init__(self, program, model, mode, prefix, folder):
        self.mode, self.times, self.cpu, self.judged = mode, [], [], 0
        self.daemon = Daemon(program, model, "--threads", "1", "--shadow", mode, "--state-dir", folder)
        self.daemon.__enter__()
        self.client = self.daemon.client()
        self.session = Session(self.client, prefix, sampling={"rule": "greedy"})

    def play(self, drafts, parents):
        cpu, start = live_ms(self.daemon.process.pid), time.perf_counter()
        self.session.verify(drafts, parents)
        self.times.append(1e3 * (time.perf_counter() - start))
        self.cpu.append(live_ms(self.daemon.process.pid) - cpu)
        if self.mode == "all":
            while sum(self.client.get("/v1/parity")["rounds"].values()) < len(self.times):
                time.sleep(0.002)

    def report(self):
        rounds = self.client.get("/v1/parity")["rounds"]
        deciles = statistics.quantiles(self.times, n=10)
        print(
            f"--shadow {self.mode:11} p10 {deciles[0]:.2f} ms, p50 {deciles[4]:.2f} ms, p90 {deciles[8]:.2f} ms; "
            f"processor {statistics.median(self.cpu):.3f} ms a round; {rounds}"
        )


def main():
    program, model = sys.argv[1], sys.argv[2]
    turns, nodes, length = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((3, 100), (4, 16), (5, 200)))
    source = random.Random(1)
    prefix = [source.randrange(256) for _ in range(length)]
    drafts = [3 * i % 251 for i in range(1, nodes)]  # all different: no two siblings are equal
    parents = [(i - 1) // 2 for i in range(1, nodes)]
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(program, model, mode, prefix, folder) for mode in MODES]
        print(f"{turns} turns of {nodes} nodes behind {length} tokens, load {os.getloadavg()[0]:.1f}")
        for turn in range(turns):
            first = turn % len(sides)
            for side in sides[first:] + sides[:first]:
                side.play(drafts, parents)
        for side in sides:
            side.report()
        plain = sides[0]
        for side in sides[1:]:
            pairs = [b - a for a, b in zip(plain.cpu, side.cpu)]
            share = statistics.median(pairs) / statistics.median(plain.cpu)
            print(f"--shadow {side.mode}: {statistics.median(pairs):+.3f} ms of processor time a round, {share:+.1%}")
        print(f"load {os.getloadavg()[0]:.1f}")
        for side in sides:
            side.client.close()
            side.daemon.__exit__(None, None, None)


if __name__ == "__main__":
    main()
